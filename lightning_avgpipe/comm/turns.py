"""Turns: the channels of a stage whose neighbour has replicas, which share the micro-batches in turns.

::

    stage 0, replica 0    0     2     4           stage 1 takes micro-batch i from replica i mod 2,
    stage 0, replica 1       1     3     5        and sends its gradient there
    stage 1               0  1  2  3  4  5
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from lightning_avgpipe.comm.channel import Inbox, Outbox, Traffic
from lightning_avgpipe.comm.message import Message


class TurnsInbox:
    """An inbox that receives from several processes, in turns.

    Args:
        turns: inboxes in the order of turns, which starts anew with each iteration; an inbox may occur several times.
    """

    def __init__(self, turns: Sequence[Inbox]) -> None:
        self._turns = turns
        self._expected: deque[Inbox] = deque()

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Post the receives of the ``count`` messages of an iteration."""
        assert onwards is None  # messages are sent on only between stages without replicas
        self._expected = deque(self._turns[n % len(self._turns)] for n in range(count))
        inboxes = {id(inbox): inbox for inbox in self._expected}
        for number, messages in Counter(map(id, self._expected)).items():
            inboxes[number].expect(messages, observers)

    def ready(self) -> bool:
        """Return whether the next message has arrived."""
        return bool(self._expected) and self._expected[0].ready()

    def get(self) -> Message:
        """Take the next message."""
        return self._expected.popleft().get()

    def close(self, join_s: float) -> None:
        """Do nothing: the transport closes each of the channels."""


class TurnsOutbox:
    """An outbox that sends to several processes, in turns.

    Args:
        turns: outbox of each micro-batch, by the number of the micro-batch modulo ``count``.
        count: number of processes that take turns; this process may send to some of them only.
    """

    def __init__(self, turns: Mapping[int, Outbox], count: int) -> None:
        self._turns = turns
        self._count = count

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send a message to the process that has its micro-batch."""
        self._turns[message.micro_batch % self._count].put(message, observers)

    def close(self, join_s: float) -> None:
        """Do nothing: the transport closes each of the channels."""

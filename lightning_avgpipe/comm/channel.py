"""Channels: one-way FIFO links between stages. A send never blocks compute; receives are posted in advance.

If the replicas of a neighbouring stage share the micro-batches, the channels to them take turns::

    stage 0, replica 0    0     2     4           stage 1 takes micro-batch i from replica i mod 2,
    stage 0, replica 1       1     3     5        and sends its gradient there
    stage 1               0  1  2  3  4  5
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Route


class Traffic:
    """A base class for observers of messages between processes. Its methods do nothing; any thread may call them."""

    def queued(self) -> None:
        """Note that a message is queued to be sent."""

    def sending(self, route: Route, micro_batch: int, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which a queued message is sent: on a stream, or by the host if the stream is None."""
        return contextlib.nullcontext()

    def arrived(self, route: Route, micro_batch: int, stream: Any, at_s: float | None) -> None:
        """Note that a message arrives when the stream reaches this point or, if the stream is None, has arrived.

        ``at_s`` is the time of arrival on the host's clock; None: now.
        """


class Inbox(Protocol):
    """The receiving end of a channel."""

    def expect(self, count: int, observers: Sequence[Traffic] = (), forward_to: Outbox | None = None) -> None:
        """Announce that ``count`` messages will come, so that they are received in advance.

        Args:
            count: number of messages.
            observers: notified when each of them arrives.
            forward_to: channel to which each message is also forwarded; None: it is not forwarded.
        """

    def ready(self) -> bool:
        """Return whether a message has arrived."""

    def get(self) -> Message:
        """Take the oldest message that has arrived."""


class Outbox(Protocol):
    """The sending end of a channel."""

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message to be sent, notify the observers, and return without waiting."""


class MemoryChannel:
    """Both ends of a channel between two stages of one process, as a queue."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()
        self._forward_to: Outbox | None = None
        self._relayed = 0  # number of messages that are still to be forwarded

    def expect(self, count: int, observers: Sequence[Traffic] = (), forward_to: Outbox | None = None) -> None:
        """Forward the next ``count`` messages, including queued ones, to ``forward_to``; without it, do nothing."""
        if forward_to is not None:
            self._forward_to, self._relayed = forward_to, count
            for message in self._queue:
                self._relay(message)

    def _relay(self, message: Message) -> None:
        if self._relayed:
            assert self._forward_to is not None
            self._relayed -= 1
            self._forward_to.put(message.copied())  # either stage may change its tensors in place

    def ready(self) -> bool:
        """Return whether a message is queued."""
        return bool(self._queue)

    def get(self) -> Message:
        """Take the oldest message."""
        return self._queue.popleft()

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message; its tensors are shared, not copied."""
        self._queue.append(message)
        self._relay(message)

    def close(self, join_s: float = 0.0) -> None:
        """Drop the queued messages, and stop forwarding."""
        self._queue.clear()
        self._forward_to, self._relayed = None, 0


class TurnsInbox:
    """An inbox that receives from several processes, in turns.

    Args:
        turns: inboxes in the order of turns, which restarts with each iteration; an inbox may occur several times.
    """

    def __init__(self, turns: Sequence[Inbox]) -> None:
        self._turns = turns
        self._expected: deque[Inbox] = deque()

    def expect(self, count: int, observers: Sequence[Traffic] = (), forward_to: Outbox | None = None) -> None:
        """Post the receives of the ``count`` messages of an iteration."""
        assert forward_to is None  # messages are forwarded only between stages without replicas
        self._expected = deque(self._turns[n % len(self._turns)] for n in range(count))
        for inbox, messages in Counter(self._expected).items():
            inbox.expect(messages, observers)

    def ready(self) -> bool:
        """Return whether the next message has arrived."""
        return bool(self._expected) and self._expected[0].ready()

    def get(self) -> Message:
        """Take the next message."""
        return self._expected.popleft().get()


class TurnsOutbox:
    """An outbox that sends to several processes, in turns.

    Args:
        turns: outboxes by the number of the micro-batch modulo ``count``.
        count: number of processes that take turns; this process may send to only some of them.
    """

    def __init__(self, turns: Mapping[int, Outbox], count: int) -> None:
        self._turns = turns
        self._count = count

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send a message to the process that has its micro-batch."""
        self._turns[message.micro_batch % self._count].put(message, observers)

"""The channel within one process: a queue, of which both ends are one object."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Outbox, Traffic
from lightning_avgpipe.comm.message import Message


class MemoryChannel:
    """Both ends of a channel within one process: between two of its stages, or two threads that stand for processes.

    Args:
        arrivals: told when a message is there; None if nobody waits elsewhere.
    """

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        self._arrivals = arrivals
        self._queue: deque[Message] = deque()
        self._lock = threading.Lock()
        self._onwards: Outbox | None = None
        self._relayed = 0  # so many messages still go on

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Nothing travels; what is to be passed on is, also what is there already."""
        if onwards is not None:
            with self._lock:
                self._onwards, self._relayed = onwards, count
                for message in self._queue:
                    self._relay(message)

    def _relay(self, message: Message) -> None:
        if self._relayed:
            assert self._onwards is not None
            self._relayed -= 1
            self._onwards.put(message.copied())  # this stage, or that one, may change it

    def ready(self) -> bool:
        """Whether a message waits."""
        return bool(self._queue)

    def get(self) -> Message:
        """Take the oldest message."""
        return self._queue.popleft()

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Pass a message on; its tensors are shared, not copied."""
        with self._lock:
            self._queue.append(message)
            self._relay(message)
        if self._arrivals is not None:
            self._arrivals.notify()

    def clear(self) -> None:
        """Drop what was not taken."""
        self._queue.clear()
        self._onwards, self._relayed = None, 0

    def close(self, join_s: float = 0.0) -> None:
        """Drop what was not taken."""
        self.clear()

"""The channel within one process: a queue; one object is both ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Outbox, Traffic
from lightning_avgpipe.comm.message import Message


class MemoryChannel:
    """Both ends of a channel within one process: between two stages, or between threads that stand for processes.

    Args:
        arrivals: notified when a message is put; None if no other thread waits for it.
    """

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        self._arrivals = arrivals
        self._queue: deque[Message] = deque()
        self._lock = threading.Lock()
        self._onwards: Outbox | None = None
        self._relayed = 0  # number of messages that are still to be sent on

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Send the next ``count`` messages on as well, including those that are queued. Nothing else is needed here."""
        if onwards is not None:
            with self._lock:
                self._onwards, self._relayed = onwards, count
                for message in self._queue:
                    self._relay(message)

    def _relay(self, message: Message) -> None:
        if self._relayed:
            assert self._onwards is not None
            self._relayed -= 1
            self._onwards.put(message.copied())  # either stage may change its tensors in place

    def ready(self) -> bool:
        """Return whether a message is queued."""
        return bool(self._queue)

    def get(self) -> Message:
        """Take the oldest message."""
        return self._queue.popleft()

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message; its tensors are shared, not copied."""
        with self._lock:
            self._queue.append(message)
            self._relay(message)
        if self._arrivals is not None:
            self._arrivals.notify()

    def clear(self) -> None:
        """Drop the queued messages, and send no further ones on."""
        self._queue.clear()
        self._onwards, self._relayed = None, 0

    def close(self, join_s: float = 0.0) -> None:
        """Drop the queued messages."""
        self.clear()

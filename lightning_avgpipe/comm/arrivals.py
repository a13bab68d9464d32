"""Arrivals: what wakes a process that waits for others."""

from __future__ import annotations

import math
import threading
import time


class Arrivals:
    """Told of all that arrives in a process, from any thread.

    Attributes:
        condition: to hold while it is looked whether something is there, and to wait on.
        failure: of a channel that cannot go on.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self._moved = -math.inf

    def moved(self) -> None:
        """Bytes went over a connection of this process."""
        self._moved = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._moved

    def notify(self) -> None:
        """Something arrived."""
        with self.condition:
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """A channel cannot go on."""
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

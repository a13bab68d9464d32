"""Arrivals: the notification that wakes a thread which waits for messages of other processes."""

from __future__ import annotations

import math
import threading
import time


class Arrivals:
    """A notification of everything that arrives in a process; any thread may notify.

    Attributes:
        condition: condition variable to hold while one checks what has arrived, and to wait on.
        failure: error of the first channel that cannot go on; None if there is none.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self._moved = -math.inf

    def moved(self) -> None:
        """Note that bytes went over a connection of this process just now."""
        self._moved = time.monotonic()

    def idle_s(self) -> float:
        """Return the seconds since bytes last went over a connection of this process."""
        return time.monotonic() - self._moved

    def notify(self) -> None:
        """Wake all waiting threads because something arrived."""
        with self.condition:
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note the error of a channel that cannot go on, and wake all waiting threads."""
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

"""Transfers: tensors move between hosts in parts, so that a slow link can be told from a silent one.

``Arrivals`` wakes the threads that wait for something, and ``RunningTime`` counts for how long they have waited.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The timeout of connections. gloo breaks a connection that waits for longer, even if no process needs the transfer yet,
# or if all processes were stopped. So connections have no limit; a process that needs something has one: see Waits.
UNLIMITED = timedelta(days=365)
POLL_S = 0.5  # pause of a waiting thread between two looks at the clock
_PART_BYTES = 1024**2  # on a link of 10 Mbit/s one passes every second
_PIECE_BYTES = 64 * 1024  # a smaller part is not worth a message of its own


def transfer(begin: Callable[[Tensor], Any], tensor: Tensor, moved: Callable[[], None]) -> None:
    """Send or receive a tensor in parts, and return when it is done; the arguments are those of its two halves."""
    ended(begun(begin, tensor), moved)


def begun(begin: Callable[[Tensor], Any], tensor: Tensor, pieces: int = 1) -> list[Any]:
    """Begin to send or receive a tensor in parts, and return the works of the parts. Both ends use the same parts.

    Args:
        begin: begins the transfer of a part and returns its work. Parts arrive in the order in which they are begun.
        tensor: one-dimensional, on the host.
        pieces: least number of parts, if the tensor is large enough.
    """
    size = tensor.element_size()
    length = max(1, min(_PART_BYTES // size, max(_PIECE_BYTES // size, -(-tensor.numel() // pieces))))
    return [begin(part) for part in (tensor.split(length) if tensor.numel() > length else (tensor,))]


def ended(works: Sequence[Any], moved: Callable[[], None]) -> None:
    """Wait until the works of a transfer are done, and report each part as moved."""
    for work in works:
        if work is not None:  # None on a process that takes no part
            work.wait(UNLIMITED)
        moved()


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error says that a connection to another process, or to the store, broke.

    gloo raises plain RuntimeErrors, as does much else (such as a lack of memory); its messages name a source file of
    gloo.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


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


class RunningTime:
    """A count of seconds since it was made or reset, without those in which this process was stopped.

    A waiting thread reads it at least every second, so a longer pause between two reads counts as one second.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, seconds: float = 0.0) -> None:
        """Start to count anew, from ``seconds``."""
        self._seconds, self._looked = seconds, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds counted by now."""
        now = time.monotonic()
        self._seconds, self._looked = self._seconds + min(now - self._looked, 2 * POLL_S), now
        return self._seconds

"""Transfers: tensors move between hosts in parts, so that a slow link can be distinguished from a dead one.

``Arrivals`` wakes the waiting thread, and ``RunningTime`` measures how long it has waited.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The timeout of connections: none. gloo breaks a connection that waits for longer than its timeout, even if no process
# needs the transfer yet, or if all processes were stopped. Limits of waits are in Waits.
UNLIMITED = timedelta(days=365)
POLL_S = 0.5  # pause of a waiting thread between two looks at the clock
_PART_BYTES = 1024**2  # largest part; a link of 10 Mbit/s moves one in about a second
_PIECE_BYTES = 64 * 1024  # smallest part, if a tensor is divided for other reasons


def transfer(begin: Callable[[Tensor], Any], tensor: Tensor, moved: Callable[[], None]) -> None:
    """Send or receive a tensor in parts, and wait until it is done; see :func:`start_transfer`."""
    finish_transfer(start_transfer(begin, tensor), moved)


def start_transfer(begin: Callable[[Tensor], Any], tensor: Tensor, pieces: int = 1) -> list[Any]:
    """Start to send or receive a tensor in parts, and return the works of the parts. Both ends use the same parts.

    Args:
        begin: starts the transfer of a part and returns its work. Parts arrive in the order in which they are started.
        tensor: one-dimensional, on the host.
        pieces: minimum number of parts, if the tensor is large enough.
    """
    size = tensor.element_size()
    length = max(1, min(_PART_BYTES // size, max(_PIECE_BYTES // size, -(-tensor.numel() // pieces))))
    return [begin(part) for part in (tensor.split(length) if tensor.numel() > length else (tensor,))]


def finish_transfer(works: Sequence[Any], moved: Callable[[], None]) -> None:
    """Wait until the works of a transfer are done, and report each part as moved."""
    for work in works:
        if work is not None:  # None on a process that takes no part
            work.wait(UNLIMITED)
        moved()


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error means that a connection to another process, or to the store, broke.

    gloo raises plain RuntimeErrors, as many other failures do (such as a lack of memory), but its messages name a
    source file of gloo.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Arrivals:
    """A notification of everything that arrives in a process: any thread may notify, and one thread waits.

    The waiting thread sleeps on sockets: one to which other threads of this process write, and those of
    :class:`Mailbox`, to which other processes write. What is written stays there until it is read, so nothing that
    arrives between a check and a wait is missed.

    Attributes:
        failure: error of the first channel that failed; None if there is none.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._moved = -math.inf
        self._selector = selectors.DefaultSelector()
        self._looks: dict[socket.socket, Callable[[], None]] = {}
        self._bell, ear = socket.socketpair()
        for end in (self._bell, ear):
            end.setblocking(False)
        weakref.finalize(self, close_all, os.getpid(), self._selector, self._bell, ear)
        self.listen(ear, lambda: _empty(ear))

    def listen(self, door: socket.socket, look: Callable[[], None]) -> None:
        """Call ``look`` in the thread that waits, whenever a socket can be read."""
        self._looks[door] = look
        self._selector.register(door, selectors.EVENT_READ)

    def ignore(self, door: socket.socket) -> None:
        """Stop listening to a socket."""
        self._selector.unregister(door)
        self._looks.pop(door)

    def wait(self, limit_s: float) -> None:
        """Wait until something arrives, but at most ``limit_s`` seconds."""
        for key, _ in self._selector.select(limit_s):
            if (look := self._looks.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                look()

    def wait_for(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``ready()``, but at most ``limit_s`` seconds; return whether it is."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            self.wait(left_s)
        return True

    def moved(self) -> None:
        """Note that bytes went over a connection of this process just now."""
        self._moved = time.monotonic()

    def idle_s(self) -> float:
        """Return the seconds since bytes last went over a connection of this process."""
        return time.monotonic() - self._moved

    def notify(self) -> None:
        """Wake the waiting thread because something arrived."""
        with contextlib.suppress(BlockingIOError):  # the socket is full, so the thread will wake anyway
            self._bell.send(b"\0")

    def fail(self, error: BaseException) -> None:
        """Note the error of a channel that failed, and wake the waiting thread."""
        self.failure = self.failure or error
        self.notify()


def _empty(ear: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        ear.recv(4096)


def close_all(owner: int, *ends: Any) -> None:
    """Close files and sockets in the process that made them; in a forked one their numbers may belong to others."""
    for end in ends if os.getpid() == owner else ():
        end.close()


class RunningTime:
    """A count of seconds since it was created or reset, without those in which this process was stopped.

    A waiting thread reads it at least every second, so a longer pause between two reads counts as one second.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, seconds: float = 0.0) -> None:
        """Restart the count at ``seconds``."""
        self._seconds, self._looked = seconds, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds counted so far."""
        now = time.monotonic()
        self._seconds, self._looked = self._seconds + min(now - self._looked, 2 * POLL_S), now
        return self._seconds

"""Lifelines: notice that a process of a group has died during a meeting, in which they do not talk to each other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait

from lightning_avgpipe.comm.collectives import Collectives

_GOODBYE = b"."
_BYTES = 4  # of a rank


class Lifelines:
    """Connections of rank 0 to the other processes of its world, which break when one of them ends without a goodbye.

    The others need none to rank 0, which keeps the store that their watch reads. All processes construct it together.

    Args:
        world: processes of the group.
        host: name or address at which they reach rank 0.
        limit: longest wait for the others to connect.
        notify: called when a process is lost.

    Attributes:
        lost: ranks of processes that have died; known on rank 0.
    """

    def __init__(self, world: Collectives, host: str, limit: timedelta, notify: Callable[[], None]) -> None:
        self.lost: list[int] = []
        self._notify = notify
        self._own: socket.socket | None = None
        self._others: dict[socket.socket, int] = {}
        server = socket.create_server((host, 0)) if world.rank == 0 else None
        port: int = world.broadcast(0 if server is None else server.getsockname()[1])
        if server is None:
            self._own = socket.create_connection((host, port), limit.total_seconds())
            self._own.sendall(world.rank.to_bytes(_BYTES, "big"))
            return
        with server:
            server.settimeout(limit.total_seconds())
            for _ in range(world.world_size - 1):
                other, _ = server.accept()
                other.settimeout(limit.total_seconds())
                self._others[other] = int.from_bytes(other.recv(_BYTES, socket.MSG_WAITALL), "big")
        threading.Thread(target=self._listen, name="avgpipe lifelines", daemon=True).start()

    def _listen(self) -> None:
        while self._others:
            for other in wait(list(self._others)):
                assert isinstance(other, socket.socket)
                try:
                    said = other.recv(1)
                except OSError:
                    said = b""
                rank = self._others.pop(other)
                other.close()
                if said != _GOODBYE:
                    self.lost.append(rank)
                    self._notify()

    def close(self) -> None:
        """Say goodbye to rank 0; on rank 0 itself this does nothing."""
        if self._own is not None:
            with self._own, contextlib.suppress(OSError):  # rank 0 may be gone
                self._own.send(_GOODBYE)

"""Requests: what processes are asked to do from outside, such as to stop by a signal."""

from __future__ import annotations

from lightning_avgpipe.comm.board import Board

STOP, REQUEUE = "stop", "requeue"  # to end, and to save for a later start


class Requests:
    """Those that this process knows of.

    Args:
        gathers: whether this process tells the others of requests, and so must know of all of them.
    """

    def __init__(self, gathers: bool) -> None:
        self._gathers = gathers
        self._known: set[str] = set()
        self._posted: set[str] = set()

    @property
    def known(self) -> frozenset[str]:
        """To this process; where they are gathered, to any."""
        return frozenset(self._known)

    def note(self, request: str) -> None:
        """This process was asked. A signal handler may call it: nothing here waits."""
        self._known.add(request)

    def exchange(self, board: Board) -> None:
        """Post what is new here, and read what is new elsewhere."""
        for request in (STOP, REQUEUE):
            if request in self._known and request not in self._posted:
                self._posted.add(request)
                board.request(request)
            elif self._gathers and request not in self._known and board.requested(request):
                self._known.add(request)

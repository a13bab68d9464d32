"""Failures: what becomes of processes that fail. All end, or the groups of those that have failed leave."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning_avgpipe.comm.board import Board
from lightning_avgpipe.comm.membership import Membership


class Failures:
    """Those that this process knows of.

    Args:
        membership: of the groups, if some may die and others go on; told of those that leave.
        ends: told once why this process ends.
        changed: called when groups have left or come back.

    Attributes:
        cause: what ends this process, once known.
        read_by_all: whether nobody needs the store to learn of it.
    """

    def __init__(self, membership: Membership | None, ends: Callable[[str], None], changed: Callable[[], None]) -> None:
        self.cause: str | None = None
        self.read_by_all = False
        self._reports: dict[int, str] = {}  # rank -> why it fails
        self._membership = membership
        self._gone = 0 if membership is None else membership.count
        self._ends = ends
        self._changed = changed

    def report(self, rank: int, why: str) -> None:
        """A process has failed; to be told with the next exchange."""
        self._reports.setdefault(rank, why)

    def awaits(self, ranks: Collection[int]) -> bool:
        """Whether it is open what becomes of one of these."""
        return self.cause is None and not self._reports.keys().isdisjoint(ranks)

    def exchange(self, board: Board) -> None:
        """Post what is reported here, and take note of what others have posted, and of groups that have left."""
        if self.cause is None:
            self._tell(board)
        if self.cause is None and (cause := board.failure()) is not None:
            self.learn(cause)
        if self.cause is not None and board.read_by_all():
            self.read_by_all = True

    def learn(self, cause: str) -> None:
        """This process ends, unless it does already."""
        if self.cause is None:
            self.cause = cause
            self._ends(cause)

    def _tell(self, board: Board) -> None:
        membership = self._membership
        if membership is not None and self._is_left(membership):
            return  # what is reported here is not of those that take part
        for rank, why in list(self._reports.items()):
            reason = "" if membership is None else membership.leave(membership.group_of(rank), why)
            if membership is None or reason:
                board.post_failure(f"{why}{reason and f'. {reason}'}")
                return
            del self._reports[rank]
        if membership is not None:
            self._is_left(membership)

    def _is_left(self, membership: Membership) -> bool:
        """Take note of groups that have left, or come back; tells whether that of this process has left."""
        left = membership.read()
        if membership.count > self._gone:
            self._gone = membership.count
            self._changed()
        if left is None:
            return False
        self.learn(f"{left}\n\nThe other groups go on without group {membership.group}")
        self.read_by_all = True  # the store outlives it
        return True

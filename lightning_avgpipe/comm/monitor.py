"""The monitor: which process failed and why, what each process is doing, and what the processes were asked to do.

Every process has two threads in addition to the main one. One reads the board (``comm/rounds.py``): with it a process
learns of a failure while its main thread computes, and a process that is stuck can still say where. It blocks as long
as the store does not answer. The other one never blocks (``comm/guard.py``): it ends a process that does not end by
itself after a failure, and notices when processes that this one has started die.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch.distributed as dist

from lightning_avgpipe.comm.activity import ThreadActivity
from lightning_avgpipe.comm.board import Answer, Board, Requests
from lightning_avgpipe.comm.guard import Guard
from lightning_avgpipe.comm.inquiry import Account, Inquiries
from lightning_avgpipe.comm.rounds import Rounds
from lightning_avgpipe.errors import PeerError, described
from lightning_avgpipe.utils.source import traceback_of_user_code

_POLL_S = 0.2  # pause between two exchanges with the board
_ASKING_POLL_S = 0.05  # pause while answers are awaited
_ACKNOWLEDGE_S = 3.0  # how long a failing process stays, so that the others can read why


class Monitor:
    """A process's view of the state of all processes, which they exchange through the store and not through channels.

    Args:
        rank: rank of this process.
        names: names of all processes, by rank, for messages.
        store: store that all processes share; None if there is only one process.
        timeout_s: time, in seconds, that this process may take to end after a failure; at least 5 s and at most 30 s.
        wake: called when a process has failed.
        announces: whether this process forwards requests to the others, and so must read those that others posted.
        keeper: name of the process that keeps the store.
        idle_s: returns the seconds since the connections of this process last moved bytes.
        deaths: returns, for each rank that this process started and that has died, how it ended.

    Attributes:
        activity: what the main thread is doing, for messages.
        requests: requests to the processes from outside.
    """

    def __init__(
        self,
        rank: int,
        names: list[str],
        store: dist.Store | None,
        timeout_s: float,
        wake: Callable[[], None],
        announces: bool = False,
        keeper: str = "",
        idle_s: Callable[[], float] = lambda: math.inf,
        deaths: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        activity = self.activity = ThreadActivity(names, rank)
        self.requests = Requests(announces)
        self._wake = wake
        self._to_report = ""  # failure of this process, which the next exchange posts
        self._cause: str | None = None  # the failure that ends the run, once known
        self._read_by_all = False  # whether all processes have read the failure, so none needs the store
        self._inquiries = Inquiries(names, lambda: Answer(activity.described(), idle_s()))
        self._board = None if store is None else Board(store, rank, len(names))
        self._rounds = Rounds(activity.name, keeper, self._exchange, self._learn)

        def look() -> None:
            self._rounds.wake()  # a thread that waits for the store checks whether the store still answers
            for dead, how in deaths().items():  # may name processes of an earlier, larger trainer
                if dead < len(names):
                    self._to_report = self._to_report or f"{names[dead]} {how}"

        self._guard = Guard(activity, timeout_s, look)
        if store is not None:
            self._rounds.start()
            self._guard.start()

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.activity.name

    def check(self) -> None:
        """Raise PeerError if a process is known to have failed."""
        if (cause := self._cause) is not None:
            noticed = f"\n\nNoticed by {self.name}{self.activity.clause()}"
            raise PeerError(f"{cause}{noticed}{self._guard.lapse()}")

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Return a context in which messages say that the main thread does this; see :meth:`Activity.during`."""
        return self.activity.during(activity)

    def look(self) -> None:
        """Raise PeerError if a process has failed by now, after a new exchange with the board.

        A process reports its failure before its connections break, so the reason is known when a connection has broken.
        """
        self._rounds.look(self._fails)
        self.check()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, unless a failure is known already."""
        if self._board is not None and not self._fails():
            text = traceback_of_user_code(error)
            doing = f"{clause}," if (clause := self.activity.clause()) else ""
            self._to_report = self._to_report or f"{self.name}{doing} failed: {described(error)}\n\n{text}"
            self._rounds.until(self._fails)

    def await_readers(self) -> None:
        """Wait, for a limited time, until all processes have read the failure, if there was one."""
        self._rounds.until(lambda: self._read_by_all, _ACKNOWLEDGE_S)

    def account(self) -> Account:
        """Return what every process is doing, for an error of this process, which waits for others.

        Raises:
            PeerError: another process has failed meanwhile; its error gives the reason.
        """
        if self._board is None:
            return Account()
        self._inquiries.begin()
        self._rounds.until(lambda: self._inquiries.account is not None or self._fails(), self._inquiries.limit_s)
        account = self._inquiries.account
        if account is None:
            self.check()
            account = Account(self._rounds.silence())
        return replace(account, text=self._guard.lapse() + account.text)

    def close(self) -> None:
        """Stop watching."""
        self._guard.close()
        self._rounds.close()

    def _exchange(self) -> float:
        """Read the board and write to it; return the seconds until the next exchange."""
        board = self._board
        assert board is not None
        if self._cause is None and self._to_report:
            board.post_failure(self._to_report)
        if self._cause is None and (cause := board.failure()) is not None:
            self._learn(cause)
        if self._cause is not None and board.read_by_all():
            self._read_by_all = True
        self.requests.exchange(board)
        self._inquiries.exchange(board)
        return _ASKING_POLL_S if self._inquiries.awaits_answers else _POLL_S

    def _learn(self, cause: str) -> None:
        """Note the first failure, limit the time that this process may take to end, and wake its main thread."""
        if self._cause is None:
            self._cause = cause
            self._guard.limit(cause)
            self._wake()

    def _fails(self) -> bool:
        return self._cause is not None

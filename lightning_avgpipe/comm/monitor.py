"""The monitor of the processes: which one failed and why, what each of them is doing, and what they were asked to do.

Every process has two threads beside the main one. One looks at the board (``comm/rounds.py``): so a process learns of a
failure while its main thread computes, and one that is stuck can still say where. It waits for as long as the store
does not answer. The other one never waits (``comm/guard.py``): it ends a process that does not end by itself after a
failure, and notices if the processes that this one has started die.
"""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from lightning_avgpipe.comm.activity import Activity
from lightning_avgpipe.comm.board import Answer, Board
from lightning_avgpipe.comm.guard import Guard
from lightning_avgpipe.comm.inquiry import Account, Inquiries
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.requests import Requests
from lightning_avgpipe.comm.rounds import Rounds
from lightning_avgpipe.errors import PeerError, described

T = TypeVar("T")

_POLL_S = 0.2  # between two looks at the board
_ASKING_POLL_S = 0.05  # while answers are awaited
_ACKNOWLEDGE_S = 3.0  # how long a failing process stays, so that the others can read why


class Monitor:
    """What the processes tell each other beside the channels.

    Args:
        rank: of this process.
        names: of all processes, by rank, for messages.
        store: shared by all processes; None if there is only one.
        timeout_s: longest time, in seconds, that this process may take to end after a failure; 5 to 30 s are given.
        wake: called when there is a failure.
        announces: whether this process tells the others of requests, and so must know of all of them.
        keeper: name of the process that keeps the store.
        idle_s: seconds since the connections of this process last moved bytes.
        deaths: rank -> how it ended, of those processes started by this one that have died.
        membership: of the groups, if some may die and others go on; told of those that leave.

    Attributes:
        activity: what the main thread is doing, for messages.
        failure: what ends this process, once known.
        across: whether the main thread waits for other groups of processes.
        asked: what all processes did when they were asked last.
        requests: what processes were asked to do from outside.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: dist.Store | None,
        timeout_s: float,
        wake: Callable[[], None],
        announces: bool = False,
        keeper: str = "",
        idle_s: Callable[[], float] = lambda: math.inf,
        deaths: Callable[[], Mapping[int, str]] = dict,
        membership: Membership | None = None,
    ) -> None:
        activity = self.activity = Activity(names, rank)
        self.failure: str | None = None
        self.requests = Requests(announces)
        self._wake = wake
        self._rank = rank
        self._reports: dict[int, str] = {}  # rank -> why it fails
        self._read_by_all = False
        self._membership = membership
        self._gone = 0 if membership is None else membership.count
        self.across = False
        self.asked = Account()
        ranks: Callable[[], Sequence[int]] = partial(range, len(names)) if membership is None else membership.ranks
        self._ranks = ranks
        self._asks: deque[Callable[[], None]] = deque()
        self._inquire = lambda: Inquiries(names, ranks, lambda: Answer(activity.described(), idle_s(), self.across))
        self._inquiries = self._inquire()
        self._board = None if store is None else Board(store, rank, ranks)
        self._rounds = Rounds(activity.name, keeper, self._exchange, self._learn)

        def look() -> None:
            self._rounds.wake()  # whoever waits for the store looks whether it is silent
            for dead, how in deaths().items():
                first = membership is None or membership.is_first(dead)  # else others have come in its place
                if first and dead in ranks() and dead not in self._reports:
                    self._reports[dead] = f"{names[dead]} {how}"

        self._guard = Guard(activity, timeout_s, look)
        if store is not None:
            self._rounds.start()
            self._guard.start()

    @property
    def name(self) -> str:
        """Of this process."""
        return self.activity.name

    def check(self) -> None:
        """Raise PeerError if a process has failed."""
        if self.failure is not None:
            noticed = f"\n\nNoticed by {self.name}{self.activity.clause()}"
            raise PeerError(f"{self.failure}{noticed}{self._guard.lapse()}")

    def does(self, activity: str) -> None:
        """From now on the main thread does this."""
        self.activity.text = activity

    def during(self, activity: str) -> AbstractContextManager[None]:
        """As of :meth:`Activity.during`."""
        return self.activity.during(activity)

    def look(self) -> None:
        """Raise PeerError if a process has failed by now: one reports its failure before its connections break."""
        self._rounds.look(lambda: self.failure is not None)
        self.check()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, unless they know, and give them a moment to read it."""
        if self._board is not None and self.failure is None:
            text = "".join(traceback.format_exception(error)).rstrip()
            doing = f"{clause}," if (clause := self.activity.clause()) else ""
            self._reports[self._rank] = f"{self.name}{doing} failed: {described(error)}\n\n{text}"
            self._rounds.until(lambda: self.failure is not None)

    def give_up(self, ranks: Sequence[int], why: str) -> None:
        """Let the groups of these processes leave, or if that ends all, fail; wait until that is known."""
        for rank in ranks:
            self._reports.setdefault(rank, why)
        self._rounds.until(lambda: self.failure is not None or not self._reports.keys() & set(ranks))
        self.check()

    @property
    def defers(self) -> bool:
        """Whether another process of this one's group was found to wait for other groups: it decides what is wrong."""
        if self._membership is None or self.across:
            return False
        own = self._membership.peers
        return bool(own & set(self.asked.across)) and not own & set(self.asked.silent)

    def await_readers(self) -> None:
        """Stay until all processes have read of the failure, if there was one."""
        self._rounds.until(lambda: self._read_by_all, _ACKNOWLEDGE_S)

    def account(self) -> Account:
        """What every process is doing, for an error of this one that waits for others.

        Raises:
            PeerError: another process has failed meanwhile; its error has the account, or a better reason.
        """
        if self._board is None:
            return Account()
        self._inquiries.begin()
        self._rounds.until(
            lambda: self._inquiries.account is not None or self.failure is not None, self._inquiries.limit_s
        )
        account = self._inquiries.account
        if account is None:
            self.check()
            account = Account(self._rounds.silence())
        self.asked = account
        return replace(account, text=self._guard.lapse() + account.text)

    def talk(self, ask: Callable[[], T]) -> T:
        """Ask the store for something, in the thread that does so; returns the answer.

        Raises:
            PeerError: the store does not answer, or a process has failed.
        """
        answers: list[T] = []
        self._asks.append(lambda: answers.append(ask()))
        self._rounds.until(lambda: bool(answers) or self.failure is not None, self._inquiries.limit_s)
        self.check()
        if not answers:
            raise PeerError(f"{self.name} has asked the store that the processes share in vain{self._rounds.silence()}")
        return answers[0]

    def move(self, store: dist.Store) -> None:
        """From now on the board is in another store. Within :meth:`talk`."""
        self._board, self._inquiries = Board(store, self._rank, self._ranks), self._inquire()

    def close(self) -> None:
        """Stop watching."""
        self._guard.close()
        self._rounds.close()

    def _exchange(self) -> float:
        """Look at the board, and write what there is to tell; returns the seconds until the next look."""
        while self._asks:
            self._asks.popleft()()
        board = self._board
        assert board is not None
        if self.failure is None:
            self._tell(board)
        if self.failure is None and (failure := board.failure()) is not None:
            self._learn(failure)
        if self.failure is not None and board.read_by_all():
            self._read_by_all = True
        self.requests.exchange(board)
        self._inquiries.exchange(board)
        return _ASKING_POLL_S if self._inquiries.awaits_answers else _POLL_S

    def _tell(self, board: Board) -> None:
        """Post what is reported here; and take note of groups that have left."""
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
        membership.read()
        if membership.count > self._gone:
            self._gone = membership.count
            self._wake()
        if (left := membership.why_left) is None:
            return False
        self._learn(f"{left}\n\nThe other groups go on without group {membership.group}")
        self._read_by_all = True  # the store outlives it
        return True

    def _learn(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            self._guard.limit(failure)
            self._wake()

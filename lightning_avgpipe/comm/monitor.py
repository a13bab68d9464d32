"""The monitor of the processes: which one failed and why, what each of them is doing, and what they were asked to do.

Every process has two threads beside the main one. One looks at the board (``comm/rounds.py``): so a process learns of a
failure while its main thread computes, and one that is stuck can still say where. It waits for as long as the store
does not answer. The other one never waits (``comm/guard.py``): it ends a process that does not end by itself after a
failure, and notices if the processes that this one has started die.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from lightning_avgpipe.comm.activity import Activity
from lightning_avgpipe.comm.board import Answer, Board
from lightning_avgpipe.comm.failures import Failures
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
        across: whether the main thread waits for other groups of processes.
        asked: what all processes did when they were asked last.
        requests: what processes were asked to do from outside.
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
        membership: Membership | None = None,
    ) -> None:
        activity = self.activity = Activity(names, rank)
        self.requests = Requests(announces)
        self._membership = membership
        self.across = False
        self.asked = Account()
        ranks: Callable[[], Sequence[int]] = partial(range, len(names)) if membership is None else membership.ranks
        self._inquiries = Inquiries(names, ranks, lambda: Answer(activity.described(), idle_s(), self.across))
        self._board = None if store is None else Board(store, rank, ranks)

        def ends(cause: str) -> None:
            self._guard.limit(cause)
            wake()

        failures = self._failures = Failures(membership, ends, wake)
        self._rounds = Rounds(activity.name, keeper, self._exchange, failures.learn)

        def look() -> None:
            self._rounds.wake()  # whoever waits for the store looks whether it is silent
            for dead, how in deaths().items():
                first = membership is None or membership.is_first(dead)  # else others have come in its place
                if first and dead in ranks():
                    failures.report(dead, f"{names[dead]} {how}")

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
        if (cause := self._failures.cause) is not None:
            noticed = f"\n\nNoticed by {self.name}{self.activity.clause()}"
            raise PeerError(f"{cause}{noticed}{self._guard.lapse()}")

    def during(self, activity: str) -> AbstractContextManager[None]:
        """As of :meth:`Activity.during`."""
        return self.activity.during(activity)

    def look(self) -> None:
        """Raise PeerError if a process has failed by now: one reports its failure before its connections break."""
        self._rounds.look(self._fails)
        self.check()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, unless they know, and give them a moment to read it."""
        if self._board is not None and not self._fails():
            text = "".join(traceback.format_exception(error)).rstrip()
            doing = f"{clause}," if (clause := self.activity.clause()) else ""
            self._failures.report(self.activity.rank, f"{self.name}{doing} failed: {described(error)}\n\n{text}")
            self._rounds.until(self._fails)

    def give_up(self, ranks: Sequence[int], why: str) -> None:
        """Let the groups of these processes leave, or if that ends all, fail; wait until that is known."""
        for rank in ranks:
            self._failures.report(rank, why)
        self._rounds.until(lambda: not self._failures.awaits(ranks))
        self.check()

    @property
    def defers(self) -> bool:
        """Whether another process of this one's group was found to wait for other groups: it decides what is wrong."""
        if self._membership is None or self.across:
            return False
        own = set(self._membership.layout[self._membership.group])
        return not own.isdisjoint(self.asked.across) and own.isdisjoint(self.asked.silent)

    def await_readers(self) -> None:
        """Stay until all processes have read of the failure, if there was one."""
        self._rounds.until(lambda: self._failures.read_by_all, _ACKNOWLEDGE_S)

    def account(self) -> Account:
        """What every process is doing, for an error of this one that waits for others.

        Raises:
            PeerError: another process has failed meanwhile; its error has the account, or a better reason.
        """
        if self._board is None:
            return Account()
        self._inquiries.begin()
        self._rounds.until(lambda: self._inquiries.account is not None or self._fails(), self._inquiries.limit_s)
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
        self._rounds.ask(lambda: answers.append(ask()))
        self._rounds.until(lambda: bool(answers) or self._fails(), self._inquiries.limit_s)
        self.check()
        if not answers:
            raise PeerError(f"{self.name} has asked the store that the processes share in vain{self._rounds.silence()}")
        return answers[0]

    def move(self, store: dist.Store) -> None:
        """From now on the board is in another store. Within :meth:`talk`."""
        assert self._board is not None
        self._board.move(store)
        self._inquiries.forget()

    def close(self) -> None:
        """Stop watching."""
        self._guard.close()
        self._rounds.close()

    def _exchange(self) -> float:
        """Look at the board, and write what there is to tell; returns the seconds until the next look."""
        board = self._board
        assert board is not None
        self._failures.exchange(board)
        self.requests.exchange(board)
        self._inquiries.exchange(board)
        return _ASKING_POLL_S if self._inquiries.awaits_answers else _POLL_S

    def _fails(self) -> bool:
        return self._failures.cause is not None

"""The watch: what each process is doing, which of them failed and why, and what they were asked to do.

Processes exchange this through the store that they share, not through their channels. Only this module uses that
store. A process has two threads in addition to the main one::

    main            computes and waits, and may be stuck           check, during, report, account
    avgpipe board   exchanges with the store in rounds, and blocks as long as the store does not answer
    avgpipe watch   never blocks: ends a process that does not end by itself after a failure, and notices when
                    processes that this one has started die

So a process learns of a failure while its main thread computes, and one that is stuck can still say where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from lightning_avgpipe.comm.transfer import Arrivals, RunningTime, is_broken_connection
from lightning_avgpipe.errors import ConfigurationError, PeerError, described
from lightning_avgpipe.utils.source import lines_of_thread, traceback_of_user_code

STOP, REQUEUE = "stop", "requeue"  # external requests: to end, and to save a checkpoint for a later start

_POLL_S = 0.2  # pause between two rounds, and between two looks of the thread that never blocks
_ASKING_POLL_S = 0.05  # pause between rounds while answers are awaited
_AGREEING_POLL_S = 0.005  # pause between checks whether all processes have asked for the same operation
_ACKNOWLEDGE_S = 3.0  # how long a failing process stays, so that the others can read why
_ANSWER_S = 1.5  # longest wait for the other processes to say what they are doing
_STORE_S = 3.0  # a store that takes longer counts as silent
_LOCAL_S = 2.0  # longest wait of one thread of this process for another
LISTEN_S = 5.0, 30.0  # shortest and longest time that the main thread gets to react to a failure
_LAPSE_S = 5.0  # if no thread of a process runs for longer, the process was stopped and is not just slow
_LONGEST = 64 * 1024  # most characters of a text in the store
_LINES = 3  # lines of user code that say where the main thread is


@dataclass(frozen=True)
class Account:
    """A summary of what all processes are doing, from their answers.

    Attributes:
        text: text to append to the first sentence of an error message; may be empty.
        idle_s: seconds since the connections of any process last moved bytes.
    """

    text: str = ""
    idle_s: float = math.inf


class Watch:
    """A process's view of the state of all processes. The thread that creates it is the main thread.

    Args:
        rank: rank of this process.
        names: names of all processes, by rank, for messages; the list may be changed in place later.
        store: store that all processes share, used for one run; None if there is only one process.
        timeout_s: seconds that the main thread has to react to a failure (at least 5 and at most 30), and the process
            to end after that (at least as long).
        arrivals: woken when a process has failed; knows when the connections of this process last moved bytes.
        collects_requests: whether this process forwards requests to the others, and so must read those that others
            posted.
        keeper: name of the process that keeps the store.
        deaths: returns, for each rank that this process started and that has died, how it ended.

    Attributes:
        names: as given.
        doing: what the main thread does, such as ``waits for the input of F0``; empty outside of :meth:`during`.
    """

    def __init__(
        self,
        rank: int,
        names: list[str],
        store: dist.Store | None,
        timeout_s: float,
        arrivals: Arrivals,
        collects_requests: bool = False,
        keeper: str = "",
        deaths: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.names, self.doing = names, ""
        self._rank, self._store, self._arrivals, self._keeper = rank, store, arrivals, keeper
        self._main = threading.get_ident()
        self._collects_requests, self._known, self._posted = collects_requests, set[str](), set[str]()  # requests
        self._agreements = 0
        self._to_report = ""  # failure of this process, which the next round posts
        self._cause: str | None = None  # the failure that ends the run, once known
        self._read_by_all = False  # whether all processes have read the failure, so none needs the store
        self._account: Account | None = None  # None until the answers have come or are overdue
        self._asks = False  # whether the next round asks all processes what they do
        self._asked: tuple[int, float] | None = None  # number of the open question, and deadline for the answers
        self._answered = 0  # number of the last question that this process has answered
        self._rounds, self._began = 0, math.inf  # start of the current round; infinite between rounds
        self._goes_on = store is not None
        self._changed = threading.Condition()  # wakes the main thread or the board, whichever waits for the other
        self._board = threading.Thread(target=self._talk, name="avgpipe board", daemon=True)
        self._limit_s = sorted((timeout_s, *LISTEN_S))[1]  # time to react to a failure and, once it has, to end
        self._end_s = max(timeout_s, self._limit_s)
        self._since = math.inf  # time from which that limit counts
        self._reacts = False  # whether the main thread has reacted
        self._ran, self._lapse_s = time.monotonic(), 0.0
        self._deaths = deaths
        self._closed = threading.Event()
        self._guard = threading.Thread(target=self._look_after, name="avgpipe watch", daemon=True)
        if store is not None:
            self._board.start()
            self._guard.start()

    def close(self) -> None:
        """Stop watching. The board ends when the store answers; a silent store is not waited for."""
        self._closed.set()
        self._goes_on = False
        self._wake()
        if self._guard.is_alive():
            self._guard.join(_LOCAL_S)
        if self._board.is_alive() and not self._is_silent():
            self._board.join(_LOCAL_S)

    # -- what this process does --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self._rank]

    @contextlib.contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Describe in messages what the main thread is doing. After an error the text stays, so messages can use it."""
        before, self.doing = self.doing, text
        yield
        self.doing = before

    def _clause(self) -> str:
        """Return a relative clause for messages, such as ``, which waits for the input of F0``, or an empty string."""
        return f", which {self.doing}" if self.doing else ""

    def _described(self) -> str:
        """Return what the main thread is doing, and the innermost lines of user code in which it is."""
        return f"{self.doing or 'is not in a step'} (at {lines_of_thread(self._main, _LINES)})"

    # -- failures ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PeerError if a process is known to have failed."""
        if (cause := self._cause) is not None:
            raise PeerError(f"{cause}\n\nNoticed by {self.name}{self._clause()}{self._lapse()}")

    def check_after_round(self) -> None:
        """Wait for a new round with the store, and raise PeerError if a process has failed.

        A process reports its failure before its connections break, so the cause is known when a connection has broken.
        """
        rounds = self._rounds + 2  # the current round may have looked already
        self._until(lambda: self._rounds >= rounds or self._fails())
        self.check()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, unless a failure is known already.

        This also shows that the main thread has reacted. Callbacks that run next may take as long as other waits.
        """
        if not self._reacts:
            self._reacts, self._limit_s = True, self._end_s
            if self._fails():  # else the time counts from when the failure is known
                self._since = time.monotonic()
        if self._store is not None and not self._fails():
            text = traceback_of_user_code(error)
            doing = f"{clause}," if (clause := self._clause()) else ""
            self._to_report = self._to_report or f"{self.name}{doing} failed: {described(error)}\n\n{text}"
            self._until(self._fails)

    def await_readers(self) -> None:
        """Wait, for a limited time, until all processes have read the failure, if there was one."""
        self._until(lambda: self._read_by_all, _ACKNOWLEDGE_S)

    def status_of_all(self) -> Account:
        """Return what every process is doing, for an error of this process while it waits for others.

        Raises:
            PeerError: another process has failed; this error has the cause.
        """
        if self._store is None:
            return Account()
        self._account, self._asks = None, True
        self._until(lambda: self._account is not None or self._fails(), _ANSWER_S + _STORE_S)
        account = self._account
        if account is None:
            self.check()
            account = Account(self._silence())
        return replace(account, text=self._lapse() + account.text)

    # -- requests and agreement --------------------------------------------------------------------------------------

    @property
    def requests(self) -> frozenset[str]:
        """The external requests to this process and, if this process collects them, to any other."""
        return frozenset(self._known)

    def request(self, request: str) -> None:
        """Note an external request to this process. This does not wait, so a signal handler may call it."""
        self._known.add(request)

    def confirm(self, asked: str, where: str, timeout_s: float) -> None:
        """Wait until all processes ask for the same operation, before any of them starts it.

        They compare it through the store and not by a collective, so that a process that asks alone does not disturb
        the collectives that its peers run.

        Args:
            asked: name of the operation, which is compared and quoted in messages.
            where: for messages: a place to call the operation from that all processes reach.
            timeout_s: longest wait, in seconds.
        Raises:
            ConfigurationError: some processes do not ask within the timeout, or ask for something else.
            PeerError: a process has failed.
        """
        if (store := self._store) is None:
            return
        self._agreements += 1
        keys = [f"asked/{self._agreements}/{rank}" for rank in range(len(self.names))]
        store.set(keys[self._rank], asked)
        missing, waited = keys, RunningTime()
        while missing and waited.seconds() < timeout_s:
            self.check()
            missing = [key for key in missing if not store.check([key])]
            if missing:
                time.sleep(_AGREEING_POLL_S)
        if missing:
            silent = " and ".join(name for name, key in zip(self.names, keys, strict=True) if key in missing)
            raise ConfigurationError(
                f"{asked} was called on {self.name}, but not on {silent} within {timeout_s:g} s; every rank must call "
                f"it: {where}"
            )
        for name, key in zip(self.names, keys, strict=True):
            other = store.get(key).decode()
            if other != asked:
                raise ConfigurationError(
                    f"{asked} was called on {self.name}, but {other} on {name}; every rank must ask for the same"
                )

    # -- the board: rounds with the store ----------------------------------------------------------------------------

    def _talk(self) -> None:
        while self._goes_on:
            self._began, pause_s = time.monotonic(), 0.0
            try:
                self._exchange(self._store)
                pause_s = _POLL_S if self._asked is None else _ASKING_POLL_S
            except Exception as error:  # without this thread no later failure would be noticed
                self._goes_on = False
                if is_broken_connection(error):
                    self._learn(f"{self._keeper} is gone, and with it the store that the processes share ({error})")
                else:
                    self._learn(f"the monitor of {self.name} failed: {described(error)}")
            self._began = math.inf
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                if self._goes_on:
                    self._changed.wait(pause_s)

    def _exchange(self, store: Any) -> None:
        """Read the store and write to it."""
        if self._cause is None and self._to_report:  # the first failure is the cause of the others
            store.compare_set("failure", "", _sendable(self._to_report))
        if self._cause is None and store.check(["failure"]):
            store.add("read", 1)  # counts the processes that have read it
            self._learn(_received(store.get("failure")))
        if self._cause is not None and store.add("read", 0) >= len(self.names):
            self._read_by_all = True
        for request in (STOP, REQUEUE):
            if request in self._known and request not in self._posted:
                self._posted.add(request)
                store.set(f"request/{request}", "1")
            elif self._collects_requests and request not in self._known and store.check([f"request/{request}"]):
                self._known.add(request)
        self._inquire(store)

    def _inquire(self, store: Any) -> None:
        """Ask what all processes are doing if :meth:`status_of_all` needs it, answer questions, and collect answers."""
        if self._asks and self._asked is None:
            self._asked = store.add("questions", 1), time.monotonic() + _ANSWER_S
        if (asked := store.add("questions", 0)) > self._answered:
            answer = f"{self._arrivals.idle_s():.3f} {_sendable(self._described())}"
            for question in range(self._answered + 1, asked + 1):  # several may ask at the same time
                store.set(f"answer/{question}/{self._rank}", answer)
            self._answered = asked
        if self._asked is None:
            return
        number, until = self._asked
        keys = [f"answer/{number}/{rank}" for rank in range(len(self.names))]
        answers = [_answered(_received(store.get(key))) if store.check([key]) else None for key in keys]
        if None not in answers or time.monotonic() >= until:
            silent = f"does not answer within {_ANSWER_S} s: it is gone, stopped or stuck", math.inf
            told = [answer or silent for answer in answers]
            lines = [f"  {name} {doing}" for name, (doing, _) in zip(self.names, told, strict=True)]
            text = ". What the processes do:\n" + "\n".join(lines)
            self._account = Account(text, min(idle_s for _, idle_s in told))
            self._asked, self._asks = None, False

    def _learn(self, cause: str) -> None:
        """Note the first failure, and wake the main thread. From now on this process has a limited time to end."""
        if self._cause is None:
            self._cause, self._since = cause, time.monotonic()
            self._arrivals.notify()

    def _fails(self) -> bool:
        return self._cause is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _until(self, condition: Callable[[], bool], limit_s: float = _LOCAL_S) -> None:
        """Interrupt the pause between rounds, and wait for a condition, unless the store is gone or silent."""
        if not self._board.is_alive():
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: condition() or not self._goes_on or self._is_silent(), limit_s)

    def _is_silent(self) -> bool:
        return time.monotonic() - self._began > _STORE_S

    def _silence(self) -> str:
        """Return a sentence for messages if the store does not answer; else an empty string."""
        silent_s = time.monotonic() - self._began
        if silent_s <= _STORE_S:
            return ""
        return (
            f". {self._keeper}, which keeps the store of all processes, has not answered for {silent_s:.1f} s: it is "
            "stopped, or cannot be reached"
        )

    # -- the thread that never blocks --------------------------------------------------------------------------------

    def _look_after(self) -> None:
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            self._lapse_s, self._ran = max(self._lapse_s, now - self._ran - _POLL_S), now
            self._wake()  # a thread that waits for the store checks whether it still answers
            for dead, how in self._deaths().items():  # may name processes of an earlier, larger trainer
                if dead < len(self.names):
                    self._to_report = self._to_report or f"{self.names[dead]} {how}"
            if now > self._since + self._limit_s and not self._closed.is_set():
                self._end_process()

    def _lapse(self) -> str:
        """Return a sentence for messages if this process did not run for a long time; else an empty string."""
        lapse_s = max(self._lapse_s, time.monotonic() - self._ran) if self._guard.is_alive() else 0.0
        if lapse_s < _LAPSE_S:
            return ""
        return (
            f". No thread of {self.name} itself ran for {lapse_s:.1f} s (it was stopped, or a call held the "
            "interpreter), so others may have given it up"
        )

    def _end_process(self) -> None:
        """Kill this process: its main thread has not ended in time, and cannot be interrupted."""
        try:
            sys.stderr.write(
                f"\n{self.name}: the run failed {self._limit_s:.0f} s ago, and this process has not ended since, so "
                f"it is ended now. It {self._described()}. The failure: {self._cause}\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)


def _sendable(text: str) -> str:
    """Shorten a text to the largest size for the store, and escape characters that cannot be encoded."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _received(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _answered(told: str) -> tuple[str, float]:
    """Parse an answer: what a process is doing, and for how many seconds its connections have moved no bytes."""
    try:
        idle_s, doing = told.split(" ", 1)
        return doing, float(idle_s)
    except ValueError:  # not in this format
        return told, math.inf

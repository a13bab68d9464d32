"""The monitor of the processes: which one failed and why, what each of them is doing, and what they were asked to do.

Every process has two threads beside the main one. One looks at the board: so a process learns of a failure while its
main thread computes, and one that is stuck can still say where. It waits for as long as the store does not answer. The
other one never waits: it ends a process that does not end by itself after a failure, and notices if the processes that
this one has started die.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_avgpipe.comm.board import Answer, Board
from lightning_avgpipe.errors import PeerError, described
from lightning_avgpipe.utils.packages import LIGHTNING

__all__ = ["Account", "Monitor"]

_POLL_S = 0.2  # between two looks at the board
_ASKING_POLL_S = 0.05  # while answers are awaited
_ACKNOWLEDGE_S = 3.0  # how long a failing process stays, so that the others can read why
_ANSWER_S = 1.5  # how long the others may take to say what they do
_LISTEN_S = 5.0, 30.0  # how long after a failure the main thread may go on with what it does, at least and at most
_LOCAL_S = 2.0  # longest wait of the main thread for the thread of the watch
_SILENT_S = 3.0  # a store that takes longer does not answer
_LAPSE_S = 5.0  # a process in which no thread runs for longer was stopped, rather than slow
_REQUESTS = ("stop", "requeue")  # from outside: to end, and to save for a later start
_LINES = 3  # of user code, to say where a process is
_LIBRARIES = {"torch", *LIGHTNING, "lightning_avgpipe", "threading"}


@dataclass(frozen=True)
class Account:
    """What all processes do, as far as they say it.

    Attributes:
        text: for an error message, after its first sentence; or empty.
        idle_s: since the connections of any process last moved bytes.
    """

    text: str = ""
    idle_s: float = math.inf


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

    Attributes:
        name: of this process.
        activity: what the main thread is doing, for messages.
        failure: what ends this process, once known.
        requests: what processes were asked to do from outside; where they are announced, the requests to all processes.
    """

    _wants_account = False
    _account: Account | None = None
    _question: tuple[int, float] | None = None  # of this process: number, and until when answers are awaited
    _answered = 0
    _rounds = 0
    _round_began: float | None = None

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
    ) -> None:
        self.name = names[rank]
        self.activity = ""
        self.failure: str | None = None
        self.requests: set[str] = set()
        self._names = names
        self._listen_s = sorted((timeout_s, *_LISTEN_S))[1]
        self._wake = wake
        self._announces = announces
        self._keeper = keeper
        self._idle_s = idle_s
        self._deaths = deaths
        self._main = threading.get_ident()
        self._deadline = math.inf
        self._report: str | None = None
        self._posted: set[str] = set()
        self._ran = time.monotonic()
        self._lapse_s = 0.0
        self._closing = False
        # wakes whichever of main thread and board's thread waits for the other
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._talking = store is not None
        self._threads: list[threading.Thread] = []
        if store is not None:
            board = Board(store, rank, len(names))
            self._start("avgpipe board", lambda: self._talk(board))
            self._start("avgpipe watch", self._guard)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- for the main thread -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PeerError if a process has failed."""
        if self.failure is not None:
            where = f"\n\nNoticed by {self.name}" + (f", which {self.activity}" if self.activity else "")
            raise PeerError(self.failure + where + self._lapse())

    def does(self, activity: str) -> None:
        """From now on the main thread does this."""
        self.activity = activity

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Within this context the main thread does this; and still does, for messages, when it fails."""
        before, self.activity = self.activity, activity
        yield
        self.activity = before

    def look(self) -> None:
        """Raise PeerError if a process has failed by now: one reports its failure before its connections break."""
        rounds = self._rounds + 2  # the round that goes on now may have looked already
        self._until(lambda: self._rounds >= rounds or self.failure is not None, _LOCAL_S)
        self.check()

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, unless they know, and give them a moment to read it."""
        if self._threads and self.failure is None:
            doing = f", which {self.activity}," if self.activity else ""
            text = "".join(traceback.format_exception(error)).rstrip()
            self._report = f"{self.name}{doing} failed: {described(error)}\n\n{text}"
            self._until(lambda: self.failure is not None, _LOCAL_S)

    def await_readers(self) -> None:
        """Stay until all processes have read of the failure, if there was one."""
        self._until(lambda: "read by all" in self._posted, _ACKNOWLEDGE_S)

    def account(self) -> Account:
        """What every process is doing, for an error of this one that waits for others.

        Raises:
            PeerError: another process has failed meanwhile; its error has the account, or a better reason.
        """
        if not self._threads:
            return Account()
        self._account, self._wants_account = None, True
        self._until(lambda: self._account is not None or self.failure is not None, _ANSWER_S + _SILENT_S)
        account = self._account
        if account is None:
            self.check()
            account = Account(self._silence())
        return Account(self._lapse() + account.text, account.idle_s)

    def close(self) -> None:
        """Stop watching."""
        self._closing = True
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            # the board's thread ends when the store answers, which nobody waits for
            waits = thread is self._threads[0] and self._silent_s() > _SILENT_S
            thread.join(0.0 if waits else _LOCAL_S)
        self._threads = []

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for the board's thread, unless the store is gone or silent."""
        if not self._threads:
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: condition() or not self._talking or self._silent_s() > _SILENT_S, limit_s)

    # -- this process and the keeper of the store --------------------------------------------------------------------

    def _silent_s(self) -> float:
        """For how long the store has been asked in vain."""
        began = self._round_began
        return 0.0 if began is None else time.monotonic() - began

    def _silence(self) -> str:
        silent_s = self._silent_s()
        if silent_s <= _SILENT_S:
            return ""
        return (
            f". {self._keeper}, which keeps the store of all processes, has not answered for {silent_s:.1f} s: it is "
            "stopped, or cannot be reached"
        )

    def _lapse(self) -> str:
        lapse_s = max(self._lapse_s, time.monotonic() - self._ran) if self._threads else 0.0
        if lapse_s < _LAPSE_S:
            return ""
        return (
            f". No thread of {self.name} itself ran for {lapse_s:.1f} s (it was stopped, or a call held the "
            "interpreter), so others may have given it up"
        )

    # -- the thread that never waits ---------------------------------------------------------------------------------

    def _guard(self) -> None:
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            self._lapse_s, self._ran = max(self._lapse_s, now - self._ran - _POLL_S), now
            with self._changed:
                self._changed.notify_all()  # whoever waits for the store looks whether it is silent
            if self._report is None and (deaths := self._deaths()):
                rank, how = next(iter(deaths.items()))
                self._report = f"{self._names[rank]} {how}"
            if now > self._deadline and not self._closing:
                self._end_process()

    def _end_process(self) -> None:
        """The main thread does not listen: nobody can interrupt it, and nothing that it does is of use any more."""
        try:
            sys.stderr.write(
                f"\n{self.name}: the run failed {self._listen_s:.0f} s ago, and this process has not ended since, so "
                f"it is ended now. It {self._doing()}. The failure: {self.failure}\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)

    # -- the thread that talks to the store --------------------------------------------------------------------------

    def _talk(self, board: Board) -> None:
        while not self._closing:
            self._round_began = time.monotonic()
            try:
                self._exchange(board)
            except RuntimeError as error:
                self._lose(f"{self._keeper} is gone, and with it the store that the processes share ({error})")
            except Exception as error:  # nobody would notice a failure from here on
                self._lose(f"the monitor of {self.name} failed: {described(error)}")
            self._round_began = None
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                if not self._talking:
                    return
                # a report and a question of the main thread interrupt the pause
                self._changed.wait(_POLL_S if self._question is None else _ASKING_POLL_S)

    def _lose(self, failure: str) -> None:
        self._talking = False
        self._learn(failure)

    def _exchange(self, board: Board) -> None:
        """Look at the board, and write what there is to tell."""
        if self._report is not None and "failure" not in self._posted:
            self._posted.add("failure")
            board.post_failure(self._report)
        if self.failure is None and (failure := board.failure()) is not None:
            self._learn(failure)
        if self.failure is not None and board.read_by_all():
            self._posted.add("read by all")
        for request in _REQUESTS:
            if request in self.requests and request not in self._posted:
                self._posted.add(request)
                board.request(request)
            elif self._announces and request not in self.requests and board.requested(request):
                self.requests.add(request)
        if self._wants_account and self._question is None:
            self._question = board.ask(), time.monotonic() + _ANSWER_S
        if (asked := board.asked()) > self._answered:
            answer = Answer(self._doing(), self._idle_s())
            for question in range(self._answered + 1, asked + 1):  # several may ask at the same time
                board.answer(question, answer)
            self._answered = asked
        if self._question is not None:
            self._collect(board, *self._question)

    def _learn(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            self._deadline = time.monotonic() + self._listen_s
            self._wake()

    def _collect(self, board: Board, question: int, until: float) -> None:
        """The account, if all have answered, or some do not."""
        answers = board.answers(question)
        if len(answers) < len(self._names) and time.monotonic() < until:
            return
        silent = f"does not answer within {_ANSWER_S} s: it is gone, stopped or stuck"
        lines = [
            f"  {name} {answers[rank].doing if rank in answers else silent}" for rank, name in enumerate(self._names)
        ]
        idle_s = min((answer.idle_s for answer in answers.values()), default=math.inf)
        self._account = Account(". What the processes do:\n" + "\n".join(lines), idle_s)
        self._question, self._wants_account = None, False

    def _doing(self) -> str:
        """What the main thread does, and the innermost lines of user code that it is in."""
        frame = sys._current_frames().get(self._main)
        lines: list[str] = []
        while frame is not None and len(lines) < _LINES:
            if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
                code = frame.f_code
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return f"{self.activity or 'is not in a step'} (at {', called at '.join(lines)})"

"""A watch over the processes: which one failed and why, what each of them is doing, and what they were asked to do.

Every process has a thread that looks into the store that the processes share. So a process learns of a failure while
its main thread computes, a process that is stuck can still say where, and one that does not end by itself after a
failure is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from lightning_avgpipe.errors import PeerError

__all__ = ["Watch"]

_POLL_S = 0.2  # between two looks into the store
_ACKNOWLEDGE_S = 3.0  # how long a failing process stays, so that the others can read why
_ANSWER_S = 1.0  # how long the others may take to say what they do
_LISTEN_S = 30.0  # how long after a failure the main thread may go on with what it does
_LOCAL_S = 2.0  # longest wait of the main thread for the thread of the watch
_REQUESTS = ("stop", "requeue")  # from outside: to end, and to save for a later start
_LINES = 3  # of user code, to say where a process is
_LIBRARIES = {"torch", "lightning", "lightning_avgpipe", "threading"}


class Watch:
    """What the processes tell each other beside the channels.

    Args:
        rank: of this process.
        names: of all processes, by rank, for messages.
        store: shared by all processes; None if there is only one.
        timeout_s: longest time, in seconds, that this process may take to end after a failure; at most 30 s are given.
        wake: called when there is a failure.
        announces: whether this process tells the others of requests, and so must know of all of them.

    Attributes:
        name: of this process.
        activity: what the main thread is doing, for messages.
        failure: what ends this process, once known.
        requests: what processes were asked to do from outside; where they are announced, the requests to all processes.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: dist.Store | None,
        timeout_s: float,
        wake: Callable[[], None],
        announces: bool = False,
    ) -> None:
        self.name = names[rank]
        self.activity = ""
        self.failure: str | None = None
        self.requests: set[str] = set()
        self._rank = rank
        self._names = names
        self._store = store
        self._listen_s = min(timeout_s, _LISTEN_S)
        self._wake = wake
        self._announces = announces
        self._main = threading.main_thread().ident
        self._deadline = float("inf")
        self._report: str | None = None
        self._posted: set[str] = set()
        self._account: str | None = None
        self._answered = False
        self._rounds = 0
        self._closing = False
        # wakes whichever of the two threads waits for the other
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._work, name="avgpipe watch", daemon=True)
            self._thread.start()

    # -- for the main thread -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PeerError if a process has failed."""
        if self.failure is not None:
            where = f"\n\nNoticed by {self.name}" + (f", which {self.activity}" if self.activity else "")
            raise PeerError(self.failure + where)

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
        if self._thread is None:
            return
        if self.failure is None:
            text = "".join(traceback.format_exception(error)).rstrip()
            doing = f", which {self.activity}," if self.activity else ""
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            self._report = f"{self.name}{doing} failed: {what}\n\n{text}"
            self._until(lambda: self.failure is not None, _LOCAL_S)

    def await_readers(self) -> None:
        """Stay until all processes have read of the failure, if there was one."""
        self._until(lambda: "read by all" in self._posted, _ACKNOWLEDGE_S)

    def account(self) -> str:
        """What every process is doing, for an error of this one that waits for others.

        Raises:
            PeerError: another process has failed meanwhile; its error has the account, or a better reason.
        """
        if self._thread is None:
            return ""
        self._account = ""
        self._until(lambda: bool(self._account) or self.failure is not None, _ANSWER_S + _LOCAL_S)
        if not self._account:
            self.check()
            return ""
        return f". What the processes do:\n{self._account}"

    def close(self) -> None:
        """Stop watching."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LOCAL_S)
            self._thread = None

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for the thread of the watch."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: condition() or self._closing, limit_s)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        reachable = True
        while not self._closing:
            if reachable:
                try:
                    self._exchange()
                except RuntimeError as error:
                    reachable = False
                    self._learn(f"{self._names[0]} is gone, and with it the store that the processes share ({error})")
                    self._posted.add("read by all")
            if time.monotonic() > self._deadline and not self._closing:
                self._end_process()
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                # a report and a question of the main thread interrupt the pause
                self._changed.wait(_POLL_S)

    def _exchange(self) -> None:
        """Look into the store, and write what there is to tell."""
        store = self._store
        assert store is not None
        if self._report is not None and "failure" not in self._posted:
            self._posted.add("failure")
            store.compare_set("failure", "", self._report)  # the first failure is the cause of the others
        if self.failure is None and store.check(["failure"]):
            store.add("read", 1)
            self._learn(store.get("failure").decode())
        if self.failure is not None and store.add("read", 0) >= len(self._names):
            self._posted.add("read by all")
        for request in _REQUESTS:
            if request in self.requests and request not in self._posted:
                self._posted.add(request)
                store.set(f"request/{request}", "1")
            elif self._announces and request not in self.requests and store.check([f"request/{request}"]):
                self.requests.add(request)
        if not self._answered and store.check(["question"]):
            self._answered = True
            store.set(f"doing/{self._rank}", self._doing())
        if self._account == "" and self.failure is None:
            self._account = self._ask(store)

    def _learn(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            self._deadline = time.monotonic() + self._listen_s
            self._wake()

    def _ask(self, store: dist.Store) -> str:
        """What each process says that it does; one that is gone says nothing."""
        store.set("question", "1")
        self._answered = True
        store.set(f"doing/{self._rank}", self._doing())
        keys = [f"doing/{rank}" for rank in range(len(self._names))]
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and not store.check(keys):
            time.sleep(_POLL_S / 4)
        lines = []
        for name, key in zip(self._names, keys, strict=True):
            answer = store.get(key).decode() if store.check([key]) else "does not answer: it is gone, or stuck"
            lines.append(f"  {name} {answer}")
        return "\n".join(lines)

    def _doing(self) -> str:
        """What the main thread does, and the innermost lines of user code that it is in."""
        frame = sys._current_frames().get(self._main or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < _LINES:
            if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
                code = frame.f_code
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return f"{self.activity or 'is not in a step'} (at {', called at '.join(lines)})"

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

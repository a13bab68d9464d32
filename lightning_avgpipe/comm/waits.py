"""Waits: how a process waits for others. Every wait is bounded, and ends with an error when another process fails."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from lightning_avgpipe.comm.transfer import POLL_S, Arrivals, RunningTime, is_broken_connection
from lightning_avgpipe.comm.watch import Watch
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of

_log = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_IDLE_S = 0.5  # time after which an idle thread ends
_Task = tuple[Callable[[], None], Callable[[], None]]  # a function, and what is called when it has ended


class Waits:
    """The waits of a process's main thread for other processes.

    Args:
        arrivals: wakes a wait.
        watch: knows whether another process has failed; is told what this process waits for.
        timeout_s: longest wait in which no connection of any process moves bytes, in seconds. Time in which this
            process is stopped does not count.
        device: device on which this process computes.
        silent_s: a wait that takes more seconds is logged with its reason; this limit doubles with each such log.

    Attributes:
        arrivals: as given.
        watch: as given.
        timeout_s: as given.
    """

    def __init__(
        self, arrivals: Arrivals, watch: Watch, timeout_s: float, device: torch.device = _HOST, silent_s: float = 60.0
    ) -> None:
        self.arrivals, self.watch, self.timeout_s = arrivals, watch, timeout_s
        self._silent_s = silent_s
        self._port = port_of(device)
        self._workers = _Workers()

    def until(self, ready: Callable[[], bool], doing: str | Callable[[], str]) -> None:
        """Block until ``ready()``.

        Args:
            ready: checked again whenever something arrives.
            doing: what this process does, for messages, such as ``waits for the input of F0``; or a function that
                returns it.
        Raises:
            PeerError: nothing arrived in time, a connection broke, or another process has failed. If a channel failed
                for another reason, its error is raised as it is.
        """
        if ready():
            return
        with self.watch.during(doing if isinstance(doing, str) else doing()):
            self._wait(ready, f"{self.watch.name} {self.watch.doing}")

    def _wait(self, ready: Callable[[], bool], waiting: str) -> None:
        arrivals, watch, limit_s = self.arrivals, self.watch, self.timeout_s
        time_waited = RunningTime()
        while True:
            watch.check()
            if arrivals.failure is None:
                arrivals.wait(POLL_S)
            if ready():
                return
            failure = arrivals.failure
            if failure is not None:
                watch.check_after_round()
                if not isinstance(failure, PeerError):
                    raise failure
                raise PeerError(f"{waiting}, but {failure}{watch.status_of_all().text}") from failure
            waited_s = time_waited.seconds()
            if self._silent_s < waited_s < limit_s:
                self._silent_s *= 2
                _log.warning(
                    "%s, for %.0f s by now; it gives up when nothing moves between processes for %g s (timeout=...)",
                    waiting, waited_s, limit_s,
                )  # fmt: skip
            if waited_s > limit_s:
                account = watch.status_of_all()
                waited_s = min(waited_s, account.idle_s, arrivals.idle_s())
                if waited_s > limit_s:
                    raise PeerError(
                        f"{waiting}, and nothing arrived for {limit_s:g} s. Either a process is stuck, or the "
                        f"work takes longer than the strategy's timeout; raise timeout=... if so{account.text}"
                    )
                time_waited.reset(waited_s)

    def run(self, function: Callable[[], object], doing: str) -> None:
        """Run a function that waits for other processes, and end the wait if one of them fails.

        Args:
            function: function to run.
            doing: what this process does, for messages.

        Raises:
            PeerError: as in :meth:`until`, or a connection broke. Any other error of the function is raised as it is.
        """
        self.begin(function, doing).finish()

    def begin(self, function: Callable[[], object], doing: str) -> Running:
        """Start a function that waits for other processes, in the background; see :meth:`run`.

        The function runs in a thread, because a collective of gloo can neither be polled nor cancelled. On an
        accelerator it runs on the caller's stream, and is over once its work is queued there.
        """
        self.watch.check()
        running = Running(self, doing)
        stream, infers = self._port.current_stream(), torch.is_inference_mode_enabled()

        def work() -> None:
            try:
                self._port.enter_thread()  # a thread begins on the first device, and on the default stream
                # tensors made in inference mode can be written only in this mode
                with self._port.on_stream(stream), torch.inference_mode(infers), torch.no_grad():
                    function()
            except Exception as error:  # re-raised in the thread that asked
                running.error = error

        def ended() -> None:
            running.over.set()
            self.arrivals.notify()

        self._workers.run(work, ended)
        return running

    def close(self, join_s: float) -> None:
        """Wait up to ``join_s`` seconds for a function that still runs."""
        self._workers.join(join_s)


class _Workers:
    """Threads that run functions, one at a time each.

    An idle thread waits a while for the next function, since torch keeps some memory for each thread that has run a
    collective.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts threads that wait for a task and for which there is none
        self._thread: threading.Thread | None = None  # the last one that has begun

    def run(self, function: Callable[[], None], ended: Callable[[], None]) -> None:
        """Run a function in an idle thread, or in a new one, and call ``ended`` when the thread is idle again."""
        if not self._idle.acquire(blocking=False):
            self._thread = threading.Thread(target=self._work, name="avgpipe collective", daemon=True)
            self._thread.start()
        self._tasks.put((function, ended))

    def join(self, seconds: float) -> None:
        """End idle threads, and wait up to ``seconds`` for the thread that was started last."""
        while self._idle.acquire(blocking=False):
            self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                if self._idle.acquire(blocking=False):  # else a function is about to come
                    return
                continue
            if task is None:
                return
            function, ended = task
            try:
                function()
            finally:
                self._idle.release()
                ended()
            del task, function, ended  # an idle thread must keep nothing alive


class Running:
    """A function that runs in a thread of its own and waits for other processes; see :meth:`Waits.begin`.

    Attributes:
        over: set when the function has ended.
        error: error of the function; None if there is none.
    """

    def __init__(self, waits: Waits, doing: str) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None
        self._waits = waits
        self._doing = doing

    def finish(self) -> None:
        """Wait until the function has ended, and raise its error; errors are those of :meth:`Waits.run`."""
        watch = self._waits.watch
        with watch.during(self._doing):
            self._waits.until(self.over.is_set, self._doing)
            if self.error is None:
                return
            if not is_broken_connection(self.error):
                raise self.error
            watch.check_after_round()
            lost = f"{watch.name} {self._doing}, but a connection broke: {self.error}{watch.status_of_all().text}"
            raise PeerError(lost) from self.error

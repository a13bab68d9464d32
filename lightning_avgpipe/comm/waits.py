"""Waits: how a process waits for others. Every wait is bounded, and ends with an error when another process fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.errors import AvgPipeError, PeerError
from lightning_avgpipe.utils.device import port_of

_log = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_POLL_S = 0.5  # between two looks at the clock; whatever happens wakes the wait


class GivenUpError(PeerError):
    """What was waited for will not come, and the caller knows why."""


class Waits:
    """The waits of a process's main thread.

    Args:
        arrivals: wakes them.
        monitor: knows whether another process has failed; told what this one waits for.
        timeout_s: longest wait in which no connection of any process moves bytes, in seconds. Time in which this
            process itself does not run, because it is stopped, does not count.
        device: on which this process computes.
        patience_s: how much longer, in seconds, a wait for other groups of processes may take: first should know who
            is nearer to what is wrong.
        silent_s: the first wait that takes longer, in seconds, says in the log what it is for, then the first that
            takes twice as long, and so on.

    Attributes:
        arrivals: as given.
        monitor: as given.
        timeout_s: as given.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        monitor: Monitor,
        timeout_s: float,
        device: torch.device = _HOST,
        patience_s: float = 0.0,
        silent_s: float = 60.0,
    ) -> None:
        self.monitor = monitor
        self.timeout_s = timeout_s
        self.arrivals = arrivals
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._port = port_of(device)
        self._thread: threading.Thread | None = None

    @property
    def broken(self) -> bool:
        """Whether a channel of this process cannot go on."""
        return self.arrivals.failure is not None

    def limit_s(self, across: int = 0) -> float:
        """The longest wait.

        Args:
            across: 1 for one that depends on other groups of processes, 2 for one that depends on such waits there.
        """
        return self.timeout_s + across * self._patience_s

    def until(self, ready: Callable[[], bool], doing: str | Callable[[], str], across: int = 0) -> None:
        """Block until ``ready()``.

        Args:
            ready: asked again whenever something arrives.
            doing: says what this process does, as ``waits for the input of F0``.
            across: as for :meth:`limit_s`.
        Raises:
            PeerError: nothing arrived in time, a channel broke, or another process has failed.
        """
        if ready():
            return
        with self.monitor.during(doing if isinstance(doing, str) else doing()):
            self._wait(ready, f"{self.monitor.name} {self.monitor.activity.text}", self.limit_s(across))

    def _wait(self, ready: Callable[[], bool], waiting: str, limit_s: float) -> None:
        arrivals, monitor = self.arrivals, self.monitor
        waited_s, looked = 0.0, time.monotonic()
        while True:
            monitor.check()
            with arrivals.condition:
                if ready():
                    return
                if arrivals.failure is None:
                    arrivals.condition.wait(_POLL_S)
                if ready():
                    return
                failure = arrivals.failure
            if failure is not None:
                monitor.look()
                raise PeerError(f"{waiting}, but {failure}{monitor.account().text}") from failure
            now = time.monotonic()
            waited_s, looked = waited_s + min(now - looked, 2 * _POLL_S), now
            if self._silent_s < waited_s < limit_s:
                self._silent_s *= 2
                _log.warning(
                    "%s, for %.0f s by now; it gives up when nothing moves between processes for %g s (timeout=...)",
                    waiting, waited_s, limit_s,
                )  # fmt: skip
            if waited_s > limit_s:
                account = monitor.account()
                waited_s = 0.0 if monitor.defers else min(waited_s, account.idle_s, arrivals.idle_s())
                if waited_s > limit_s:
                    raise PeerError(
                        f"{waiting}, and nothing arrived for {limit_s:g} s. Either a process is stuck, or the "
                        f"work takes longer than the strategy's timeout; raise timeout=... if so{account.text}"
                    )
                looked = time.monotonic()

    def run(
        self, function: Callable[[], object], doing: str, given_up: Callable[[], bool] = bool, across: int = 0
    ) -> None:
        """Run something that waits for other processes; meanwhile look whether one has failed.

        It runs in a thread, because a collective of gloo can neither be polled nor given up; on an accelerator on the
        stream of the caller, who goes on when it is put there.

        Args:
            function: to be run.
            doing: says what this process does.
            given_up: whether nobody wants it any more. Its thread goes on until its connections break.
            across: as for :meth:`limit_s`.
        Raises:
            GivenUpError: as said.
            PeerError: as of :meth:`until`, or a connection broke. Any other error of the function comes as it is.
        """
        self.monitor.check()
        done, errors = threading.Event(), []
        stream, infers = self._port.current_stream(), torch.is_inference_mode_enabled()

        def work() -> None:
            try:
                self._port.enter_thread()  # a thread begins on the first device, and on the default stream
                # tensors that were made in this mode can be written in it only
                with self._port.on_stream(stream), torch.inference_mode(infers), torch.no_grad():
                    function()
            except Exception as error:  # re-raised below, in the thread that asked
                errors.append(error)
            finally:
                done.set()
                self.arrivals.notify()

        self._thread = threading.Thread(target=work, name=f"avgpipe {doing}", daemon=True)
        self._thread.start()
        with self.monitor.during(doing):
            self.until(lambda: done.is_set() or given_up(), doing, across)
            if given_up() and (errors or not done.is_set()):
                raise GivenUpError(f"{self.monitor.name} {doing}, but a group has left")
            if errors:
                if not isinstance(errors[0], RuntimeError) or isinstance(errors[0], AvgPipeError):
                    raise errors[0]
                self.monitor.look()
                if given_up():
                    raise GivenUpError(f"{self.monitor.name} {doing}, but a group has left")
                lost = f"{self.monitor.name} {doing}, but a connection broke: {errors[0]}{self.monitor.account().text}"
                raise PeerError(lost) from errors[0]

    def close(self, join_s: float) -> None:
        """Give a function that still runs a moment to end."""
        if self._thread is not None:
            self._thread.join(join_s)

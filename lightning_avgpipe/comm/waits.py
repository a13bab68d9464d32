"""Waits: how a process waits for others. Every wait is bounded, and ends with an error when another process fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.errors import AvgPipeError, PeerError
from lightning_avgpipe.utils.device import port_of

__all__ = ["Waits"]

_HOST = torch.device("cpu")
_POLL_S = 0.5  # between two looks at the clock; whatever happens wakes the wait


class Waits:
    """The waits of a process's main thread.

    Args:
        arrivals: wakes them.
        monitor: knows whether another process has failed; told what this one waits for.
        timeout_s: longest wait in which no connection of any process moves bytes, in seconds. Time in which this
            process itself does not run, because it is stopped, does not count.
        device: on which this process computes.

    Attributes:
        monitor: as given.
        timeout_s: as given.
    """

    def __init__(self, arrivals: Arrivals, monitor: Monitor, timeout_s: float, device: torch.device = _HOST) -> None:
        self.monitor = monitor
        self.timeout_s = timeout_s
        self._arrivals = arrivals
        self._port = port_of(device)
        self._thread: threading.Thread | None = None

    def until(self, ready: Callable[[], bool], doing: str | Callable[[], str]) -> None:
        """Block until ``ready()``.

        Args:
            ready: asked again whenever something arrives.
            doing: says what this process does, as ``waits for the input of F0``.
        Raises:
            PeerError: nothing arrived in time, a channel broke, or another process has failed.
        """
        if ready():
            return
        with self.monitor.during(doing if isinstance(doing, str) else doing()):
            self._wait(ready, f"{self.monitor.name} {self.monitor.activity.text}")

    def _wait(self, ready: Callable[[], bool], waiting: str) -> None:
        arrivals, monitor = self._arrivals, self.monitor
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
            if waited_s > self.timeout_s:
                account = monitor.account()
                waited_s = min(waited_s, account.idle_s, arrivals.idle_s())
                if waited_s > self.timeout_s:
                    raise PeerError(
                        f"{waiting}, and nothing arrived for {self.timeout_s:g} s. Either a process is stuck, or the "
                        f"work takes longer than the strategy's timeout; raise timeout=... if so{account.text}"
                    )
                looked = time.monotonic()

    def run(self, function: Callable[[], object], doing: str) -> None:
        """Run something that waits for other processes; meanwhile look whether one has failed.

        It runs in a thread, because a collective of gloo can neither be polled nor given up; on an accelerator on the
        stream of the caller, who goes on when it is put there.

        Raises:
            PeerError: as of :meth:`until`, or a connection broke. Any other error of the function comes as it is.
        """
        self.monitor.check()
        done, errors = threading.Event(), []
        stream = self._port.current_stream()

        def work() -> None:
            try:
                self._port.enter_thread()  # a thread begins on the first device, and on the default stream
                with self._port.on_stream(stream), torch.no_grad():
                    function()
            except Exception as error:  # re-raised below, in the thread that asked
                errors.append(error)
            finally:
                done.set()
                self._arrivals.notify()

        self._thread = threading.Thread(target=work, name=f"avgpipe {doing}", daemon=True)
        self._thread.start()
        with self.monitor.during(doing):
            self.until(done.is_set, doing)
            if errors:
                if not isinstance(errors[0], RuntimeError) or isinstance(errors[0], AvgPipeError):
                    raise errors[0]
                self.monitor.look()
                lost = f"{self.monitor.name} {doing}, but a connection broke: {errors[0]}{self.monitor.account().text}"
                raise PeerError(lost) from errors[0]

    def close(self, join_s: float) -> None:
        """Give a function that still runs a moment to end."""
        if self._thread is not None:
            self._thread.join(join_s)

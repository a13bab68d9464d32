"""The starter: the process that started this one, by running the script again as the launcher of ddp does, or a copy.

A started process ends with its starter: before the processes are connected nobody else could end it, and it would wait
for its starter until the timeout. The starter notices when one that it has started dies, and ends those that are stuck.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_avgpipe.errors import PeerError

__all__ = ["ScriptLauncher", "deaths", "end_with_this_process", "needing_starter"]

_POLL_S = 0.5
_END_S = 10.0  # how long processes of a failed run may take to end by themselves
_VARIABLE = "AVGPIPE_STARTER"
# read once and removed, so that what this process starts does not take it for its own
_SCRIPT_STARTER = os.environ.pop(_VARIABLE, "")
_started: dict[int, subprocess.Popen[Any]] = {}  # rank -> process; trainers that come later find them here


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each other process of this node, and tells it who started it."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, if they are not there, and call the function.

        Lightning's own launcher would also kill this process when another one dies, before it can say which and why.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Send a signal to the other processes, also if an earlier trainer has started them."""
        for process in _started.values():
            process.send_signal(signum)

    def _call_children_scripts(self) -> None:
        os.environ[_VARIABLE] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_VARIABLE]
            first = self.cluster_environment.node_rank() * self.num_processes
            _started.update(enumerate(self.procs, first + 1))


def deaths() -> dict[int, str]:
    """Of the processes that this one has started, those that did not end well: rank -> how."""
    return {rank: _ended(code) for rank, process in _started.items() if (code := process.poll())}


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"


@functools.cache
def end_with_this_process() -> None:
    """After a failure no process that this one started stays when this one ends, also if it is stuck."""
    # not before: the error of this process is on the screen by then
    atexit.register(_end)


def _end() -> None:
    deadline = time.monotonic() + _END_S
    for process in _started.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def needing_starter(name: str) -> Iterator[None]:
    """Within this context this process ends when its starter does, whatever it waits for.

    Args:
        name: of this process, for messages.

    Raises:
        PeerError: the starter is gone already.
    """
    starter = _starter()
    if starter is None:
        yield
        return
    gone = (
        f"{name} was started by process {starter}, which ended or was killed before the processes were connected, so "
        "this one ends too"
    )
    if os.getppid() != starter:
        raise PeerError(gone)
    connected = threading.Event()

    def look() -> None:
        while not connected.wait(_POLL_S):
            if os.getppid() != starter:
                # the main thread is inside of a call that waits, and that nobody can interrupt
                sys.stderr.write(f"\n{gone}\n")
                sys.stderr.flush()
                os._exit(1)

    thread = threading.Thread(target=look, name="avgpipe starter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        connected.set()
        thread.join()


def _starter() -> int | None:
    """The number of the process whose child this one was when it began; None if it was started in another way."""
    if os.name != "posix":  # elsewhere a process keeps its parent's number when the parent is gone
        return None
    parent = multiprocessing.parent_process()
    if parent is not None and getattr(multiprocessing.current_process(), "_start_method", "") in ("spawn", "fork"):
        return parent.pid
    return int(_SCRIPT_STARTER) if _SCRIPT_STARTER.isdecimal() else None

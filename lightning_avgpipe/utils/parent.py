"""The parent: the process that started this one, by running the script again as the launcher of ddp does, or a copy.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from lightning_avgpipe.errors import PeerError

_POLL_S = 0.5
_END_S = 10.0  # how long processes of a failed run may take to end by themselves
_VARIABLE = "AVGPIPE_STARTER"
# read once and removed, so that what this process starts does not take it for its own
_SCRIPT_STARTER = os.environ.pop(_VARIABLE, "")
_started: dict[int, subprocess.Popen[Any]] = {}  # rank -> process; trainers that come later find them here


@contextlib.contextmanager
def starting(first: int, processes: Callable[[], Sequence[subprocess.Popen[Any]]]) -> Iterator[None]:
    """Within this context processes are started, which know who starts them and end with it.

    Args:
        first: rank of the first of them.
        processes: returns them when the context ends.
    """
    os.environ[_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        _started.update(enumerate(processes(), first))


def started() -> list[subprocess.Popen[Any]]:
    """The processes that this one has started, for this trainer or an earlier one."""
    return list(_started.values())


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
def end_with_this_process(spared: tuple[int, ...] = ()) -> None:
    """After a failure no process that this one started stays when this one ends, also if it is stuck.

    Args:
        spared: ranks of those that go on; this one does not end before them.
    """
    # not before: the error of this process is on the screen by then
    atexit.register(_outlast, [process for rank, process in _started.items() if rank in spared])
    end_at_exit(_started.keys() - set(spared))


def end_at_exit(ranks: Collection[int]) -> None:
    """Of those of these ranks that this process has started none stays when it ends, also if it is stuck."""
    atexit.register(_end, [_started[rank] for rank in ranks if rank in _started])


def _outlast(processes: Collection[subprocess.Popen[Any]]) -> None:
    """Wait for processes, each of which ends by itself; whoever wants to stop them need not look for them."""

    def stop(signum: int, frame: Any) -> None:
        for process in processes:
            process.send_signal(signum)

    if processes:
        signal.signal(signal.SIGTERM, stop)
    for process in processes:
        process.wait()


def _end(processes: Collection[subprocess.Popen[Any]]) -> None:
    deadline = time.monotonic() + _END_S
    for process in processes:
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

"""The start of processes: the parent process, and the store that all of them share.

A parent starts other processes by running the script again, as ddp's launcher does, or as copies of itself.

Until the processes are connected, a started process ends when its starter does; otherwise it would wait for the starter
until the timeout. The starter notices when a process that it has started dies, and kills those that are stuck.
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
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_avgpipe.errors import PeerError

_POLL_S = 0.5
_END_S = 10.0  # time that processes of a failed run have to end by themselves
_VARIABLE = "AVGPIPE_STARTER"
# read once and removed, so that processes that this one starts do not inherit it
_SCRIPT_STARTER = os.environ.pop(_VARIABLE, "")
_started: dict[int, subprocess.Popen[Any]] = {}  # rank -> process; later trainers in this process use them too


@contextlib.contextmanager
def starting(first: int, processes: Callable[[], Sequence[subprocess.Popen[Any]]]) -> Iterator[None]:
    """Tell the processes that are started within this context that this process is their starter.

    Args:
        first: rank of the first started process.
        processes: function that returns the started processes at the end of the context.
    """
    os.environ[_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        _started.update(enumerate(processes(), first))


def started() -> list[subprocess.Popen[Any]]:
    """Return the processes that this one has started, for this trainer or an earlier one."""
    return list(_started.values())


def deaths() -> dict[int, str]:
    """Return how each started process that failed has ended, by rank."""
    return {rank: ended(code) for rank, process in _started.items() if (code := process.poll())}


def ended(code: int) -> str:
    """Return how a process ended, given its exit code."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"


@functools.cache
def end_with_this_process() -> None:
    """Register that this process, when it exits, ends the processes that it started, even if they are stuck."""
    # at exit, so that this process's error is shown first
    atexit.register(_end, started())


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
    """End this process within this context if its starter ends, even while it waits in a blocking call.

    Args:
        name: name of this process, for messages.

    Raises:
        PeerError: the starter has ended already.
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
                # the main thread is in a blocking call that cannot be interrupted
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
    """Return the id of the process that started this one; None if it was started in another way."""
    if os.name != "posix":  # elsewhere getppid() does not change when the parent has ended
        return None
    parent = multiprocessing.parent_process()
    if parent is not None and getattr(multiprocessing.current_process(), "_start_method", "") in ("spawn", "fork"):
        return parent.pid
    return int(_SCRIPT_STARTER) if _SCRIPT_STARTER.isdecimal() else None


# -- a part of the store for this start of the processes, without values of earlier starts -----------------------------
#
# torchrun keeps its store, with everything that earlier processes wrote, when it restarts processes. Its count of
# restarts does not distinguish starts, since a node that joined late counts from zero.
_PREFIX = "avgpipe/attempt"
_WELCOME_POLL_S = 0.05


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a part of a store that only the processes that now call this function use.

    ::

        rank r   hello/r = token                  token's welcome -> session     here/session/r
        rank 0            token -> welcome = session                    ... until all are here

    Rank 0 may read a token that an earlier process of rank r wrote. Then it welcomes a process that has ended, and
    reads again until the current one has answered.

    Args:
        store: store that all processes share.
        rank: rank of this process.
        world_size: number of processes that call this function.
        timeout: longest time to wait for all processes.
    Raises:
        DistStoreError: not all processes called within the timeout. The message says which are missing.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"{_PREFIX}/hello/{rank}", token)
        welcome = f"{_PREFIX}/welcome/{token}"
        store.wait([welcome], timeout)
        session = store.get(welcome).decode()
        store.set(f"{_PREFIX}/{session}/here/{rank}", "1")
    else:
        session = uuid.uuid4().hex
        _welcome(store, session, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
    return dist.PrefixStore(f"{_PREFIX}/{session}", store)


def _welcome(store: dist.Store, session: str, missing: set[int], deadline: float) -> None:
    while True:
        for rank in sorted(missing):
            if store.check([f"{_PREFIX}/{session}/here/{rank}"]):
                missing.remove(rank)
            elif store.check([hello := f"{_PREFIX}/hello/{rank}"]):
                store.set(f"{_PREFIX}/welcome/{store.get(hello).decode()}", session)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come in time")
        time.sleep(_WELCOME_POLL_S)

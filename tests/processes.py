"""Two real processes for a test: forked, joined within a time limit, their results and errors brought back."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

LIMIT_S = 90.0
ENDING_S = 3.0  # for threads that have been told to end
LOOK_S = 0.05  # between two looks at what nobody reports


def free_port() -> int:
    """A port that nobody listens on, of those that connections to others are not given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def until(seen: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait for what another process or thread does; fails when it has not come in time.

    Args:
        seen: gives something true when it has come.
        what: that is waited for.
        limit_s: how long.

    Returns:
        What was seen.
    """
    deadline, never = time.monotonic() + limit_s, threading.Event()
    while not (found := seen()):
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s:.0f} s"
        never.wait(LOOK_S)
    return found


class Outcome:
    """What one process did: its result, or the error it ended with."""

    def __init__(self, result: Any, error: str | None, exit_code: int | None, threads: list[str], ended: float) -> None:
        self.result = result
        self.error = error
        self.exit_code = exit_code
        self.threads = threads  # of this package, that were left at the end
        self.ended = ended  # by the clock that all processes share


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    pids: list[int] | None = None,
    ranks: Sequence[int] | None = None,
    port: int | None = None,
) -> list[Outcome]:
    """Call ``function(rank, *args)`` in each of ``world_size`` processes, as a launcher such as torchrun would.

    Each computes on one thread, and writes into the folder. A process that is killed has no result and no error. No
    process outlives this call.

    Args:
        world_size: number of processes in all.
        function: that each calls.
        args: of it.
        folder: for files; they work in it.
        pids: their numbers are added.
        ranks: of those that are started here; None: all.
        port: at which they find each other; None: one that is free.
    """
    port = port or free_port()
    context = mp.get_context("fork")
    started = range(world_size) if ranks is None else ranks
    processes = [
        context.Process(target=_work, args=(rank, world_size, port, function, args, folder)) for rank in started
    ]
    for process in processes:
        process.start()
    if pids is not None:
        pids.extend(process.pid for process in processes if process.pid is not None)
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, process in zip(started, processes, strict=True) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(ENDING_S)
    assert not stuck, f"ranks {stuck} did not end within {LIMIT_S:.0f} s"
    outcomes = []
    for rank, process in zip(started, processes, strict=True):
        path = folder / f"outcome-{rank}.pickle"
        result, error, *rest = pickle.loads(path.read_bytes()) if path.exists() else (None, None, [], 0.0)
        path.unlink(missing_ok=True)
        if process.exitcode and process.exitcode < 0 and _crash(folder, rank).exists():
            error = error or _crash(folder, rank).read_text() or None
        outcomes.append(Outcome(result, error, process.exitcode, *rest))
    return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results of all processes; fails with the error of the first that failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}"
    return [outcome.result for outcome in outcomes]


def each(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """What ``function(rank, *args)`` gives in each of the processes."""
    return results(run(world_size, function, *args, folder=folder))


def everywhere(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """What ``function(*args)`` gives in each of the processes."""
    return each(world_size, lambda rank: function(*args), folder=folder)


def shared(world_size: int, function: Callable[[int], Any]) -> Any:
    """A fixture: what ``function(rank)`` gives in each of the processes, for all tests of a module."""

    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return each(world_size, function, folder=tmp_path_factory.mktemp("shared"))

    return found


def num_processes() -> int:
    """How many there are; in one of them, before the end of a training clears the environment."""
    return int(os.environ["WORLD_SIZE"])


def two_and_one(function: Callable[..., Any], folder: Path, *args: Any) -> tuple[list[Any], Any]:
    """What ``function(folder, *args)`` gives in each of two processes and in one, in folders of their own."""
    found = []
    for sub, count in (("two", 2), ("one", 1)):
        (folder / sub).mkdir()
        found.append(everywhere(count, function, folder / sub, *args, folder=folder))
    return found[0], found[1][0]


def _work(rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any, folder: Path) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    faulthandler.enable(open(_crash(folder, rank), "w"))  # noqa: SIM115  # open as long as the process lives
    gc.freeze()  # garbage of the test's process may own threads that do not exist here, and must not be collected
    os.environ.setdefault("XDG_CACHE_HOME", str(folder / "cache"))  # a fixture of a module runs before conftest sets it
    os.chdir(folder)
    torch.set_num_threads(1)
    result, error, exit_code = None, None, 0
    try:
        result = function(rank, *args)
    except BaseException as raised:  # reported to the test, whatever it is
        error = traceback.format_exc()
        exit_code = 1
        if isinstance(raised, SystemExit):
            exit_code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    ended = time.monotonic()
    (folder / f"outcome-{rank}.pickle").write_bytes(pickle.dumps((result, error, left_behind(), ended)))
    os._exit(exit_code)


def _crash(folder: Path, rank: int) -> Path:
    """Where a process says that it crashes, which is not in its folder."""
    return folder.with_name(f"{folder.name}-crash-{rank}.txt")


def left_behind() -> list[str]:
    """The names of this package's threads that do not end; where they are is printed.

    Closing waits for them for a bounded time only, which a machine that stands still for seconds may use up.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("avgpipe")]
    deadline = time.monotonic() + ENDING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    threads = [thread for thread in threads if thread.is_alive()]
    frames = sys._current_frames()
    for thread in threads:
        where = traceback.format_stack(frames[thread.ident]) if thread.ident in frames else ["has ended\n"]
        print(f"thread '{thread.name}' is left:", *where, sep="\n", file=sys.stderr)
    return [thread.name for thread in threads]

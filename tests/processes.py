"""Two real processes for a test: forked, joined within a time limit, their results and errors brought back."""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

LIMIT_S = 90.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Outcome:
    """What one process did: its result, or the error it ended with."""

    def __init__(self, result: Any, error: str | None, exit_code: int | None) -> None:
        self.result = result
        self.error = error
        self.exit_code = exit_code


def run(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Outcome]:
    """Call ``function(rank, *args)`` in each of ``world_size`` processes, as a launcher such as torchrun would.

    A process that is killed has no result and no error. No process outlives this call.
    """
    port = free_port()
    context = mp.get_context("fork")
    processes = [
        context.Process(target=_work, args=(rank, world_size, port, function, args, folder))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert not stuck, f"ranks {stuck} did not end within {LIMIT_S:.0f} s"
    outcomes = []
    for rank, process in enumerate(processes):
        path = folder / f"outcome-{rank}.pickle"
        result, error = pickle.loads(path.read_bytes()) if path.exists() else (None, None)
        path.unlink(missing_ok=True)
        outcomes.append(Outcome(result, error, process.exitcode))
    return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results of all processes; fails with the error of the first that failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}"
    return [outcome.result for outcome in outcomes]


def _work(rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any, folder: Path) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    result, error = None, None
    try:
        result = function(rank, *args)
    except BaseException:  # reported to the test, whatever it is
        error = traceback.format_exc()
    (folder / f"outcome-{rank}.pickle").write_bytes(pickle.dumps((result, error)))
    os._exit(0 if error is None else 1)

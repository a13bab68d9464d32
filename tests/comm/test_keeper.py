"""The keeper keeps the store of other processes as long as one of them is there, and no longer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lightning_avgpipe.comm import keeper
from tests import processes

LIMIT_S = 30.0


def use(rank: int, port: int) -> int:
    """The first process starts a keeper, writes and ends; the second one reads when it is gone."""
    process = keeper.start(port, 2, LIMIT_S) if rank == 0 else None
    store = dist.TCPStore("localhost", port, timeout=timedelta(seconds=LIMIT_S), wait_for_workers=False)
    assert keeper.enter(store, rank) is None
    assert keeper.name() == "the keeper"
    if process is not None:
        store.set("first", f"{os.getpid()} {process.pid}")
        store.wait(["second"], timedelta(seconds=LIMIT_S))
        return process.pid
    first = int(store.get("first").decode().split()[0])
    store.set("second", "")
    psutil.Process(first).wait(LIMIT_S)
    return int(store.get("first").decode().split()[1])


def test_a_rank_is_that_of_the_first_process_that_comes_as_it() -> None:
    store = dist.HashStore()
    store.set("avgpipe/keeper/3", "1234 the other host")
    assert keeper.enter(store, 3) == "process 1234 on the other host"
    assert store.get("avgpipe/keeper/3") == b"1234 the other host"


@pytest.mark.slow
def test_the_store_outlives_who_has_asked_for_it_and_ends_with_the_last_process(tmp_path: Path) -> None:
    first, second = processes.results(processes.run(2, use, processes.free_port(), folder=tmp_path))
    assert first == second
    _, left = psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=LIMIT_S)
    assert not left


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    taken = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match=f"is to keep the store at port {taken.port} ended"):
        keeper.start(taken.port, 2, LIMIT_S)

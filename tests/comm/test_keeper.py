"""The keeper keeps the store of other processes as long as one of them is there, and no longer."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lightning_avgpipe.comm import keeper
from tests import processes

LIMIT_S = 30.0
STAYS_S = 2.0  # the keeper looks more often who is left


def use(rank: int, port: int) -> str | None:
    """The first process starts a keeper and ends, then the second one does, and the third comes as the first.

    Returns:
        What the third one reads when it is the only one that is left: the number of the keeper's process.
    """
    kept = keeper.start(port, 2, LIMIT_S) if rank == 0 else None
    store = dist.TCPStore("localhost", port, timeout=timedelta(seconds=LIMIT_S), wait_for_workers=False)
    if kept is not None:
        store.set("keeper", f"{kept.pid}")
    if rank == 2:
        gone(store, 0)
        before = keeper.enter(store, 0)
        store.set("2", f"{os.getpid()}")
        gone(store, 1)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(int(store.get("keeper"))).wait(STAYS_S)
        assert before == f"process {int(store.get('0'))} on {platform.node()}"
        return store.get("keeper").decode()
    assert keeper.enter(store, rank) is None
    assert keeper.name() == "the keeper"
    store.set(f"{rank}", f"{os.getpid()}")
    store.wait([f"{rank + 1}"], timedelta(seconds=LIMIT_S))
    return None


def gone(store: dist.Store, rank: int) -> None:
    """Wait until a process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(store.get(f"{rank}"))).wait(LIMIT_S)


def test_who_comes_as_a_rank_learns_who_came_before_it() -> None:
    store = dist.HashStore()
    entries = ["1234 one token", f"{os.getpid()} {platform.node()} another-token"]
    for attempt, entry in enumerate(entries):
        assert store.compare_set(f"avgpipe/keeper/3/{attempt}", "", entry) == entry.encode()
    for _ in range(2):  # a process is no other one to itself
        assert keeper.enter(store, 3) == f"process {os.getpid()} on {platform.node()}"
    assert [store.get(f"avgpipe/keeper/3/{n}").decode() for n in range(2)] == entries
    assert store.num_keys() == 3


@pytest.mark.slow
def test_the_store_outlives_who_has_asked_for_it_and_ends_with_the_last_process_that_has_come(tmp_path: Path) -> None:
    *_, found = processes.results(processes.run(3, use, processes.free_port(), folder=tmp_path))
    _, left = psutil.wait_procs([psutil.Process(int(found))] if psutil.pid_exists(int(found)) else [], timeout=LIMIT_S)
    assert not left


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    taken = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match=f"is to keep the store at port {taken.port} ended"):
        keeper.start(taken.port, 2, LIMIT_S)

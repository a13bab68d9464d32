"""Connections of processes last as long as the processes do: only who waits for something has a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Party, Route
from lightning_avgpipe.comm.transfer import Arrivals
from tests import processes
from tests.threads import CPU, LIMIT_S

LIMIT = timedelta(seconds=1)  # of the connections
LONGER_S = 1.5
NEWS, WORLD = Route("news", 0, 1), Party("world", (0, 1))


def compute_for_long() -> None:
    """Nothing is sent or awaited by the main thread meanwhile."""
    threading.Event().wait(LONGER_S)


def be_suspended() -> None:
    """All threads of this process stand still, until another process wakes them."""
    with subprocess.Popen(["sh", "-c", f"sleep {LONGER_S}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def idle(rank: int, pauses: Sequence[Callable[[], None]]) -> list[list[float]]:
    """A receive is posted, and a sum begun, long before they are met; returns what came and the sum, of each pause."""
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    arrivals, network, found = Arrivals(), ProcessGroups(rank, CPU, LIMIT), []
    network.open()
    network.connect(NEWS)
    network.join(WORLD)
    for be_idle in pauses:
        mine = torch.ones(1)
        if rank == 1:
            inbox = network.inbox(NEWS, arrivals)
            inbox.expect(1)
            total = network.group(WORLD).allreduce([mine])
        be_idle()
        assert arrivals.failure is None
        dist.barrier()  # both have been idle for as long
        if rank == 0:
            outbox = network.outbox(NEWS, arrivals)
            outbox.put(Message(0, (torch.full((1,), 7.0),)))
            outbox.close(LIMIT_S)
            network.group(WORLD).allreduce([mine]).wait()
            found.append([7.0, float(mine)])
        else:
            arrivals.wait_for(lambda of=inbox: of.ready() or arrivals.failure is not None, LIMIT_S)
            assert arrivals.failure is None, arrivals.failure
            (news,) = inbox.get().tensors
            total.wait()
            found.append([float(news), float(mine)])
            inbox.close(LIMIT_S)
        dist.barrier()
    network.close()
    return found


def test_a_job_goes_on_after_pauses_longer_than_the_limit_of_connections(tmp_path: Path) -> None:
    found = processes.each(2, idle, (compute_for_long, be_suspended), folder=tmp_path)
    assert found == [[[7.0, 2.0]] * 2] * 2


class Endless:
    """A group whose backend for devices has nothing to abort."""

    def allreduce(self, tensors: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace()


def test_a_backend_that_cannot_abort_what_a_device_waits_for_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: Endless())
    network = ProcessGroups(0, torch.device("meta", 0), LIMIT, "xccl")
    network.join(Party("all", (0, 1), on_host=False))
    network.disconnect()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("the backend 'xccl' cannot abort its transfers") and "meta:0" in said


def test_all_that_a_device_waits_for_is_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort waits for what its device does, and that may be what another abort ends."""
    all_asked, ended = threading.Barrier(2), []

    class Kernels(Endless):
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(abort=lambda: ended.append(all_asked.wait(LONGER_S)))

    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: Kernels())
    network = ProcessGroups(0, torch.device("meta", 0), LIMIT, "xccl")
    for name in ("groups", "replicas"):
        network.join(Party(name, (0, 1), on_host=False))
    network.disconnect()
    assert sorted(ended) == [0, 1]

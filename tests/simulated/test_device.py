"""The simulated device finds what it is there to find, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.topology import Party
from tests.simulated import device
from tests.simulated.communicator import Communicator
from tests.simulated.process import SimulatedProcess
from tests.threads import LIMIT_S, Hub, Injector, MemoryGroup

Simulated = Callable[..., Any]


def sim(index: int = 0) -> torch.device:
    return torch.device("sim", index)


def kinds(report: device.Report) -> set[str]:
    return {error.partition(":")[0] for error in report.errors}


def other_stream_after_now() -> Any:
    stream = torch.Stream(device=sim())
    stream.wait_event(torch.accelerator.current_stream(sim()).record_event())
    return stream


# -- arithmetic ------------------------------------------------------------------------------------------------------


def train(place: str) -> list[Tensor]:
    torch.manual_seed(1)
    layers = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, 8), nn.LayerNorm(8)
    model = nn.Sequential(*layers).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(5, 3, 8).to(place)
    torch.manual_seed(2)
    for _ in range(3):
        y = model(x)
        loss = ((y @ y.T).softmax(-1) @ y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def same_training() -> tuple[bool, list[str]]:
    with device.reported() as report:
        ours = train("sim")
    return all(map(torch.equal, train("cpu"), ours)), list(report.errors)


def test_training_gives_the_hosts_bits(simulated: Simulated) -> None:
    same, errors = simulated(same_training)
    assert same
    assert not errors


# -- races -----------------------------------------------------------------------------------------------------------


def on_another_stream(then: str, waits: bool) -> tuple[set[str], bool]:
    """Something is read on another stream: what is found, and whether all numbers and addresses are as expected."""
    with device.reported() as report:
        x = torch.ones(4, device=sim())
        address = x.data_ptr()
        stream = torch.Stream(device=sim()) if then == "read" and not waits else other_stream_after_now()
        with stream:
            y = x + 1
        if waits and then == "recorded":
            x.record_stream(stream)
        elif waits:
            torch.accelerator.current_stream(sim()).wait_event(stream.record_event())
        if then == "written":
            x.zero_()
        elif then != "read":
            del x
            assert torch.empty(4, device=sim()).data_ptr() == address, "memory is used again at once"
        torch.accelerator.synchronize(0)
        return kinds(report), float(y.sum()) == 8.0


@pytest.mark.parametrize(
    ("then", "found"), [("read", "race"), ("written", "race"), ("freed", "freed early"), ("recorded", "freed early")]
)
def test_a_missing_wait_is_found(simulated: Simulated, then: str, found: str) -> None:
    assert simulated(on_another_stream, then, True) == (set(), True)
    without, same = simulated(on_another_stream, then, False)
    assert without == {found}
    assert same != (then == "read")  # of which nonsense is read


def copied_to_the_host(pinned: bool, waits: bool) -> tuple[bool, int]:
    x = torch.arange(4.0, device=sim())
    with device.reported() as report:
        y = torch.empty(4, pin_memory=pinned).copy_(x, non_blocking=True)
        if waits:
            torch.accelerator.current_stream(sim()).synchronize()
        return y.tolist() == [0, 1, 2, 3], report.waits.total()


def test_what_is_copied_to_pinned_memory_is_there_after_a_wait(simulated: Simulated) -> None:
    assert simulated(copied_to_the_host, True, True) == (True, 1)
    assert simulated(copied_to_the_host, True, False) == (False, 0)
    assert simulated(copied_to_the_host, False, False) == (True, 1)  # other memory is waited for


# -- waits of the host -----------------------------------------------------------------------------------------------


def host_waits() -> list[tuple[str, str]]:
    x = torch.ones(4, device=sim())
    with device.reported() as report:
        float(x.sum())
        x.cpu()
        torch.ones(4).to(sim())
        torch.accelerator.synchronize(0)
        torch.accelerator.current_stream(sim()).record_event().synchronize()
        x + 1
    return [(wait.thread, wait.why) for wait in report.waits]


def test_waits_of_the_host_are_listed(simulated: Simulated) -> None:
    whys = ["item", "copy to the host", "copy to the device", "device.synchronize", "event.synchronize"]
    assert simulated(host_waits) == [("MainThread", why) for why in whys]


# -- communicators ---------------------------------------------------------------------------------------------------


def in_two_threads(work: Callable[[int, Callable[[str], Communicator]], Any]) -> list[Any]:
    """What ``work(rank, connect)`` gives in each of two threads; ``connect(name)`` makes a communicator."""
    hub, given = Hub(Injector()), [None, None]

    def live(rank: int) -> None:
        torch.get_device_module("sim").set_device(rank)

        def connect(name: str) -> Communicator:
            return Communicator(MemoryGroup(hub, Party(name, (0, 1)), rank), rank, 2)  # type: ignore[arg-type]

        try:
            given[rank] = work(rank, connect)
        except RuntimeError as error:
            given[rank] = str(error)  # type: ignore[call-overload]

    ranks = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
        assert not rank.is_alive()
    return given


def message(waits: bool) -> tuple[list[Any], set[str]]:
    def work(rank: int, connect: Callable[[str], Communicator]) -> Any:
        communicator, x = connect("world"), torch.full((4,), 7.0 * (1 - rank), device=sim(rank))
        done = communicator.recv([x], 0) if rank else communicator.send([x], 1)
        if waits:
            done.wait()
        result = float((x + 1).sum())
        del x
        torch.empty(4, device=sim(rank))  # of the memory that was free
        return result

    with device.reported() as report:
        return in_two_threads(work), kinds(report)


def test_what_is_received_must_be_waited_for(simulated: Simulated) -> None:
    assert simulated(message, True) == ([32.0, 32.0], set())
    (_, received), found = simulated(message, False)
    assert received != 32.0
    assert found == {"race", "freed early"}  # nor does the sender wait before it lets go of the memory


def queued(queues: int) -> list[Any]:
    """A device waits for a message on one stream, and sends on another what the other one waits for."""

    def work(rank: int, connect: Callable[[str], Communicator]) -> Any:
        there, back = connect("0 to 1"), connect("1 to 0")
        x, y = torch.full((4,), 1.0 + rank, device=sim(rank)), torch.empty(4, device=sim(rank))
        waiting = torch.Stream(device=sim(rank))
        waiting.wait_event(torch.accelerator.current_stream(sim(rank)).record_event())
        with waiting:
            (there if rank else back).recv([y], 1 - rank).wait()
        (back if rank else there).send([x], 1 - rank)
        torch.accelerator.current_stream(sim(rank)).wait_stream(waiting)
        total = float(y.sum())
        torch.accelerator.synchronize(rank)
        return total

    device.backend.set_queues(queues)
    try:
        return in_two_threads(work)
    finally:
        device.backend.set_queues(0)


@pytest.mark.slow  # it waits until the limit
def test_streams_that_share_a_queue_wait_for_what_holds_it(simulated: SimulatedProcess) -> None:
    assert simulated(queued, 0) == [8.0, 4.0]
    assert all("is stuck behind recv" in error for error in simulated(queued, 1))
    simulated.restart()

"""A relocation brings every name to its new owners, in few messages, and says beforehand what it will do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.weights.ownership import give_up, owners_of
from lightning_avgpipe.weights.relocation import ModuleTensors, OptimizerStates, Relocation, relocate
from tests import threads

OLD = {"a": (0,), "b": (0,), "c": (1,), "d": (0, 1, 2), "e": ()}
NEW = {"a": (1,), "b": (0,), "c": (2, 0), "d": (1,), "e": (2,)}


def in_threads(size: int, function: Callable[[Collectives], Any]) -> list[Any]:
    """What the function returns in each of some processes, which are threads."""
    stages = StageMap.on(DeviceLayout(size), size)
    return threads.results(threads.run(stages, lambda cluster: function(cluster.group)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_in_each_round_every_process_meets_one_other(size: int) -> None:
    every = {str(rank): (rank,) for rank in range(size)}
    moves = Relocation(every, dict.fromkeys(every, tuple(range(size)))).moves
    assert set(moves) == {(a, b) for a in range(size) for b in range(size) if a != b}
    rounds: list[set[frozenset[int]]] = [set()]
    for pair in moves:
        meeting = frozenset(pair)
        if meeting not in rounds[-1] and any(meeting & other for other in rounds[-1]):
            rounds.append(set())
        rounds[-1].add(meeting)
    assert len(rounds) <= size


def items(rank: int) -> dict[str, Any]:
    everything: dict[str, dict[str, Any]] = {
        name: {"weight": torch.arange(15.0).view(3, 5).T * ord(name), "steps": 4, "none": None} for name in OLD
    }
    everything["c"]["weight"] = torch.arange(6, dtype=torch.bfloat16)
    everything["a"]["inner"] = [torch.tensor(2.5, dtype=torch.float64), torch.empty(0, 3), torch.tensor([True])]
    return {name: everything[name] for name, ranks in OLD.items() if rank in ranks}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_trees_arrive_as_they_were(bucket_bytes: int) -> None:
    def move(processes: Collectives) -> Any:
        held = items(processes.rank)
        return Relocation(OLD, NEW).carry_out(processes, held.__getitem__, bucket_bytes)

    everything = items(0) | items(1)
    for rank, arrived in enumerate(in_threads(3, move)):
        assert set(arrived) == {0: {"c"}, 1: {"a"}, 2: {"c"}}[rank]
        for name, arrival in arrived.items():
            there, here = everything[name], arrival.on(torch.device("cpu"))
            assert here.keys() == there.keys() and here["steps"] == 4 and here["none"] is None
            assert torch.equal(here["weight"], there["weight"])
            assert here["weight"].stride() == there["weight"].stride()
            assert here["weight"].dtype == there["weight"].dtype
            assert here["weight"].untyped_storage().nbytes() == there["weight"].nbytes, "nothing else is kept with it"
            for one, other in zip(here.get("inner", ()), there.get("inner", ()), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_small_tensors_travel_together_and_no_message_exceeds_the_bucket() -> None:
    old = {str(i): (0,) for i in range(64)}
    new = {str(i): (1,) for i in range(64)}

    sent: list[int] = []
    send = Peer.send

    def noted(peer: Peer, tensor: Tensor) -> None:
        sent.append(tensor.numel())
        send(peer, tensor)

    def move(processes: Collectives) -> Any:
        arrived = Relocation(old, new).carry_out(processes, lambda name: torch.full((16,), float(name)), 1024)
        return {name: arrival.on(torch.device("cpu")) for name, arrival in arrived.items()}

    with mock.patch.object(Peer, "send", noted):
        nothing, arrived = in_threads(2, move)
    assert not nothing
    assert sent[2::3] == [1024] * 4  # contents, after lengths and description
    assert all(torch.equal(arrived[str(i)], torch.full((16,), float(i))) for i in range(64))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight


STAGES = {"first.weight": (0, 1), "first.bias": (0,), "norm.weight": (0,), "norm.bias": (0,), "last.bias": (1,)}
CHANGED = {"norm.running_mean": (0,), "norm.running_var": (0,), "norm.num_batches_tracked": (0,)}


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net.last(net.norm(net.first(torch.randn(4, 3)))).sum().backward()
        optimizer.step()
    return net, optimizer


def test_a_parameter_goes_with_its_gradient_and_states_and_a_buffer_with_its_contents() -> None:
    old = owners_of(Net(), {**STAGES, **CHANGED}, lambda stage: (1 - stage,), 2)
    new = owners_of(Net(), {**STAGES, **dict.fromkeys((*CHANGED, "norm.weight"), (1,))}, lambda stage: (1 - stage,), 2)

    whole, whole_optimizer = trained()
    copies = [copy.deepcopy((whole, whole_optimizer)) for _ in range(2)]
    for net, _ in copies:
        for parameter, there in zip(net.parameters(), whole.parameters(), strict=True):
            parameter.grad = there.grad

    def move(processes: Collectives) -> Any:
        net, optimizer = copies[processes.rank]
        parameters = dict(net.named_parameters())
        foreign = [name for name in parameters if processes.rank not in old[name]]
        states = OptimizerStates([optimizer], lambda: parameters)
        states.drop(foreign)
        give_up(net, foreign)
        if processes.rank == 0:
            net.norm.reset_running_stats()
        relocate(Relocation(old, new), processes, [ModuleTensors(net), states], torch.device("cpu"))
        return net, optimizer

    moved = []
    for rank, (net, optimizer) in enumerate(results := in_threads(2, move)):
        for (name, parameter), there in zip(net.named_parameters(), whole.parameters(), strict=True):
            assert parameter.is_meta == (rank not in new[name]), name
            assert (parameter in optimizer.state) == (rank in new[name])
            if rank in new[name]:
                moved.append(name)
                assert torch.equal(parameter, there) and torch.equal(parameter.grad, there.grad), name
                theirs = whole_optimizer.state[there]
                assert all(torch.equal(value, theirs[key]) for key, value in optimizer.state[parameter].items())
    assert "norm.weight" in moved
    (net, _), _ = results
    assert all(torch.equal(here, there) for here, there in zip(net.buffers(), whole.buffers(), strict=True))

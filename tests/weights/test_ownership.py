"""Parameters of other processes have no contents, and errors of user code that looks at them say what is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.weights.ownership import explain, fill_parameter, give_up
from lightning_avgpipe.weights.relocation import Relocation
from tests import threads


@pytest.fixture
def module() -> nn.Module:
    """Of its two layers the second is elsewhere."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


HOOKS: list[Callable[[nn.Module], object]] = [
    lambda module: sum(float(p.norm()) for p in module.parameters()),
    lambda module: [p.grad.norm() for p in module.parameters()],  # type: ignore[union-attr]
    lambda module: module[1].weight.tolist(),  # type: ignore[index]
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_looks_at_all_weights_is_told_once_which_are_absent(
    hook: Callable[[nn.Module], object], module: nn.Module
) -> None:
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        hook(module)
    for _ in range(2):
        explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "no numbers and no gradient on this process, such as '1.weight'" in note


class Sharpness(torch.optim.SGD):
    """Looks at all parameters in a method of its own."""

    def step(self, closure: Any = None) -> Any:
        scale(self.param_groups[0]["params"])
        return super().step(closure)


def scale(parameters: list[Tensor]) -> float:
    return sum(float(parameter.norm()) for parameter in parameters)


def test_an_optimizer_that_looks_at_all_weights_is_named_and_a_closure_of_it_is_not(module: nn.Module) -> None:
    with pytest.raises(RuntimeError) as caught:
        Sharpness(module.parameters(), 0.1).step()
    explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "without '1.weight' here, and Sharpness looks at all of them. Use an optimizer that" in note
    with pytest.raises(RuntimeError) as caught:
        torch.optim.SGD(module.parameters(), 0.1).step(lambda: scale([*module.parameters()]))
    explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "in a hook can leave out those with is_meta" in note


@pytest.mark.parametrize("error", [ValueError("meta"), RuntimeError("out of memory"), AbsentValueError("meta")])
def test_other_errors_stay_as_they_are(error: Exception, module: nn.Module) -> None:
    explain(error, module)
    assert not hasattr(error, "__notes__")


def test_where_all_is_there_nothing_is_said() -> None:
    error = RuntimeError("Cannot copy out of meta tensor; no data!")
    explain(error, nn.Linear(2, 2))
    explain(error, None)
    assert not hasattr(error, "__notes__")


def test_weights_of_scripted_modules_leave_and_come_back_as_the_same_objects() -> None:
    module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    before, contents = (
        dict(module.named_parameters()),
        {name: torch.full_like(p, 3) for name, p in module.named_parameters()},
    )
    give_up(module, before)
    assert all(found is before[name] and found.is_meta for name, found in module.named_parameters())
    for name, parameter in before.items():
        fill_parameter(module, name, parameter, contents[name])
    assert all(found is before[name] for name, found in module.named_parameters())
    assert module(torch.ones(1, 2)).tolist() == [[57.0, 57.0]]


# -- a relocation brings every name to its new owners, in few messages -----------------------------------------------


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

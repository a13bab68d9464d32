"""Measured costs: with a clock of the test's own, and against what autograd really saves."""

from __future__ import annotations

import copy
import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.utils import tree
from tests.comparing import assert_equal
from tests.models import MLP, MODELS, Regression


def graph_of(module: Any, args: tuple[Any, ...]) -> CallGraph:
    return capture("training_step", module.training_step, args, module, Divisible(module).units())


def measured(module: Any, args: tuple[Any, ...], **options: Any) -> tuple[CallGraph, Costs]:
    graph = graph_of(module, args)
    return graph, measure(graph, module.training_step, args, module, **options)


class Clock:
    """Time passes only where a model says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(perf_counter=clock.perf_counter, thread_time=clock.perf_counter)
    for module in ("capture.measure", "utils.device"):
        monkeypatch.setattr(f"lightning_avgpipe.{module}.time", fake)
    return clock


class Passing(torch.autograd.Function):
    """Takes seconds of the clock in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


class Unit(nn.Module):
    """Takes a known time."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.clock = weakref.ref(clock)  # what a module holds is put back, and time must not be
        self.forward_s, self.backward_s = forward_s, backward_s

    def extra_repr(self) -> str:
        return f"{self.forward_s}, {self.backward_s}"

    def forward(self, x: Tensor) -> Tensor:
        return Passing.apply(self.linear(x), self.clock(), self.forward_s, self.backward_s)


class Timed(nn.Module):
    def __init__(self, *units: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for unit in self.units:
            batch = unit(batch)
        return batch.sum()


def test_forward_and_backward_seconds_are_those_of_each_unit(clock: Clock) -> None:
    module = Timed(Unit(clock, 1.0, 2.0), Unit(clock, 0.5, 0.25))
    graph, costs = measured(module, (torch.randn(2, 4), 0), budget_s=1e6)
    assert [node.name for node in graph.nodes] == ["units.0", "units.1", "sum"]
    assert costs.forward == (1.0, 0.5, 0.0)
    assert costs.backward == (2.0, 0.25, 0.0)
    assert costs.measured


def really_saved(module: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a whole step keeps for its backward, without parameters, buffers and the batch."""
    kept: list[Tensor] = []
    batch = tree.tensors(args)  # a step may take its batch apart
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = module.training_step(*args)
    known = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers(), *batch)}
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept}
    del loss
    return sum(storage.nbytes() for key, storage in storages.items() if key not in known)


class Checkpointed(MLP):
    """Repeats its middle layers in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x = checkpoint(self.layers[2:5], x, use_reentrant=False)
        return self.layers[5:](x)


@pytest.mark.parametrize("model", [*MODELS, Checkpointed])
def test_stash_bytes_are_what_autograd_saves(model: type[Regression]) -> None:
    module = model()
    args = (model.example(6), 0)
    graph = graph_of(module, copy.deepcopy(args))
    stash = Costs.from_flops(graph).stash_bytes
    assert len(stash) == len(graph.nodes)
    assert sum(stash) == really_saved(module, copy.deepcopy(args))
    assert measured(module, copy.deepcopy(args))[1].stash_bytes == stash


class Stateful(Regression):
    """Everything that a step may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.last = nn.Linear(8, 8)
        self.seen: list[int] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        y = self.first(x)
        y += x
        return self.last(y)

    def loss(self, batch: Any) -> Tensor:
        random.random(), np.random.rand()
        return super().loss(batch)


def test_nothing_of_a_measurement_remains() -> None:
    module = Stateful()
    args = ((torch.randn(6, 8), torch.randn(6, 8)), 0)
    graph = graph_of(module, args)
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    costs = measure(graph, module.training_step, args, module)
    assert min(costs.node) >= 0 and sum(costs.node) > 0
    assert_equal(dict(module.state_dict()), before)
    assert all(p.grad is None for p in module.parameters())
    assert module.seen == [] and module.count == 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


class Store:
    """An object that is not a tree, and collects what units give it."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, int]] = {}
        self.count = 0


class Attending(nn.Module):
    """Keeps its keys in a store, behind those that are there already."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.keys = nn.Linear(8, 8)

    def forward(self, x: Tensor, store: Store) -> Tensor:
        keys, seen = self.keys(x), store.pairs.get(self.index)
        keys = keys if seen is None else torch.cat([seen[0], keys])
        store.pairs[self.index] = keys, len(keys)
        store.count += 1
        return x + keys


class Weighted(nn.Module):
    """Gives a unit an array, which is no tree of tensors."""

    class Times(nn.Linear):
        def forward(self, x: Tensor, weights: np.ndarray) -> Tensor:
            return super().forward(x) * float(weights.sum())

    def __init__(self) -> None:
        super().__init__()
        self.times = self.Times(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.times(batch, np.array([1.0, 2.0])).sum()


def test_a_unit_that_takes_an_array_can_be_measured() -> None:
    _, costs = measured(Weighted(), (torch.randn(4, 8), 0))
    assert costs.measured and costs.forward[0] > 0


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attending(i) for i in range(3)])
        self.kept = Store()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        store = Store()
        for block in self.blocks:
            batch = block(batch, store)
        batch = self.blocks[0](batch, self.kept)
        assert store.count == 3 and self.kept.count == 1
        assert [length for _, length in store.pairs.values()] == [len(batch)] * 3
        return batch.sum()


def test_objects_that_units_write_to_are_put_back_after_each_execution() -> None:
    module = Collecting()
    graph, costs = measured(module, (torch.randn(4, 8), 0))
    assert [node.name for node in graph.nodes if node.kind == "call"] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.0",
    ]
    assert all(cost > 0 for cost in costs.backward)
    assert module.kept.pairs == {} and module.kept.count == 0


class RegistersOnce(MLP):
    """Makes a buffer of the size of the values that it first sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        y = self.layers[0](x)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", y.detach().mean(0))
        return (self.layers[1:](y - self.mean) - target).square().mean()


def test_a_step_that_does_something_in_its_first_call_only_is_told_its_line() -> None:
    with pytest.raises(StepChangedError, match=r"sub at test_measure\.py:\d+ .* where it called .* before training"):
        measured(RegistersOnce(), (MLP.example(4), 0))

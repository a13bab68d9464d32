"""Measured costs: with a clock of the test's own, against what autograd saves, in plans and in the cache."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning import Link, Plan
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.utils import tree
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, MODELS, Regression, TinyTransformer, loader
from tests.trainers import pipeline


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


# -- the plan that measured costs make for all processes, and the cache ----------------------------------------------


def cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"])


def plan_of(**strategy: Any) -> Plan:
    torch.manual_seed(0)
    runner = pipeline(strategy={"costs": "measured", **strategy}, max_steps=1)
    runner.fit(MLP(), loader(MLP, 16, 16))
    return runner.strategy.plan


def test_a_measured_plan_is_made_once_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_of()
    assert first.measured and first.forecast is not None and first.forecast.iteration_s > 0
    assert all(stage.forward > 0 and stage.backward > 0 and stage.memory.stash > 0 for stage in first.stages)
    assert list((cache() / "lightning_avgpipe").glob("costs-*.json"))

    def fail(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("lightning_avgpipe.planning.costs.measure", fail)
    assert str(plan_of()) == str(first)


def test_the_cache_is_an_option(tmp_path: Path) -> None:
    plan_of(costs_cache=None)
    assert not list(cache().iterdir())
    plan_of(costs_cache=tmp_path / "here")
    assert list((tmp_path / "here").glob("costs-*.json")) and not list(cache().iterdir())


def test_memory_is_estimated_for_the_optimizer_and_the_schedule() -> None:
    plan = plan_of(num_microbatches=4, split_points=["layers.4"], schedule="1f1b")
    for stage, in_flight, tanhs in zip(plan.stages, (2, 1), (2, 3), strict=True):
        assert stage.memory.persistent == 3 * 4 * stage.num_parameters  # weight, gradient, momentum
        assert stage.memory.stash == in_flight * tanhs * 4 * 8 * 4  # 4 samples, 8 features, 4 bytes


def test_a_limit_on_memory_is_obeyed() -> None:
    plan = plan_of(memory_limit="5KiB")
    assert all(stage.memory.total <= 5 * 1024 for stage in plan.stages)


def train_measured(folder: Path) -> tuple[str, Any, list[float]]:
    torch.manual_seed(5)
    options = {"costs": "measured", "costs_cache": folder / "costs", "num_microbatches": 2}
    runner = pipeline(4, 2, options, max_epochs=1)
    model = TinyTransformer()
    runner.fit(model, loader(TinyTransformer, 12, 6))
    return (
        str(runner.strategy.plan),
        runner.strategy.cluster.links(runner.strategy.cluster.stage_map),
        [float(p.detach().sum()) for p in model.parameters()],
    )


def test_all_processes_follow_the_plan_that_rank_zero_measured(tmp_path: Path) -> None:
    zero, one = processes.everywhere(2, train_measured, tmp_path, folder=tmp_path)
    assert zero[0] == one[0] and "expected: " in zero[0]
    assert zero[2] == one[2]
    links = zero[1]
    assert len(links) == 3 and links[0] == links[2]  # stages 0, 2 on rank 1 and 1, 3 on rank 0: two hops are alike
    assert all(link.latency > 0 and 0 <= link.per_byte < 1e-3 for link in links)
    assert links[1] != Link() and links[1] != links[0]  # the way back was timed by the other process


# -- the cache -------------------------------------------------------------------------------------------------------


COSTS = Costs((0.5, 0.25), (1.0, 1e-7), (10, 0), measured=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "not JSON",
        lambda content: json.dumps({**content, "key": "other"}),
        lambda content: json.dumps({**content, "forward_s": [1.0]}),
        lambda content: json.dumps({**content, "stash_bytes": ["many", 1]}),
        lambda content: json.dumps({**content, "forward_s": [float("nan"), 1.0]}),
        lambda content: json.dumps({**content, "forward_s": [10**400, 1.0]}),
        lambda content: "[" * 100_000,
        lambda content: json.dumps({k: v for k, v in content.items() if k != "stash_bytes"}),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored(
    tmp_path: Path, change: Callable[[dict[str, Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CostCache(tmp_path)
    cache.save("key", COSTS, {})
    file = tmp_path / "costs-key.json"
    file.write_text(change(json.loads(file.read_text())))
    with caplog.at_level(logging.INFO, logger="lightning_avgpipe"):
        assert cache.load("key", 2) is None
    assert "ignoring the measured costs in" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(tmp_path / "file")
    for key in ("one", "another"):
        assert cache.load(key, 2) is None
        cache.save(key, COSTS, {})
    assert caplog.text.count("cannot keep the measured costs") == 1


def test_without_a_home_nothing_is_kept_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(UserWarning, match="no home directory, so measured costs are not kept") as caught:
        assert plan_of().measured
    assert sum("no home directory" in str(warning.message) for warning in caught) == 1


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.b(self.a(batch)).sum()


class Layer(nn.Linear):
    """Saves what it returns for its backward, or what it squares then; or neither, if it is checkpointed."""

    def __init__(self, squares: bool, checkpoints: bool) -> None:
        super().__init__(8, 2)
        self.squares, self.checkpoints = squares, checkpoints

    def _activated(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        return out.square() if self.squares else out

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._activated, x, use_reentrant=False) if self.checkpoints else self._activated(x)


def ending_with(layer: nn.Module) -> Net:
    module = Net()
    module.b = layer  # type: ignore[assignment]
    return module


def key_of(module: nn.Module, size: int = 3, dtype: torch.dtype = torch.float32, grad: bool = True) -> str:
    args = (torch.randn(size, 4, dtype=dtype), 0)
    with torch.set_grad_enabled(grad):
        graph = capture("training_step", module.training_step, args, module, Divisible(module).units())
    return fingerprint(graph, module, torch.device("cpu"))[0]


def test_a_fingerprint_tells_apart_what_costs_differently() -> None:
    frozen = Net()
    frozen.a.requires_grad_(False)
    keys = [
        key_of(Net()),
        key_of(Net(16)),
        key_of(Net(), size=5),
        key_of(Net().double(), dtype=torch.float64),
        key_of(Net(), grad=False),
        key_of(frozen),
        key_of(ending_with(Layer(squares=False, checkpoints=False))),
        key_of(ending_with(Layer(squares=True, checkpoints=False))),
        key_of(ending_with(Layer(squares=True, checkpoints=True))),
    ]
    torch.set_num_threads(2)
    keys.append(key_of(Net()))
    assert len(set(keys)) == len(keys)

"""Stages that are placed by the bandwidth between processes, and train as in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy, Links
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning import Costs
from lightning_avgpipe.planning.costs import Costing
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from lightning_avgpipe.systems.spp.placement import SppSource
from tests import processes
from tests.comparing import assert_close, state
from tests.models import MLP, loader
from tests.planning.known_costs import of_nodes
from tests.planning.test_planner import Net
from tests.trainers import pipeline, trainer


class Active(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Weighted(MLP):
    """Each unit has weights, of which replicas sum the gradients; a stage without any may be shared over every link."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Active(8, 8) for _ in range(5)))


def placed(rank: int | None) -> Any:
    """Ranks 0 and 2 have a fast link, and so have 1 and 3; two runs, of which the second places stages again."""
    torch.manual_seed(5)
    fast, slow = 1e12, 1e3
    bandwidth = [[fast if u % 2 == v % 2 else slow for v in range(4)] for u in range(4)]
    spp = {} if rank is None else {"planner": "spp", "replicas": "auto", "links": Links(bandwidth=bandwidth)}
    strategy = AvgPipeStrategy(num_microbatches=5, costs="flops", **(spp or {"num_stages": 2}))  # type: ignore[arg-type]
    runner, model = trainer(devices=1 if rank is None else 4, strategy=strategy, max_epochs=1), Weighted()
    runner.fit(model, loader(MLP, 30, 10), loader(MLP, 12, 6))
    plan = strategy.plan
    runner.validate(model, loader(MLP, 12, 6), verbose=False)
    runner.fit_loop.max_epochs = 2
    runner.fit(model, loader(MLP, 30, 10))
    return state(model), plan and plan.devices


@pytest.mark.slow
def test_stages_are_placed_by_bandwidth_and_train_as_one_process(tmp_path: Path) -> None:
    expected, _ = placed(None)
    for weights, devices in processes.each(4, placed, folder=tmp_path):
        assert_close(weights, expected)
        assert sorted(rank for ranks in devices for rank in ranks) == [0, 1, 2, 3]
        assert 0 in devices[-1] and all(len({rank % 2 for rank in ranks}) == 1 for ranks in devices)


def test_what_the_planner_chooses_is_not_given() -> None:
    with pytest.raises(ConfigurationError, match="the planner chooses stages and their replicas together"):
        pipeline("auto", 4, {"planner": "spp", "replicas": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="replicas='auto' and num_microbatches='auto'"):
        pipeline("auto", 4, {"planner": "spp"})  # type: ignore[arg-type]


def test_stages_on_devices_keep_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(graph: CallGraph, *_: Any) -> Costs:
        times = of_nodes([float(node.kind == "call") for node in graph.nodes])
        return replace(times, stash_bytes=(100,) * len(graph.nodes), links=(), measured=True)

    monkeypatch.setattr("lightning_avgpipe.planning.costs.measure", measure)
    net, examples = Net(), (torch.randn(4, 8), 0)
    conditions = Conditions(build("1f1b", 4, 8))
    planner = Planner(Divisible(net), 4, costing=Costing("measured"), source=SppSource([[1e12] * 4] * 4))
    copies = planner.plan(Step("training_step", net.training_step, examples), conditions)
    assert copies.devices == ((0, 1, 2, 3),)
    limit = copies.stages[0].memory.total - 1
    less = replace(planner, memory_limit=limit)
    stages = less.plan(Step("training_step", net.training_step, examples), conditions)
    assert stages.num_stages > 1 and max(stage.memory.total for stage in stages.stages) <= limit
    assert stages.forecast.schedule == "1f1b"  # which will run, and not SPP's own order


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()


def test_the_balanced_stages_stay_where_they_fit_the_memory_and_the_fastest_plans_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(graph: CallGraph, *_: Any) -> Costs:
        times = of_nodes([5.0 if node.name == "layers.39" else float(node.kind == "call") for node in graph.nodes])
        return replace(times, links=(), measured=True)

    monkeypatch.setattr("lightning_avgpipe.planning.costs.measure", measure)
    module = Layers(40, 8)
    step, conditions = (
        Step("training_step", module.training_step, (torch.randn(2, 8), 0)),
        Conditions(build("1f1b", 4, 8)),
    )
    planner = Planner(Divisible(module), 4, costing=Costing("measured"))
    even = replace(planner, split_points=[f"layers.{k}" for k in (10, 20, 30)]).plan(step, conditions)
    planner = replace(planner, memory_limit=max(stage.memory.total for stage in even.stages))
    found = replace(planner, source=SppSource([[1e12] * 4] * 4)).plan(step, conditions)
    assert [len(stage.units) for stage in found.stages] == [10] * 4 and not found.devices
    with pytest.raises(PartitionError, match="none of 820 plans for 3 devices fits"):
        replace(planner, source=SppSource([[1e12] * 3] * 3)).plan(step, conditions)


def test_counted_operations_are_weighed_against_bytes_so_that_slow_links_are_avoided() -> None:
    fast, slow = 125e6, 12.5e6
    bandwidth = [[fast if u // 2 == v // 2 else slow for v in range(4)] for u in range(4)]
    module = Layers(12, 64)
    planner = Planner(Divisible(module), 4, source=SppSource(bandwidth))
    step = Step("training_step", module.training_step, (torch.randn(4, 64), 0))
    found = planner.plan(step, Conditions(build("1f1b", 4, 8)))
    assert sorted(rank for ranks in found.devices for rank in ranks) == [0, 1, 2, 3]
    assert all(len({rank // 2 for rank in ranks}) == 1 for ranks in found.devices)
    between = [here[0] // 2 != after[0] // 2 for here, after in itertools.pairwise(found.devices)]
    assert [link.per_byte for link in found.links] == [pytest.approx(200 if crosses else 20) for crosses in between]


class Penalised(nn.Linear):
    """Runs a backward itself, and so cannot be measured."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(super().forward(apart).sum(), apart, create_graph=True)
        return super().forward(x) + slope


def test_devices_count_as_equally_fast_where_a_step_cannot_be_measured() -> None:
    module = Layers(6, 8)
    module.layers = nn.ModuleList(Penalised(8, 8) for _ in range(6))
    planner = Planner(Divisible(module), 4, costing=Costing("measured"), source=SppSource([[1e9] * 4] * 4))
    step = Step("training_step", module.training_step, (torch.randn(2, 8), 0))
    assert planner.seconds(step) == 0
    assert planner.plan(step, Conditions(build("1f1b", 4, 8))).devices

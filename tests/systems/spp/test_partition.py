"""SPP's planner against known plans and brute force, in turns too; and where it has to say no."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy, Links
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning import Costs
from lightning_avgpipe.planning.costs import Costing, UnitCosts
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import StageCosts, build, simulate, with_replicas
from lightning_avgpipe.systems.spp.partition import SppPlan, all_plans, execution_order, orders, partition, plan
from lightning_avgpipe.systems.spp.placement import (
    SppSource,
    least_in_turns_s,
    plan_in_turns,
    seconds_in_turns,
    slowness_of,
)
from lightning_avgpipe.systems.spp.problem import Network, PlacedStage, Problem, device_order
from tests import processes
from tests.comparing import assert_close, state
from tests.models import MLP, loader
from tests.planning.known_costs import of_nodes
from tests.planning.test_planner import Net
from tests.trainers import pipeline, trainer

Stages = tuple[tuple[int, int, tuple[int, ...]], ...]


def uniform(units: int, forward_s: float, backward_s: float, message: float, parameters: float) -> UnitCosts:
    between = (message,) * (units - 1)
    return UnitCosts((forward_s,) * units, (backward_s,) * units, between, between, (parameters,) * units)


def all_stages(units: int, order: tuple[int, ...], num_stages: int) -> Iterator[Stages]:
    for cuts in combinations(range(1, units), num_stages - 1):
        for splits in combinations(range(1, len(order)), num_stages - 1):
            ends, places = pairwise((0, *cuts, units)), pairwise((0, *splits, len(order)))
            yield tuple((a, b - 1, order[i:j]) for (a, b), (i, j) in zip(ends, places, strict=True))


def bottleneck_s(costs: UnitCosts, bandwidth: list[list[float]], num_microbatches: int, stages: Stages) -> float:
    """W, written down once more from its definition."""
    found = []
    for first, last, devices in stages:
        r, units = len(devices), range(first, last + 1)
        work = sum(costs.forward_s[u] + costs.backward_s[u] for u in units) / r
        slowest = min((bandwidth[u][v] for u in devices for v in devices if u != v), default=1.0)
        found.append(num_microbatches * work + 2 * (r - 1) / r * sum(costs.parameter_bytes[u] for u in units) / slowest)
    for (_, last, here), (_, _, after) in pairwise(stages):
        there = min(bandwidth[u][v] for u in here for v in after)
        back = min(bandwidth[v][u] for u in here for v in after)
        pairs = len(here) * len(after)
        both_ways = costs.bytes_forward[last] / there + costs.bytes_backward[last] / back
        found.append(num_microbatches * both_ways / pairs)
    return max(found)


def costs_of(units: int, draw: random.Random) -> UnitCosts:
    def numbers(count: int, largest: float) -> tuple[float, ...]:
        return tuple(draw.uniform(0, largest) for _ in range(count))

    return UnitCosts(
        numbers(units, 1), numbers(units, 2), numbers(units - 1, 3), numbers(units - 1, 3), numbers(units, 8)
    )


def bandwidth_of(devices: int, draw: random.Random) -> list[list[float]]:
    return [[draw.uniform(0.5, 8) for _ in range(devices)] for _ in range(devices)]


def test_there_and_back_over_a_hop_takes_four_passes() -> None:
    assert str(execution_order(2, 7)).splitlines()[0] == "stage 0 | F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 B3 B4 B5 B6"
    assert execution_order(4, 100).warm_up == (12, 8, 4, 0)


def test_no_partition_has_a_smaller_bottleneck() -> None:
    for draw in map(random.Random, range(60)):
        costs = costs_of(draw.randint(1, 7), draw)
        bandwidth, num_microbatches = bandwidth_of(draw.randint(1, 5), draw), draw.randint(1, 6)
        order = device_order(bandwidth)
        for num_stages in range(1, min(costs.num_units, len(order)) + 1):
            found = partition(costs, order, num_stages, num_microbatches, bandwidth)
            every = all_stages(costs.num_units, order, num_stages)
            best = min(bottleneck_s(costs, bandwidth, num_microbatches, stages) for stages in every)
            assert bottleneck_s(costs, bandwidth, num_microbatches, found) == pytest.approx(best)


def test_plans_of_two_known_problems() -> None:
    between = (1.0,) * 5
    costs = UnitCosts((1, 1, 2, 2, 1, 1), (2, 2, 4, 4, 2, 2), between, between, (1, 1, 1, 1, 4, 4))
    equal = [[1.0] * 4] * 4
    problem = replace(problem_of(costs, equal, 4), half_duplex=True)
    found = [partition(costs, range(4), count, 4, equal) for count in (1, 2, 3, 4)]
    assert found[1] == ((0, 3, (0, 1, 2)), (4, 5, (3,)))
    placed = [[PlacedStage(a, b + 1, devices[0], devices[-1] + 1) for a, b, devices in stages] for stages in found]
    assert list(map(problem.bound_s, placed)) == pytest.approx([42, 88 / 3, 26, 24])
    assert [problem.makespan(stages, orders(len(stages), 4)) for stages in placed] == [42, 36, 38, 48]
    chosen, best = plan(costs, equal, 4), plan(costs, equal, 4, candidates="all")
    assert (chosen.stages, chosen.makespan_s) == (found[1], 36)
    assert (best.stages, best.makespan_s) == (((0, 2, (0, 1)), (3, 5, (2, 3))), 35.25)

    costs, nodes = uniform(12, 1, 2, 3, 6), [[8.0 if u // 4 == v // 4 else 2.0 for v in range(8)] for u in range(8)]
    problem = problem_of(costs, nodes, 16)
    found = [partition(costs, device_order(nodes), count, 16, nodes) for count in range(1, 9)]
    placed = [[PlacedStage(a, b + 1, devices[0], devices[-1] + 1) for a, b, devices in stages] for stages in found]
    makespans = [problem.makespan(stages, orders(len(stages), 16)) for stages in placed]
    assert makespans == [135, 83.4375, 88.3125, 88.875, 116.8125, 123.1875, 130.125, 133.5]


def problem_of(costs: UnitCosts, bandwidth: list[list[float]], num_microbatches: int) -> Problem:
    return Problem(costs, Network.of(bandwidth), num_microbatches)


@pytest.mark.parametrize("name", ["1f1b", "afab"])
def test_without_replicas_turns_take_what_the_simulator_says(name: str) -> None:
    draw = random.Random(3)
    problem = problem_of(costs_of(3, draw), bandwidth_of(3, draw), 5)
    stages = [PlacedStage(k, k + 1, k, k + 1) for k in range(3)]
    schedule = build(name, 3, 5)
    expected = simulate(schedule, problem.stage_costs(stages)).iteration_s
    assert seconds_in_turns(problem, stages, schedule) == pytest.approx(expected)


def test_replicas_in_turns_pass_each_micro_batch_whole() -> None:
    # F of 2 s on two replicas, then F and B of 1 s on one; micro-batches 0 and 2 on the first replica
    problem = problem_of(UnitCosts((2, 1), (2, 1), (0,), (0,), (0, 0)), [[1.0] * 3] * 3, 4)
    stages = [PlacedStage(0, 1, 0, 2), PlacedStage(1, 2, 2, 3)]
    schedule = with_replicas(build("afab", 2, 4), (2, 1))
    #   replica 0   F0 F0 F2 F2 .. .. .. B0 B0 ..     forwards end at 2 and 4
    #   replica 1   F1 F1 F3 F3
    #   stage 1           F0 F1 F2 F3 B0 B1 B2 B3     busy from 2 to 10
    assert seconds_in_turns(problem, stages, schedule) == 12
    timeline = simulate(schedule, StageCosts((2, 1), (2, 1), (0,), (0,), (0,)), replicas=[(1, 2), (0,)])
    assert timeline.rows == (1, 2, 0) and timeline.iteration_s == 12 and timeline.peak_stash == (2, 4)
    forwards = [(timeline.device_of(s.stage, s.action.micro_batch), s.begin_s) for s in timeline.spans[:4]]
    assert sorted(forwards) == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert timeline.bubble_fraction == pytest.approx(1 - (4 * 4 + 4 * 2) / (3 * 12))
    replayed = simulate(timeline.schedule(), StageCosts.measured(timeline), replicas=timeline.replicas)
    assert (replayed.spans, replayed.replicas) == (timeline.spans, timeline.replicas)


def test_all_reduces_go_round_a_ring_of_ascending_ranks() -> None:
    # links of 8 between neighbours on a ring of four, of 1 across; two replicas that are no neighbours have only that
    bandwidth = [[8.0 if (u - v) % 4 in (1, 3) else 1.0 for v in range(4)] for u in range(4)]
    costs = UnitCosts((0,), (0,), (), (), (8,))
    whole = Network.of(bandwidth, rings=True)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        problem = Problem(costs, whole.ordered(order), 1)
        assert problem.reduce_s(PlacedStage(0, 1, 0, 4)) == 2 * 3 / 4 * 8 / 8
    assert Problem(costs, whole.ordered((0, 2, 1, 3)), 1).reduce_s(PlacedStage(0, 1, 0, 2)) == 2 / 2 * 8 / 1
    assert Problem(costs, Network.of(bandwidth), 1).reduce_s(PlacedStage(0, 1, 0, 4)) == 2 * 3 / 4 * 8 / 1


def test_a_ring_of_fast_links_is_planned_as_copies() -> None:
    bandwidth = [[1000.0 if (u - v) % 4 in (1, 3) else 1.0 for v in range(4)] for u in range(4)]
    costs = UnitCosts((1,) * 4, (2,) * 4, (1,) * 3, (1,) * 3, (20,) * 4)
    assert plan_in_turns(costs, bandwidth, 4).num_stages == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_in_turns_is_faster_and_none_falls_short_of_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    units, devices, count = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 6)
    costs, bandwidth = costs_of(units, draw), bandwidth_of(devices, draw)
    slowness = tuple(draw.choice((1.0, 1.0, 2.5)) for _ in range(devices)) if seed % 2 else ()
    found = plan_in_turns(costs, bandwidth, count, slowness)
    order = [device for _, _, ranks in found.stages for device in ranks]
    assert sorted(order) == list(range(devices))
    assert found.stages[-1][2][0] == 0
    problem = Problem(costs, Network.of(bandwidth), count, slowness, draw.choice((1.0, 8.0)))
    for stages in all_plans(problem):
        schedule = with_replicas(build("1f1b", len(stages), count), [stage.replicas for stage in stages])
        assert seconds_in_turns(problem, stages, schedule) >= least_in_turns_s(problem, stages) * (1 - 1e-9)
    assert found.makespan_s >= found.bound_s * (1 - 1e-9)


def test_an_all_reduce_begins_within_the_last_backward_bucket_by_bucket() -> None:
    costs = UnitCosts((0, 0, 0), (1, 2, 4), (0, 0), (0, 0), (6, 2, 10))
    stages, network = [PlacedStage(0, 3, 0, 2)], Network.of([[1.0] * 2] * 2)
    #   backward    2 2 2 2 1 1 0      buckets from 8 bytes on: {2}, {1, 0}, and an all-reduce takes a second for a byte
    #   all-reduce          2 2 2 2 2 2 2 2 2 2 1 1 0 0 0 0 0 0
    problem = Problem(costs, network, 1, bucket_bytes=8)
    assert seconds_in_turns(problem, stages, build("1f1b", 1, 1)) == 4 + 10 + 8
    whole = Problem(costs, network, 1, bucket_bytes=100)
    assert seconds_in_turns(whole, stages, build("1f1b", 1, 1)) == 7 + 18


def test_a_slow_device_gets_less_to_do() -> None:
    costs, bandwidth = UnitCosts((1,) * 8, (2,) * 8, (0,) * 7, (0,) * 7, (1000,) * 8), [[1.0] * 4] * 4
    alike = plan_in_turns(costs, bandwidth, 8)
    for device in range(4):
        slowness = [3.0 if device == v else 1.0 for v in range(4)]
        units = {ranks: last - first + 1 for first, last, ranks in plan_in_turns(costs, bandwidth, 8, slowness).stages}
        assert units[(device,)] == 1 and {ranks: 2 for _, _, ranks in alike.stages} != units


def test_devices_are_slow_that_take_clearly_longer_than_the_fastest() -> None:
    assert slowness_of([1.0, 2.0, 1.2, 4.0]) == (1.0, 2.0, 1.0, 4.0)
    assert slowness_of([1.0, 1.1]) == slowness_of([1.0, 0.0]) == slowness_of([]) == ()


def test_plans_that_do_not_fit_are_left_out_and_none_is_an_error() -> None:
    costs = UnitCosts((1,) * 2, (2,) * 2, (0,), (0,), (1,) * 2)
    assert plan_in_turns(costs, [[1.0] * 2] * 2, 8).num_stages == 1
    assert plan_in_turns(costs, [[1.0] * 2] * 2, 8, fits=lambda plan: plan.num_stages == 2).num_stages == 2
    with pytest.raises(PartitionError, match="none of 2 plans for 2 devices fits their memory; use more devices"):
        plan_in_turns(costs, [[1.0] * 2] * 2, 8, fits=lambda plan: False)


def test_where_the_fastest_of_many_plans_do_not_fit_those_that_fit_among_slower_ones_are_found() -> None:
    forward_s = (0.01,) * 39 + (0.3,)
    costs = UnitCosts(forward_s, tuple(2 * s for s in forward_s), (1e6,) * 39, (1e6,) * 39, (1e9,) * 40)
    bandwidth = [[1e12] * 4] * 4

    def largest(plan: SppPlan) -> int:
        return max(last - first + 1 for first, last, _ in plan.stages)

    assert largest(plan_in_turns(costs, bandwidth, 8)) > 14
    assert largest(plan_in_turns(costs, bandwidth, 8, fits=lambda plan: largest(plan) <= 14)) <= 14
    with pytest.raises(PartitionError, match="none of 4 plans for 4 devices fits their memory"):
        plan_in_turns(costs, bandwidth, 8, fits=lambda plan: False)


def test_devices_with_fast_links_share_a_stage() -> None:
    bandwidth = [[100.0 if u % 2 == v % 2 else 0.1 for v in range(4)] for u in range(4)]
    costs = UnitCosts((1, 1), (2, 2), (0.1,), (0.1,), (5, 5))
    assert [ranks for _, _, ranks in plan_in_turns(costs, bandwidth, 8).stages] == [(1, 3), (0, 2)]


# -- stages are placed by the bandwidth between processes, and train as in one process -------------------------------


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

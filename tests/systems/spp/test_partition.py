"""SPP's planner against known plans, against brute force, and where it has to say no."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.schedule import StageCosts, simulate
from lightning_avgpipe.systems.spp.partition import execution_order, partition, plan
from lightning_avgpipe.systems.spp.problem import Network, device_order

Stages = tuple[tuple[int, int, tuple[int, ...]], ...]


def uniform(units: int, forward_s: float, backward_s: float, message: float, parameters: float) -> UnitCosts:
    between = (message,) * (units - 1)
    return UnitCosts((forward_s,) * units, (backward_s,) * units, between, between, (parameters,) * units)


# four equal devices; two heavy units in the middle, most parameters at the end
HEAVY_MIDDLE = UnitCosts((1, 1, 2, 2, 1, 1), (2, 2, 4, 4, 2, 2), (1,) * 5, (1,) * 5, (1, 1, 1, 1, 4, 4))
EQUAL = [[1.0] * 4] * 4
# two nodes of four devices
EIGHT_UNIFORM = uniform(12, 1, 2, 3, 6)
TWO_NODES = [[8.0 if u // 4 == v // 4 else 2.0 for v in range(8)] for u in range(8)]


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
        found.append(num_microbatches * costs.bytes_forward[last] / (pairs * there))
        found.append(num_microbatches * costs.bytes_backward[last] / (pairs * back))
    return max(found)


def random_problem(seed: int) -> tuple[UnitCosts, list[list[float]], int]:
    draw = random.Random(seed)
    units, devices = draw.randint(1, 7), draw.randint(1, 5)

    def numbers(count: int, largest: float) -> tuple[float, ...]:
        return tuple(draw.uniform(0, largest) for _ in range(count))

    costs = UnitCosts(
        numbers(units, 1), numbers(units, 2), numbers(units - 1, 3), numbers(units - 1, 3), numbers(units, 8)
    )
    return costs, [[draw.uniform(0.5, 8) for _ in range(devices)] for _ in range(devices)], draw.randint(1, 6)


@pytest.mark.parametrize(
    ("num_stages", "bound_s", "stages"),
    [
        (1, 42, ((0, 5, (0, 1, 2, 3)),)),
        (2, 88 / 3, ((0, 3, (0, 1, 2)), (4, 5, (3,)))),
        (3, 26, ((0, 1, (0,)), (2, 3, (1, 2)), (4, 5, (3,)))),
        (4, 24, ((0, 1, (0,)), (2, 2, (1,)), (3, 3, (2,)), (4, 5, (3,)))),
    ],
)
def test_partitions_of_a_heavy_middle(num_stages: int, bound_s: float, stages: Stages) -> None:
    found = partition(HEAVY_MIDDLE, (0, 1, 2, 3), num_stages, 4, EQUAL)
    assert found == stages
    assert bottleneck_s(HEAVY_MIDDLE, EQUAL, 4, found) == pytest.approx(bound_s)


def test_the_plan_with_the_shortest_iteration_is_chosen() -> None:
    found = plan(HEAVY_MIDDLE, EQUAL, num_microbatches=4)
    assert found.stages == ((0, 3, (0, 1, 2)), (4, 5, (3,)))
    assert (found.makespan_s, found.bound_s) == pytest.approx((36, 88 / 3))
    assert found.num_stages == 2


def test_trying_all_plans_may_find_a_better_one() -> None:
    found = plan(HEAVY_MIDDLE, EQUAL, num_microbatches=4, candidates="all")
    assert found.stages == ((0, 2, (0, 1)), (3, 5, (2, 3)))
    assert found.makespan_s == pytest.approx(35.25)


def test_slow_links_between_two_nodes_are_crossed_once() -> None:
    found = plan(EIGHT_UNIFORM, TWO_NODES, num_microbatches=16)
    assert found.stages == ((0, 5, (0, 1, 2, 3)), (6, 11, (4, 5, 6, 7)))
    assert found.makespan_s == pytest.approx(83.4375)


def test_devices_of_a_node_stand_together_whatever_their_numbers() -> None:
    bandwidth = [[8.0 if u % 2 == v % 2 else 1.0 for v in range(6)] for u in range(6)]
    assert device_order(bandwidth) == (0, 2, 4, 1, 3, 5)


def test_there_and_back_over_a_hop_takes_four_passes() -> None:
    assert str(execution_order(2, 7)).splitlines()[0] == "stage 0 | F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 B3 B4 B5 B6"
    assert execution_order(4, 100).warm_up == (12, 8, 4, 0)


def test_no_partition_has_a_smaller_bottleneck() -> None:
    for costs, bandwidth, num_microbatches in map(random_problem, range(60)):
        order = device_order(bandwidth)
        for num_stages in range(1, min(costs.num_units, len(order)) + 1):
            found = partition(costs, order, num_stages, num_microbatches, bandwidth)
            every = all_stages(costs.num_units, order, num_stages)
            best = min(bottleneck_s(costs, bandwidth, num_microbatches, stages) for stages in every)
            assert bottleneck_s(costs, bandwidth, num_microbatches, found) == pytest.approx(best)


def test_every_device_and_every_unit_is_used_once_and_no_iteration_beats_its_bound() -> None:
    for costs, bandwidth, num_microbatches in map(random_problem, range(20)):
        paper, every = (plan(costs, bandwidth, num_microbatches, candidates=c) for c in ("paper", "all"))
        for found in (paper, every):
            units = [u for first, last, _ in found.stages for u in range(first, last + 1)]
            assert sorted(d for _, _, devices in found.stages for d in devices) == list(range(len(bandwidth)))
            assert units == list(range(costs.num_units))
            assert found.bound_s == pytest.approx(bottleneck_s(costs, bandwidth, num_microbatches, found.stages))
            assert found.makespan_s >= found.bound_s * (1 - 1e-9)
        assert every.makespan_s <= paper.makespan_s * (1 + 1e-9)


def test_without_replicas_an_iteration_is_that_of_the_schedule_simulator() -> None:
    costs = uniform(2, 1, 2, 0.5, 100)
    found = plan(costs, [[1.0] * 2] * 2, num_microbatches=4)
    assert found.num_stages == 2
    stage_costs = StageCosts.uniform(2, 1, 2, send_s=0.5)
    assert found.makespan_s == simulate(execution_order(2, 4), stage_costs).iteration_s


def test_too_many_candidates_are_refused() -> None:
    with pytest.raises(PartitionError, match="use candidates='paper'"):
        plan(uniform(40, 1, 2, 1, 1), [[1.0] * 12] * 12, 4, candidates="all")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_forward": (1,)}, "bytes_forward has 1 entries, but needs 5"),
        ({"forward_s": ()}, "forward_s has no entries"),
        ({"backward_s": (2, 2, 4, 4, 2, -1)}, "must be finite and not negative"),
    ],
)
def test_costs_that_do_not_fit_together_are_refused(change: dict[str, tuple[float, ...]], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        replace(HEAVY_MIDDLE, **change)


def test_networks_without_sense_are_refused() -> None:
    with pytest.raises(PartitionError, match="V rows of V each"):
        Network.of([[1, 1]])
    with pytest.raises(PartitionError, match=r"bandwidth\[1\]\[0\]=0"):
        Network.of([[1, 1], [0, 1]])


def test_a_thousand_units_on_sixteen_devices_are_planned() -> None:
    found = plan(uniform(1000, 1, 2, 1, 5), [[1.0] * 16] * 16, 32)
    assert found.makespan_s < 1.25 * found.bound_s

"""SPP's planner against known plans, against brute force, and where it has to say no."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.systems.spp.partition import execution_order, partition
from lightning_avgpipe.systems.spp.problem import device_order

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

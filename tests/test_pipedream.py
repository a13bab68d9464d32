"""PipeDream's planner against brute force on one level, and on two levels by hand."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from benchmarks.pipedream import plan
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts


def random_costs(seed: int) -> UnitCosts:
    draw = random.Random(seed)
    units = draw.randint(1, 6)
    sizes = (units, units, units - 1, units - 1, units)
    return UnitCosts(*(tuple(draw.uniform(0, 2) for _ in range(size)) for size in sizes))


def bottleneck_s(costs: UnitCosts, bandwidth: float, stages: tuple[tuple[int, int, int], ...]) -> float:
    found = []
    for first, last, r in stages:
        units = range(first, last + 1)
        work = sum(costs.forward_s[u] + costs.backward_s[u] for u in units)
        found.append(max(work, 2 * (r - 1) * sum(costs.parameter_bytes[u] for u in units) / bandwidth) / r)
    found += [(costs.bytes_forward[last] + costs.bytes_backward[last]) / bandwidth for _, last, _ in stages[:-1]]
    return max(found)


@pytest.mark.parametrize("seed", range(40))
def test_on_one_level_no_plan_has_a_smaller_bottleneck(seed: int) -> None:
    costs, devices, bandwidth = random_costs(seed), 1 + seed % 5, 0.5 + seed % 3
    found = plan(costs, [devices], [bandwidth])
    best = min(
        bottleneck_s(costs, bandwidth, tuple((a, b - 1, j - i) for (a, b), (i, j) in zip(ends, places, strict=True)))
        for s in range(1, min(costs.num_units, devices) + 1)
        for cuts in combinations(range(1, costs.num_units), s - 1)
        for splits in combinations(range(1, devices), s - 1)
        for ends, places in [(list(pairwise((0, *cuts, costs.num_units))), list(pairwise((0, *splits, devices))))]
    )
    assert found.bottleneck_s == pytest.approx(best)
    assert bottleneck_s(costs, bandwidth, found.stages) == pytest.approx(best)


def test_between_slow_nodes_it_pipelines_and_within_them_it_replicates() -> None:
    costs = UnitCosts((1,) * 4, (2,) * 4, (0.1,) * 3, (0.1,) * 3, (3,) * 4)
    found = plan(costs, widths=[2, 2], bandwidths=[100, 0.2])
    assert found.stages == ((0, 1, 2), (2, 3, 2))
    assert found.bottleneck_s == pytest.approx(3)


def test_levels_without_bandwidth_are_refused() -> None:
    with pytest.raises(PartitionError, match="one entry per level"):
        plan(UnitCosts((1,), (1,), (), (), (1,)), [2, 2], [1])

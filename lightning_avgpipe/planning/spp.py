"""SPP: planning of replicated stages for devices with links of different speed.

Three steps, each a pure function of numbers::

    device_order     0 1 | 2 3                 cut the network recursively at its weakest links
    partition        units 0-3    4-5          a dynamic program over units, devices and replicas along that order
                     devices 0-2  3
    execution_order  F F F F F B F B ...       which micro-batch a stage works on next; the iteration is simulated

Units and devices are counted from 0. A stage slices each micro-batch over its r replicas. A message of d bytes to a
stage of r' replicas takes ``d / (r r' b)`` seconds, b being the least bandwidth between the two, and the all-reduce of
a stage's gradients ``2 (r-1)/r bytes / b`` seconds, b being the least within it. Links are full-duplex and do not
disturb each other.

Source: Luo et al., *Efficient Pipeline Planning for Expedited Distributed DNN Training*, INFOCOM 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import numpy as np

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.bottleneck import least_bottlenecks
from lightning_avgpipe.planning.network import Matrix, Network, device_order
from lightning_avgpipe.planning.problem import PlacedStage, Problem
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.schedule.builders import from_warm_up

__all__ = ["SppCosts", "SppPlan", "all_plans", "device_order", "execution_order", "num_plans", "partition", "plan"]

_MOST_PLANS = 200_000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SppPlan:
    """A plan of SPP: the units and devices of each stage.

    Attributes:
        stages: ``(first unit, last unit, devices)`` of each stage.
        makespan_s: simulated seconds of an iteration, until the last gradient is all-reduced.
        bound_s: seconds that the slowest stage or link needs for its own work alone.
        num_stages: number of stages.
        warm_up: forwards of each stage before its first pair of a forward and a backward, shape ``(num_stages,)``.
    """

    stages: tuple[tuple[int, int, tuple[int, ...]], ...]
    makespan_s: float
    bound_s: float
    num_stages: int
    warm_up: tuple[int, ...]

    def __str__(self) -> str:
        rows = [
            f"stage {k}: units {first}-{last} on {'device' if len(devices) == 1 else 'devices'} "
            f"{', '.join(map(str, devices))}, {ahead} forwards ahead"
            for k, ((first, last, devices), ahead) in enumerate(zip(self.stages, self.warm_up, strict=True))
        ]
        return "\n".join([*rows, f"{self.makespan_s:.6g} s an iteration, at least {self.bound_s:.6g} s"])


def plan(
    costs: SppCosts,
    bandwidth: Matrix,
    num_microbatches: int,
    memory_limit: float | None = None,
    candidates: Literal["paper", "all"] = "paper",
) -> SppPlan:
    """Return the plan with the shortest simulated iteration.

    Args:
        costs: costs of the units.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``.
        num_microbatches: M, number of micro-batches of an iteration.
        memory_limit: largest number of bytes of parameters on one device; None: no limit.
        candidates: ``"paper"`` simulates, for each number of stages, the plan whose slowest part is fastest. ``"all"``
            simulates every plan of contiguous units along the order of devices, in both directions, for small problems.
    Raises:
        PartitionError: no plan fits into the memory, there are more than 200,000 candidates, or a size is invalid.
    """
    if candidates not in ("paper", "all"):
        raise PartitionError(f"candidates={candidates!r}: use 'paper' or 'all'")
    order = device_order(bandwidth)
    problem = Problem(costs, Network.of(bandwidth).ordered(order), num_microbatches, memory_limit)
    if candidates == "paper":
        best = _best_of_least(problem, order)
    else:
        best = None
        for along in dict.fromkeys((order, order[::-1])):
            problem = Problem(costs, Network.of(bandwidth).ordered(along), num_microbatches, memory_limit)
            best = _better(problem, along, all_plans(problem), best)
    if best is None:
        raise problem.too_little_memory()
    return best


def partition(
    costs: SppCosts,
    order: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    bandwidth: Matrix | None = None,
    memory_limit: float | None = None,
) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return the stages along an order of devices whose slowest stage or link has the least work.

    Args:
        costs: costs of the units.
        order: all devices, as :func:`device_order` returns them.
        num_stages: S, number of stages.
        num_microbatches: M, number of micro-batches of an iteration.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``; None: messages take no time.
        memory_limit: largest number of bytes of parameters on one device; None: no limit.
    Returns:
        ``(first unit, last unit, devices)`` of each stage.
    Raises:
        PartitionError: there are more stages than units or devices, or no plan fits into the memory.
    Source: PRM of the paper, with a limit for the memory.
    """
    if not 1 <= num_stages <= min(costs.num_units, len(order)):
        raise PartitionError(
            f"num_stages={num_stages}: {costs.num_units} units on {len(order)} devices make 1 to "
            f"{min(costs.num_units, len(order))} stages"
        )
    network = Network.of(bandwidth or np.full((len(order), len(order)), math.inf).tolist())
    problem = Problem(costs, network.ordered(order), num_microbatches, memory_limit)
    for limit_s in problem.limits_s():
        found = least_bottlenecks(problem, limit_s, num_stages)
        if num_stages in found:
            return _named(found[num_stages], order)
    raise problem.too_little_memory()


def execution_order(num_stages: int, num_microbatches: int) -> Schedule:
    """Return SPP's order of execution: stage k runs min(M, 4 (S-1-k)) forwards before its first pair.

    The paper builds the order in passes over queues. In each pass a micro-batch advances by one computation or one
    link, so the way over one hop and back takes four passes. The last stage runs a backward after each forward.

    Args:
        num_stages: S, number of stages.
        num_microbatches: M, number of micro-batches of an iteration.
    Source: PE of the paper.
    """
    ahead = tuple(min(num_microbatches, 4 * (num_stages - 1 - k)) for k in range(num_stages))
    return from_warm_up(ahead, num_microbatches, "spp")


@functools.cache
def orders(num_stages: int, num_microbatches: int) -> tuple[Schedule, Schedule]:
    """Return SPP's order, and 1F1B, which is faster for a few problems."""
    return execution_order(num_stages, num_microbatches), build("1f1b", num_stages, num_microbatches)


def _named(stages: Sequence[PlacedStage], order: Sequence[int]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((s.begin, s.end - 1, tuple(order[s.first : s.stop])) for s in stages)


def _better(
    problem: Problem, order: Sequence[int], plans: Iterable[Sequence[PlacedStage]], best: SppPlan | None
) -> SppPlan | None:
    """Return the best of these plans and the best plan so far; plans that cannot be better are not simulated."""
    for stages in plans:
        if best is not None and problem.least_s(stages) >= best.makespan_s:
            continue
        seconds, warm_up = problem.makespan(stages, orders(len(stages), problem.num_microbatches))
        if best is None or seconds < best.makespan_s * (1 - _ROUNDING):
            best = SppPlan(_named(stages, order), seconds, problem.bound_s(stages), len(stages), warm_up)
    return best


def _best_of_least(problem: Problem, order: Sequence[int]) -> SppPlan | None:
    """Return the best of the plans with the least W for each number of stages.

    No iteration is shorter than its W. So once a plan has been simulated, plans with a larger W can be left out.
    """
    best: SppPlan | None = None
    missing = set(range(1, problem.most_stages + 1))
    for limit_s in problem.limits_s():
        enough_s = math.inf if best is None else best.makespan_s
        found = least_bottlenecks(problem, min(limit_s, enough_s), max(missing))
        best = _better(problem, order, [found[s] for s in sorted(missing & found.keys())], best)
        missing -= found.keys()
        if enough_s <= limit_s or not missing:
            break
    return best


def num_plans(problem: Problem) -> int:
    """Return the number of plans of contiguous units along the order of devices."""
    units, devices = problem.costs.num_units, len(problem.network)
    return math.comb(units + devices - 2, devices - 1)


def all_plans(problem: Problem) -> Iterator[Sequence[PlacedStage]]:
    """Yield all plans of contiguous units along the order of devices that fit into the memory.

    Raises:
        PartitionError: there are more than 200,000 plans.
    """
    units, devices, count = problem.costs.num_units, len(problem.network), num_plans(problem)
    if count > _MOST_PLANS:
        raise PartitionError(
            f"candidates='all' would try {count:,} plans for {units} units on {devices} devices in each direction, and "
            f"{_MOST_PLANS:,} are the most; use candidates='paper'"
        )
    for num_stages in range(1, problem.most_stages + 1):
        for cuts in combinations(range(1, units), num_stages - 1):
            ends = list(pairwise((0, *cuts, units)))
            nbytes = [problem.costs.parameters[end] - problem.costs.parameters[begin] for begin, end in ends]
            if not problem.fits(np.array(nbytes)).all():
                continue
            for splits in combinations(range(1, devices), num_stages - 1):
                yield [PlacedStage(*ends[k], *place) for k, place in enumerate(pairwise((0, *splits, devices)))]

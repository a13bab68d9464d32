"""SPP's planner as in the paper: replicated stages for devices with links of different speed.

Three steps, each a pure function of numbers::

    device_order     0 1 | 2 3                 cut the network recursively at its weakest links
    partition        units 0-3    4-5          a dynamic program over units, devices and replicas along that order
                     devices 0-2  3
    execution_order  F F F F F B F B ...       which micro-batch a stage works on next; the iteration is simulated

Source: Luo et al., *Efficient Pipeline Planning for Expedited Distributed DNN Training*, INFOCOM 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal, NamedTuple

import numpy as np

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.schedule.builders import from_warm_up
from lightning_avgpipe.schedule.turns import Matrix
from lightning_avgpipe.systems.spp.problem import Network, PlacedStage, Problem, device_order

_MOST_PLANS = 200_000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SppPlan:
    """A plan of SPP: the units and devices of each stage.

    Attributes:
        stages: ``(first unit, last unit, devices)`` of each stage.
        makespan_s: simulated seconds of an iteration, until the last gradient is all-reduced.
        bound_s: W, the seconds that the slowest stage or link needs for its own work alone.
    """

    stages: tuple[tuple[int, int, tuple[int, ...]], ...]
    makespan_s: float
    bound_s: float

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)


def plan(
    costs: UnitCosts,
    bandwidth: Matrix,
    num_microbatches: int,
    candidates: Literal["paper", "all"] = "paper",
) -> SppPlan:
    """Return the plan with the shortest simulated iteration.

    Args:
        costs: costs of the units.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``.
        num_microbatches: M, number of micro-batches of an iteration.
        candidates: ``"paper"`` simulates, for each number of stages, the plan with the least W, and the plan with the
            least W if a link carries messages in both directions at once. ``"all"`` simulates every plan of contiguous
            units along the order of devices, in both directions, for small problems.
    Raises:
        PartitionError: there are more than 200,000 candidates, or a size is invalid.
    """
    if candidates not in ("paper", "all"):
        raise PartitionError(f"candidates={candidates!r}: use 'paper' or 'all'")
    order, network = device_order(bandwidth), Network.of(bandwidth)
    best = None
    if candidates == "paper":
        problem = Problem(costs, network.ordered(order), num_microbatches)
        for half_duplex in (True, False):
            best = _best_of_least(replace(problem, half_duplex=half_duplex), order, best)
        assert best is not None
        return best
    for along in dict.fromkeys((order, order[::-1])):
        problem = Problem(costs, network.ordered(along), num_microbatches)
        best = _better(problem, along, all_plans(problem), best)
    assert best is not None
    return best


def partition(
    costs: UnitCosts,
    order: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    bandwidth: Matrix,
) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return the stages, along an order of devices, that minimise W: the work of the slowest stage or link.

    Args:
        costs: costs of the units.
        order: all devices, as :func:`device_order` returns them.
        num_stages: S, number of stages.
        num_microbatches: M, number of micro-batches of an iteration.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``.
    Returns:
        ``(first unit, last unit, devices)`` of each stage.
    Raises:
        PartitionError: there are more stages than units or devices.
    Source: PRM of the paper.
    """
    if not 1 <= num_stages <= min(costs.num_units, len(order)):
        raise PartitionError(
            f"num_stages={num_stages}: {costs.num_units} units on {len(order)} devices make 1 to "
            f"{min(costs.num_units, len(order))} stages"
        )
    problem = Problem(costs, Network.of(bandwidth).ordered(order), num_microbatches, half_duplex=True)
    plans = (least_bottlenecks(problem, limit_s, num_stages) for limit_s in problem.limits_s())
    return _named(next(found[num_stages] for found in plans if num_stages in found), order)


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
    """Return the best of these plans and of the best plan so far; plans that cannot be better are not simulated."""
    for stages in plans:
        if best is not None and problem.least_s(stages) >= best.makespan_s:
            continue
        seconds = problem.makespan(stages, orders(len(stages), problem.num_microbatches))
        if best is None or seconds < best.makespan_s * (1 - _ROUNDING):
            best = SppPlan(_named(stages, order), seconds, replace(problem, half_duplex=True).bound_s(stages))
    return best


def _best_of_least(problem: Problem, order: Sequence[int], best: SppPlan | None) -> SppPlan | None:
    """Return the best of the plans that have the least W for their number of stages, and of the best plan so far.

    With full-duplex links no iteration is shorter than its W. So plans with a larger W than the best one can be left
    out.
    """
    missing = set(range(1, problem.most_stages + 1))
    for limit_s in problem.limits_s():
        enough_s = math.inf if best is None or problem.half_duplex else best.makespan_s
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
    """Yield all plans of contiguous units along the order of devices.

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
            for splits in combinations(range(1, devices), num_stages - 1):
                yield [PlacedStage(*ends[k], *place) for k, place in enumerate(pairwise((0, *splits, devices)))]


# -- the dynamic program ---------------------------------------------------------------------------------------------


class _Plans(NamedTuple):
    """The best plans of the first l units on the first i devices, for l in a window.

    The arrays are indexed by (number of stages - 1, replicas of the last stage - 1, l - lowest).

    Attributes:
        lowest: l of the first column.
        seconds: W of each plan; infinite above the limit.
        begins: first unit of the last stage of each plan.
        before: replicas of the last but one stage of each plan.
    """

    lowest: int
    seconds: np.ndarray
    begins: np.ndarray
    before: np.ndarray

    @classmethod
    def none(cls, window: np.ndarray, shape: tuple[int, int]) -> _Plans:
        """Return plans of a shape without any entry: W is infinite."""
        size = (*shape, len(window))
        seconds, begins, before = np.full(size, math.inf), np.zeros(size, np.int32), np.zeros(size, np.int32)
        return cls(int(window[0]) if len(window) else 0, seconds, begins, before)


def least_bottlenecks(problem: Problem, limit_s: float, most_stages: int) -> dict[int, list[PlacedStage]]:
    """Return the plan with the least W for each number of stages for which W is at most ``limit_s``.

    ``W(l, s, r, i) = min over l', r' of max(W(l', s-1, r', i-r), M transfer, M work / r + all-reduce)`` is that of the
    first l units on the first i devices. An l is considered only if, by work alone, the first i devices can run the
    first l units within the limit, and the other devices the remaining units. If the limit is close to evenly shared
    work, few l are left.
    """
    units, devices = problem.costs.num_units, len(problem.network)
    work, limit_s = problem.num_microbatches * problem.costs.busy_s, limit_s * (1 + _ROUNDING)
    plans = [_Plans.none(np.arange(0), (0, 0))]
    for i in range(1, devices + 1):
        window = np.arange(
            max(1, int(np.searchsorted(work, work[-1] - limit_s * (devices - i)))) if i < devices else units,
            int(np.searchsorted(work, limit_s * i, side="right")),
        )
        plans.append(_Plans.none(window, (min(i, most_stages), i)))
        if len(window):
            plans[i].seconds[0, i - 1] = _work_s(problem, np.zeros(1, int), window, 0, i)[0]
            for first in range(1, i):
                _extend(problem, plans[first], plans[i], first, i, window, limit_s)
            plans[i].seconds[plans[i].seconds > limit_s] = math.inf
    found = {s: _traced_back(problem, plans, s) for s in range(1, most_stages + 1)}
    return {s: stages for s, stages in found.items() if stages is not None}


def _total_s(problem: Problem, first: int, stop: int) -> np.ndarray:
    """Return the seconds of a stage with the first l units on devices ``first .. stop-1``, shape ``(L+1,)``."""
    total = problem.num_microbatches * problem.costs.busy_s * problem.slow(first, stop) / (stop - first)
    return np.asarray(total + problem.reduce_s_per_byte(first, stop) * problem.costs.parameters)


def _work_s(problem: Problem, begins: np.ndarray, ends: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the seconds of a stage from each of ``begins`` to each of ``ends``; infinite where it would be empty."""
    total = _total_s(problem, first, stop)
    seconds = np.subtract(total[ends], total[begins][:, None])
    if begins[-1] >= ends[0]:
        seconds[begins[:, None] >= ends] = math.inf
    return seconds


def _extend(
    problem: Problem, shorter: _Plans, longer: _Plans, first: int, i: int, window: np.ndarray, limit_s: float
) -> None:
    """Extend the plans ``shorter`` by a stage on the devices ``first .. i-1``, and store the results in ``longer``."""
    network, count, most = problem.network, problem.num_microbatches, len(longer.seconds) - 1
    if not shorter.seconds.size:
        return
    replicas = np.arange(1, first + 1)
    there, back = problem.messages[:, shorter.lowest - 1 : shorter.lowest - 1 + shorter.seconds.shape[2]]
    pairs = replicas * (i - first)
    transfer_s = problem.both_ways(
        there * (count / (pairs * network.forward[first - replicas, first, i]))[:, None],
        back * (count / (pairs * network.backward[first - replicas, first, i]))[:, None],
    )
    arrivals_s = np.maximum(shorter.seconds[:most], transfer_s)
    choices = arrivals_s.argmin(axis=1)
    arrivals_s = np.take_along_axis(arrivals_s, choices[:, None], axis=1)[:, 0]
    possible = np.flatnonzero((arrivals_s <= limit_s).any(axis=0))
    if not len(possible):
        return
    # only ends that the last stage alone can reach within the limit
    total, begins = _total_s(problem, first, i), possible + shorter.lowest
    near_s = total[begins[-1]] + limit_s * (1 + _ROUNDING)
    ends = window[: int(np.searchsorted(total[window], near_s, side="right"))]
    if not len(ends):
        return
    work_s, columns = _work_s(problem, begins, ends, first, i), np.arange(len(ends))
    for s, (arrival_s, choice) in enumerate(zip(arrivals_s[:, possible], choices[:, possible], strict=True), 1):
        able = np.flatnonzero(arrival_s <= limit_s)
        if len(able):
            seconds = work_s[able]
            np.maximum(seconds, arrival_s[able, None], out=seconds)
            best = seconds.argmin(axis=0)
            where = s, i - first - 1, slice(len(ends))
            longer.seconds[where] = seconds[best, columns]
            longer.begins[where] = begins[able[best]]
            longer.before[where] = replicas[choice[able[best]]]


def _traced_back(problem: Problem, plans: Sequence[_Plans], num_stages: int) -> list[PlacedStage] | None:
    """Return the stages of the plan with the least W for all units on all devices; None if there is none."""
    end, i = problem.costs.num_units, len(problem.network)
    last = plans[i].seconds[num_stages - 1, :, end - plans[i].lowest :]
    if not last.size or not math.isfinite(last.min()):
        return None
    replicas = int(last[:, 0].argmin()) + 1
    stages: list[PlacedStage] = []
    for s in range(num_stages - 1, -1, -1):
        at = s, replicas - 1, end - plans[i].lowest
        begin, before = int(plans[i].begins[at]), int(plans[i].before[at])
        stages.append(PlacedStage(begin, end, i - replicas, i))
        end, i, replicas = begin, i - replicas, before
    return stages[::-1]

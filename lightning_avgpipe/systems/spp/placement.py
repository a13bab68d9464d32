"""SPP's plans for replicas that take whole micro-batches in turns, as in this package, and the source of these plans.

SPP slices each micro-batch over the replicas of a stage. In turns a replica computes as much, but a micro-batch takes
the time of one device, only pairs of replicas whose turns meet send to each other, and all-reduces use a ring of
ascending ranks. So plans are chosen by simulating turns: all plans if they are few, otherwise, for each number of
stages, the plan whose slowest stage or link is fastest by SPP. If none of these fits the memory, balanced stages stay.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from lightning_avgpipe.capture.costs import OPERATIONS_PER_BYTE, Costs, Link
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.probe import measure_bandwidth
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning import Forecast, Plan
from lightning_avgpipe.planning.costs import UnitCosts, units_between
from lightning_avgpipe.planning.planner import Conditions, Planner, PlanSource, Proposal
from lightning_avgpipe.schedule import Schedule, with_replicas
from lightning_avgpipe.schedule.turns import Matrix, ReplicatedStageCosts, candidates
from lightning_avgpipe.systems.spp.partition import SppPlan, all_plans, least_bottlenecks, num_plans, orders
from lightning_avgpipe.systems.spp.problem import Network, PlacedStage, Problem, device_order
from lightning_avgpipe.utils.device import port_of

_log = logging.getLogger(__name__)

_ALIKE = 1.25  # devices that take at most this many times as long as the fastest count as equally fast
_MOST_PLANS = 5_000  # up to this number all plans are candidates; beyond, only those with SPP's least bottlenecks


class _NoneFitsError(PartitionError):
    """None of the candidate plans fits the memory of its devices."""


class SppSource(PlanSource):
    """Plans whose stages are placed by the bandwidth between processes; several processes may share a stage.

    Args:
        bandwidth: bytes per second between every two processes, shape ``(V, V)``; ``"measured"``: it is measured before
            a plan, with the speed of each device.
    """

    replicates = True

    def __init__(self, bandwidth: Matrix | Literal["measured"] = "measured") -> None:
        self._given = self._bandwidth = bandwidth
        self._slowness: tuple[float, ...] = ()  # of each process, measured while it had the whole module

    def measure(self, cluster: Cluster, seconds: Callable[[], float] | None) -> None:
        """Measure the bandwidth between processes, and how fast each computes the step; every process calls it."""
        if isinstance(self._given, str):
            if not port_of(cluster.device).is_host:
                raise ConfigurationError(
                    f"planner='spp' with Links(bandwidth='measured') measures links between hosts, not "
                    f"between {cluster.device} and others; give a matrix of bytes per second, one row per process"
                )
            self._bandwidth = measure_bandwidth(cluster.group)
        elif len(self._given) != cluster.group.world_size:
            raise ConfigurationError(
                f"bandwidth has {len(self._given)} rows, but there are {cluster.group.world_size} processes; give a "
                "row, and an entry in each, for every process"
            )
        if seconds is not None:
            self._slowness = slowness_of(cluster.group.exchange_objects(seconds()))

    def propose(self, planner: Planner, plan: Plan, costs: Costs, conditions: Conditions) -> Proposal | None:
        """Return the plan with SPP's stages and the processes of each; None if only balanced ones fit.

        Raises:
            PartitionError: no plan is known that fits the memory and uses every process.
        """
        bandwidth, slow = self._bandwidth, self._slowness
        if isinstance(bandwidth, str):
            return None
        begin, count = time.perf_counter(), conditions.schedule.num_microbatches
        bandwidth = bandwidth if costs.measured else _per_operation(bandwidth)
        units, positions = units_between(plan.graph, costs, planner.subject.nbytes)
        if slow and slow[0] > 1:  # costs were measured on rank 0
            forward_s, backward_s = (tuple(s / slow[0] for s in times) for times in (units.forward_s, units.backward_s))
            units = replace(units, forward_s=forward_s, backward_s=backward_s)

        def divided(found: SppPlan) -> Proposal:
            devices = tuple(ranks for _, _, ranks in found.stages)
            slowest = [min(bandwidth[u][v] for u in here for v in after) for here, after in itertools.pairwise(devices)]
            chosen, memory = planner.for_replicated_stages(tuple(map(len, devices)), conditions)
            cuts = tuple(positions[last] for _, last, _ in found.stages[:-1])
            linked = replace(costs, links=tuple(Link(1 / speed) for speed in slowest))
            made = replace(chosen.plan_at(plan.graph, cuts, linked, memory), devices=devices)
            return Proposal(chosen, made, linked, memory)

        def fits(found: SppPlan) -> bool:
            limit = planner.memory_limit
            return limit == math.inf or all(stage.memory.total <= limit for stage in divided(found).plan.stages)

        schedule = conditions.schedule.name  # which will run
        try:
            found = plan_in_turns(units, bandwidth, count, slow, fits, partial(candidates, schedule))
        except _NoneFitsError as error:
            if planner.num_stages != len(bandwidth):
                raise
            _log.info("there is a balanced stage on each device, which fits: %s", error)
            return None
        took_s = time.perf_counter() - begin
        _log.info("planned %d units on %d devices in %.1f s", units.num_units, len(bandwidth), took_s)
        proposed = divided(found)
        forecast = Forecast(schedule, count, found.makespan_s, _idle_share(units, found, count, slow))
        return proposed._replace(plan=replace(proposed.plan, forecast=forecast))


def _per_operation(bandwidth: Matrix) -> Matrix:
    """Convert bytes per second to bytes per counted operation.

    The number of operations per second is unknown. So a byte on the fastest link costs as much as for balanced stages.
    """
    speeds = Network.of(bandwidth).bandwidth
    links = (speed for u, row in enumerate(speeds) for v, speed in enumerate(row) if u != v and speed < math.inf)
    unit = OPERATIONS_PER_BYTE * max(links, default=1.0)
    return [[speed / unit for speed in row] for row in speeds]


def slowness_of(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the time of each device relative to the fastest; empty if all are similar or one was not measured.

    Args:
        seconds: time of each device for the same work; 0: not measured.
    """
    least = min(seconds, default=0.0)
    if not least or max(seconds) <= least * _ALIKE:
        return ()
    return tuple(s / least if s > least * _ALIKE else 1.0 for s in seconds)


def plan_in_turns(
    costs: UnitCosts,
    bandwidth: Matrix,
    num_microbatches: int,
    slowness: Sequence[float] = (),
    fits: Callable[[SppPlan], bool] = lambda plan: True,
    schedules: Callable[[int, int], Iterable[Schedule]] = orders,
) -> SppPlan:
    """Return the plan with the shortest simulated iteration along the order of devices.

    The first device of :func:`device_order` is in the last stage.

    Args:
        costs: costs of the units, on a device that is not slow.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``.
        num_microbatches: M, number of micro-batches of an iteration.
        slowness: time of each device relative to one that is not slow, at least 1, shape ``(V,)``; empty: none is slow.
        fits: function that returns whether a plan fits the memory of its devices.
        schedules: returns the schedules to try for S stages and M micro-batches, of which the fastest counts; default:
            SPP's own, and 1F1B.
    Raises:
        PartitionError: none of the candidate plans fits.
    """
    order = device_order(bandwidth)[::-1]
    slow = tuple(slowness[device] for device in order) if slowness else ()
    problem = Problem(costs, Network.of(bandwidth, rings=True).ordered(order), num_microbatches, slow)
    tried = 0
    for plans in _candidates(problem):
        tried += len(plans)
        if (best := _fastest(problem, order, plans, fits, schedules)) is not None:
            return best
    raise _NoneFitsError(
        f"none of {tried} plans for {len(bandwidth)} devices fits their memory; use more devices, smaller units or "
        "micro-batches, or raise memory_limit"
    )


def _fastest(
    problem: Problem,
    order: Sequence[int],
    plans: Iterable[Sequence[PlacedStage]],
    fits: Callable[[SppPlan], bool],
    schedules: Callable[[int, int], Iterable[Schedule]],
) -> SppPlan | None:
    """Return the plan that fits with the shortest simulated iteration; None if none fits."""
    best: SppPlan | None = None
    bounds = [(least_in_turns_s(problem, stages), stages) for stages in plans]
    for at_least_s, stages in sorted(bounds, key=lambda pair: (pair[0], len(pair[1]))):
        if best is not None and at_least_s >= best.makespan_s:
            break
        named = tuple((s.begin, s.end - 1, tuple(sorted(order[s.first : s.stop]))) for s in stages)
        replicas = [stage.replicas for stage in stages]
        for schedule in schedules(len(stages), problem.num_microbatches):
            seconds = seconds_in_turns(problem, stages, with_replicas(schedule, replicas))
            made = SppPlan(named, seconds, at_least_s)
            if (best is None or seconds < best.makespan_s) and fits(made):
                best = made
    return best


def _candidates(problem: Problem) -> Iterator[Collection[Sequence[PlacedStage]]]:
    """Yield plans to simulate; while none of them fits, further ones, with larger bottlenecks, are asked for."""
    if num_plans(problem) <= _MOST_PLANS:
        yield list(all_plans(problem))
        return
    missing = set(range(1, problem.most_stages + 1))
    for limit_s in problem.limits_s():
        found = least_bottlenecks(problem, limit_s, max(missing))
        yield [found[s] for s in sorted(missing & found.keys())]
        missing -= found.keys()
        if not missing:
            break


def least_in_turns_s(problem: Problem, stages: Sequence[PlacedStage]) -> float:
    """Return a lower bound for the seconds of an iteration with any order of turns, for links that take no time.

    A stage waits for its first activation, its replicas do their work, and its last gradient travels back.
    """
    busy, home_s = problem.costs.busy_s, problem.reduce_left_s(stages[0])
    before = least = 0.0
    for stage in stages:
        work = float(busy[stage.end] - busy[stage.begin])
        slowness = problem.slowness[stage.first : stage.stop] or (1.0,)
        turns = range(problem.num_microbatches, problem.num_microbatches - len(slowness), -1)
        turns_s = max(math.ceil(n / stage.replicas) * work * slow for n, slow in zip(turns, slowness, strict=True))
        least = max(least, before + turns_s + home_s, turns_s + problem.reduce_left_s(stage))
        before += work * min(slowness)
    return least


def _shared_stages(problem: Problem, stages: Sequence[PlacedStage]) -> ReplicatedStageCosts:
    """Return the costs of a plan's stages, whose replicas take turns."""
    costs = problem.costs
    hops = [stage.end - 1 for stage in stages[:-1]]
    return ReplicatedStageCosts(
        [stage.replicas for stage in stages],
        [sum(costs.forward_s[stage.begin : stage.end]) for stage in stages],
        [sum(costs.backward_s[stage.begin : stage.end]) for stage in stages],
        [costs.bytes_forward[unit] for unit in hops],
        [costs.bytes_backward[unit] for unit in hops],
        problem.network.bandwidth,
        problem.slowness,
    )


def seconds_in_turns(problem: Problem, stages: Sequence[PlacedStage], schedule: Schedule) -> float:
    """Return the seconds until the gradients of all stages are all-reduced; links of different pairs do not contend.

    Args:
        problem: problem with the devices in their order.
        stages: stages of a plan.
        schedule: schedule for replicas, each of whose rows is in the order of micro-batches.
    """
    ends = _shared_stages(problem, stages).ends_s(schedule)
    return max(end + problem.reduce_left_s(stage) for end, stage in zip(ends, stages, strict=True))


def _idle_share(units: UnitCosts, plan: SppPlan, num_microbatches: int, slowness: Sequence[float]) -> float:
    """Return the share of the time of all devices in which they do not compute, for a plan of SPP."""
    busy_s, devices = 0.0, 0
    for first, last, ranks in plan.stages:
        of_one_s = float(units.busy_s[last + 1] - units.busy_s[first])
        turns = [math.ceil((num_microbatches - j) / len(ranks)) for j in range(len(ranks))]
        busy_s += of_one_s * sum(
            n * (slowness[rank] if slowness else 1.0) for n, rank in zip(turns, ranks, strict=True)
        )
        devices += len(ranks)
    return max(0.0, 1 - busy_s / (devices * plan.makespan_s))

"""SPP's planning for replicas that take whole micro-batches in turns, as in this package.

SPP slices each micro-batch over the replicas of a stage. In turns a replica computes as much, but a micro-batch takes
the time of one device, only pairs of replicas whose turns meet send to each other, and all-reduces use a ring of
ascending ranks. So plans are chosen by simulating turns: all plans where they are few, otherwise for each number of
stages the plan whose slowest stage or link is fastest for SPP.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.wire_format import wire_bytes
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.balance import gaps
from lightning_avgpipe.planning.bottleneck import least_bottlenecks
from lightning_avgpipe.planning.network import Matrix, Network, device_order
from lightning_avgpipe.planning.problem import PlacedStage, Problem
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.planning.spp import SppPlan, all_plans, num_plans, orders
from lightning_avgpipe.schedule import FORWARD, Kind, Schedule, with_replicas
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.kinds import Direction
from lightning_avgpipe.schedule.player import play

_ALIKE = 1.25  # devices that take at most so many times as long as the fastest count as equally fast
_MOST_PLANS = 5_000  # up to this number all plans are candidates; beyond, only those with SPP's least bottlenecks


def slowness_of(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the time of each device in units of the fastest; empty if all are similar or one was not measured.

    Args:
        seconds: time of each device for the same work; 0: not measured.
    """
    least = min(seconds, default=0.0)
    if not least or max(seconds) <= least * _ALIKE:
        return ()
    return tuple(s / least if s > least * _ALIKE else 1.0 for s in seconds)


def plan_in_turns(
    costs: SppCosts,
    bandwidth: Matrix,
    num_microbatches: int,
    slowness: Sequence[float] = (),
    fits: Callable[[SppPlan], bool] = lambda plan: True,
) -> SppPlan:
    """Return the plan with the shortest simulated iteration along the order of devices.

    The first device of :func:`device_order` is in the last stage.

    Args:
        costs: costs of the units, on a device that is not slow.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``.
        num_microbatches: M, number of micro-batches of an iteration.
        slowness: time of each device in units of one that is not slow, at least 1, shape ``(V,)``; empty: none is slow.
        fits: function that returns whether a plan fits the memory of its devices.
    Raises:
        PartitionError: none of the candidate plans fits.
    """
    order = device_order(bandwidth)[::-1]
    slow = tuple(slowness[device] for device in order) if slowness else ()
    problem = Problem(costs, Network.of(bandwidth, rings=True).ordered(order), num_microbatches, None, slow)
    best: SppPlan | None = None
    bounds = [(least_in_turns_s(problem, stages), stages) for stages in _candidates(problem)]
    for at_least_s, stages in sorted(bounds, key=lambda pair: (pair[0], len(pair[1]))):
        if best is not None and at_least_s >= best.makespan_s:
            break
        named = tuple((s.begin, s.end - 1, tuple(sorted(order[s.first : s.stop]))) for s in stages)
        for schedule in _orders(stages, num_microbatches):
            seconds = seconds_in_turns(problem, stages, schedule)
            made = SppPlan(named, seconds, at_least_s, len(stages), schedule.warm_up)
            if (best is None or seconds < best.makespan_s) and fits(made):
                best = made
    if best is None:
        raise PartitionError(
            f"none of {len(bounds)} plans for {len(bandwidth)} devices fits their memory; use more devices, smaller "
            "units or micro-batches, or raise memory_limit"
        )
    return best


def _candidates(problem: Problem) -> Collection[Sequence[PlacedStage]]:
    """Return the plans that are simulated."""
    if num_plans(problem) <= _MOST_PLANS:
        return list(all_plans(problem))
    found = (least_bottlenecks(problem, limit_s, problem.most_stages) for limit_s in problem.limits_s())
    return next(plans for plans in found if plans).values()


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


def units_between(graph: CallGraph, costs: Costs, weights: Mapping[str, int]) -> tuple[SppCosts, tuple[int, ...]]:
    """Return the costs of units between the legal cuts that divide the uses of no parameter, and these cuts.

    Args:
        graph: call graph of the step.
        costs: costs of its nodes.
        weights: full name of each parameter -> its bytes.
    """
    uses: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for name in (*node.parameters, *node.states):
            uses[name].append(graph.upkeep.get(node.index, node.index))
    spans = [(min(found), max(found)) for found in uses.values()]
    legal = [gap.position for gap in gaps(graph) if gap.obstacle is None]
    cuts = tuple(p for p in legal if not any(first < p <= last for first, last in spans))
    bounds = list(itertools.pairwise((0, *cuts, len(graph.nodes))))
    size = partial(wire_bytes, wire=costs.smallest)
    sent = graph.crossing(size)
    gradients = [[graph.values[v] for v in graph.live(p) if graph.values[v].requires_grad] for p in cuts]
    held = [sum(weights.get(n, 0) for n, found in uses.items() if a <= min(found) < b) for a, b in bounds]
    return SppCosts(
        tuple(sum(costs.forward[a:b]) for a, b in bounds),
        tuple(sum(costs.backward[a:b]) for a, b in bounds),
        tuple(float(sent[p]) for p in cuts),
        tuple(float(sum(size(value) for value in values)) for values in gradients),
        tuple(map(float, held)),
    ), cuts


def _orders(stages: Sequence[PlacedStage], num_microbatches: int) -> list[Schedule]:
    replicas = [stage.replicas for stage in stages]
    return [with_replicas(schedule, replicas) for schedule in orders(len(stages), num_microbatches)]


def seconds_in_turns(problem: Problem, stages: Sequence[PlacedStage], schedule: Schedule) -> float:
    """Return the seconds until the gradients of all stages are all-reduced; links of different pairs do not contend.

    Args:
        problem: problem with the devices in their order.
        stages: stages of a plan.
        schedule: schedule for replicas, each of whose rows is in the order of micro-batches.
    """
    hosts = [range(stage.first, stage.stop) for stage in stages]
    lanes = play([schedule], _CostsInTurns(problem, stages), hosts).lanes
    ends = [max(lane.spans[-1][1] for lane in lanes if lane.stage == k and lane.spans) for k in range(len(stages))]
    return max(end + problem.reduce_left_s(stage) for end, stage in zip(ends, stages, strict=True))


@dataclass(frozen=True)
class _CostsInTurns:
    """The costs of a plan whose replicas take whole micro-batches in turns."""

    problem: Problem
    stages: Sequence[PlacedStage]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        costs, place = self.problem.costs, self.stages[stage]
        of_units = costs.forward_s if kind is FORWARD else costs.backward_s
        device = place.first + replica
        return ((sum(of_units[place.begin : place.end]) * self.problem.slow(device, device + 1), 1.0),)

    def message_s(self, direction: Direction, hop: int, sender: int = 0, receiver: int = 0) -> tuple[float, float]:
        costs, (before, after) = self.problem.costs, self.stages[hop : hop + 2]
        here, there = (before, after) if direction == "forward" else (after, before)
        nbytes = (costs.bytes_forward if direction == "forward" else costs.bytes_backward)[before.end - 1]
        return nbytes / self.problem.network.bandwidth[here.first + sender][there.first + receiver], 0.0

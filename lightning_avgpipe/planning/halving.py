"""Halving: where layers are frozen, fewer stages with several processes each may be faster than one stage per process.

::

    4 stages            0 | 1 | 2 | 3          more hops, and the trained layers may not divide into four
    2, of two each      0 0 | 1 1              the processes of a stage take its micro-batches in turns, and sum
    1, of four          0 0 0 0                their gradients at the end
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.freezing import num_frozen
from lightning_avgpipe.planning.network import Network
from lightning_avgpipe.planning.plan import Forecast, Plan
from lightning_avgpipe.planning.problem import PlacedStage, Problem
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.planning.turns import seconds_in_turns
from lightning_avgpipe.schedule import Schedule, build, forward_only, with_replicas
from lightning_avgpipe.utils.patching import nothing

_log = logging.getLogger(__name__)

_ADVANCES = (0, 1, 2)  # the adaptive advance would find the fastest of these


@dataclass(frozen=True)
class Halving:
    """The conditions under which a plan may have fewer stages than there are processes.

    Attributes:
        memory_limit: bytes that each stage may use.
        check: function that raises a PartitionError if replicas cannot share the stages of a plan in turns.
    """

    memory_limit: float
    check: Callable[[Plan, Sequence[int]], None] = nothing

    def accept(self, plan: Plan, counts: Sequence[int]) -> None:
        """Check that ``counts[k]`` processes can share each stage k of a plan; raise PartitionError otherwise."""
        self.check(plan, counts)
        states = [name for stage in plan.stages for name in stage.states]
        if states:
            raise PartitionError(f"the step changes '{states[0]}', which each replica would do for its own samples")


def fewest(
    plan: Plan, divide: Callable[[tuple[int, ...]], Plan], expect: Callable[[Plan, Sequence[int]], Forecast]
) -> tuple[tuple[int, ...], Forecast] | None:
    """Return the number of processes of each stage that is expected to be fastest, and its forecast.

    Args:
        plan: plan with one stage for each process.
        divide: function of the number of processes of each stage that returns a plan, or raises PartitionError.
        expect: function of a plan and the number of processes of each stage that returns a forecast.
    Returns:
        The number of processes of each stage and the forecast; None if one stage for each process is faster.
    """
    size, best, shortest = plan.num_stages, None, expect(plan, (1,) * plan.num_stages)
    _log.info("%d stages: %.3g expected", size, shortest.iteration_s)
    for count in (count for count in range(size - 1, 0, -1) if size % count == 0):
        counts = (size // count,) * count
        try:
            fewer = divide(counts)
        except PartitionError as error:
            _log.info("%d stages: %s", count, error)
            continue
        forecast = expect(fewer, counts)
        _log.info("%d stages with %d processes each: %.3g expected", count, counts[0], forecast.iteration_s)
        if forecast.iteration_s <= shortest.iteration_s:
            best, shortest = (counts, forecast), forecast
    return best


def processes_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the processes of each stage, given their numbers; the last stage has rank 0."""
    return tuple(tuple(range(sum(counts[k + 1 :]), sum(counts[k:]))) for k in range(len(counts)))


def expected(plan: Plan, counts: Sequence[int], schedule: Schedule, link: Link, trained: Mapping[str, int]) -> Forecast:
    """Simulate stages whose processes take micro-batches in turns, and sum their gradients.

    Args:
        plan: plan of the stages, with times divided by the number of processes of each stage.
        counts: number of processes of each stage.
        schedule: schedule that gives the order and the number of micro-batches.
        link: link between every two processes.
        trained: full name of each parameter that is trained -> its bytes.
    """
    # the latency of a message is expressed as additional bytes
    speed, more = (1 / link.per_byte, link.latency / link.per_byte) if link.per_byte else (float("inf"), 0.0)
    sends = [(stage.wire_bytes, stage.gradient_bytes) for stage in plan.stages[:-1]]
    frozen, size = num_frozen(plan.graph, plan.cuts, plan.graph.trained), sum(counts)
    costs = SppCosts(
        tuple(stage.forward * count for stage, count in zip(plan.stages, counts, strict=True)),
        tuple(
            stage.backward * count * (stage.index >= frozen) for stage, count in zip(plan.stages, counts, strict=True)
        ),
        tuple(more + values for values, _ in sends),
        tuple(more + gradients if gradients else 0.0 for _, gradients in sends),
        tuple(float(sum(trained.get(name, 0) for name in stage.parameters)) for stage in plan.stages),
    )
    problem = Problem(costs, Network.of([[speed] * size] * size), schedule.num_microbatches, None)
    stages = [PlacedStage(k, k + 1, sum(counts[:k]), sum(counts[: k + 1])) for k in range(len(counts))]
    name, orders = schedule.name, _ADVANCES if schedule.name == "advance_forward" else (0,)
    built = [build(name, len(counts), schedule.num_microbatches, advance) for advance in orders]
    ordered = [forward_only(with_replicas(one, counts), frozen) for one in built]
    seconds = min(seconds_in_turns(problem, stages, one) for one in ordered)
    busy = schedule.num_microbatches * float(costs.busy_s[-1])
    return Forecast(name, schedule.num_microbatches, seconds, max(0.0, 1 - busy / (size * seconds)) if seconds else 0.0)

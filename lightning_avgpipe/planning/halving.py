"""Halving: with layers frozen, fewer stages with several processes each may be faster than one stage for each process.

::

    4 stages            0 | 1 | 2 | 3          more hops, and what is left to train may not divide into four
    2, of two each      0 0 | 1 1              the processes of a stage take its micro-batches in turns, and sum
    1, of four          0 0 0 0                their gradients at the end

    2, in two groups    0 | 1   0 | 1          each group has a model and batches of its own: of two batches in the time
                                               of one iteration each takes a half; and then models are averaged
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.freezing import num_frozen
from lightning_avgpipe.planning.network import Network
from lightning_avgpipe.planning.plan import Forecast, Plan
from lightning_avgpipe.planning.problem import Problem, Stage
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.planning.turns import seconds_in_turns
from lightning_avgpipe.schedule import Schedule, build, forward_only, with_replicas
from lightning_avgpipe.utils.patching import nothing

_log = logging.getLogger(__name__)

_ADVANCES = (0, 1, 2)  # of which training would find the fastest


@dataclass(frozen=True)
class Halving:
    """Leave to make fewer stages than there are processes.

    Attributes:
        memory_limit: bytes that each of them may use.
        check: raises a PartitionError if replicas cannot share the stages of a plan in turns.
        as_groups: whether processes that are freed become further groups, each with a model, which a plan only advises;
            else they share stages.
    """

    memory_limit: float
    check: Callable[[Plan, Sequence[int]], None] = nothing
    as_groups: bool = False

    def accept(self, plan: Plan, counts: Sequence[int]) -> None:
        """Raise a PartitionError if so many processes of each stage of a plan cannot share it."""
        self.check(plan, counts)
        states = [] if self.as_groups else [name for stage in plan.stages for name in stage.states]
        if states:
            raise PartitionError(f"the step changes '{states[0]}', which each replica would do for its own samples")


def fewest(
    plan: Plan, divide: Callable[[tuple[int, ...]], Plan], expect: Callable[[Plan, Sequence[int]], Forecast]
) -> tuple[tuple[int, ...], Forecast] | None:
    """The processes of each of fewer stages that are expected to take the shortest time; None: those planned do.

    Args:
        plan: one stage for each process.
        divide: processes of each stage -> a plan for them, or a PartitionError.
        expect: what a plan with so many processes of each stage will take for a batch.
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
    """Ranks of the processes of each stage: a stage has those of the neighbouring stages that it takes the place of."""
    return tuple(tuple(range(sum(counts[k + 1 :]), sum(counts[k:]))) for k in range(len(counts)))


def expected(plan: Plan, counts: Sequence[int], schedule: Schedule, link: Link, trained: Mapping[str, int]) -> Forecast:
    """What a simulation expects of stages whose processes take micro-batches in turns, and sum their gradients.

    Args:
        plan: of the stages, with times divided by the processes of each.
        counts: processes of each stage.
        schedule: that tells the order, and the number of micro-batches.
        link: between every two processes.
        trained: full name of each parameter that is trained -> its bytes.
    """
    # what a message waits for beside its bytes is as many bytes more
    speed, more = (1 / link.per_byte, link.latency / link.per_byte) if link.per_byte else (float("inf"), 0.0)
    sends = [(stage.sends, [value for value in stage.sends if value.requires_grad]) for stage in plan.stages[:-1]]
    frozen, size = num_frozen(plan.graph, plan.cuts, plan.graph.trained), sum(counts)
    costs = SppCosts(
        tuple(stage.forward * count for stage, count in zip(plan.stages, counts, strict=True)),
        tuple(
            stage.backward * count * (stage.index >= frozen) for stage, count in zip(plan.stages, counts, strict=True)
        ),
        tuple(more + sum(value.nbytes for value in values) for values, _ in sends),
        tuple(more + sum(value.nbytes for value in values) if values else 0.0 for _, values in sends),
        tuple(float(sum(trained.get(name, 0) for name in stage.parameters)) for stage in plan.stages),
    )
    problem = Problem(costs, Network.of([[speed] * size] * size), schedule.num_microbatches, None)
    stages = [Stage(k, k + 1, sum(counts[:k]), sum(counts[: k + 1])) for k in range(len(counts))]
    name, orders = schedule.name, _ADVANCES if schedule.name == "advance_forward" else (0,)
    built = [build(name, len(counts), schedule.num_microbatches, advance) for advance in orders]
    ordered = [forward_only(with_replicas(one, counts), frozen) for one in built]
    seconds = min(seconds_in_turns(problem, stages, one) for one in ordered)
    busy = schedule.num_microbatches * float(costs.busy_s[-1])
    return Forecast(name, schedule.num_microbatches, seconds, max(0.0, 1 - busy / (size * seconds)) if seconds else 0.0)


def expected_of_groups(
    plan: Plan, counts: Sequence[int], groups: int, schedule: Schedule, link: Link, trained: Mapping[str, int]
) -> Forecast:
    """What a simulation expects of groups that have a process for each stage, and average their models: for a batch.

    Args:
        plan: of the stages.
        counts: how many groups each of those that there are is divided into, in the place of each stage.
        groups: that there are.
        schedule: see :func:`expected`, as all that follows.
    """
    forecast, many = expected(plan, (1,) * len(counts), schedule, link, trained), groups * counts[0]
    most = max(sum(trained.get(name, 0) for name in stage.parameters) for stage in plan.stages)
    averaging_s = 2 * (many - 1) / many * (link.latency + link.per_byte * most)  # a ring of the groups
    return replace(forecast, iteration_s=(forecast.iteration_s + averaging_s) / counts[0])

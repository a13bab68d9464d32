"""Halving: if layers are frozen, fewer stages with several processes each may be faster than one stage per process.

::

    4 stages            0 | 1 | 2 | 3          more hops, and the trained layers may not divide into four
    2, of two each      0 0 | 1 1              the processes of a stage take its micro-batches in turns, and sum
    1, of four          0 0 0 0                their gradients at the end
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Forecast, Plan
from lightning_avgpipe.planning.balance import cut_like, scattered
from lightning_avgpipe.planning.costs import all_reduce_s
from lightning_avgpipe.planning.planner import Conditions, Planner, PlanSource, Proposal
from lightning_avgpipe.planning.trained import num_frozen
from lightning_avgpipe.schedule import Schedule, forward_only, with_replicas
from lightning_avgpipe.schedule.turns import ReplicatedStageCosts, candidates
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.training.replicas import check_shared
from lightning_avgpipe.utils.patching import noop

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Halving(PlanSource):
    """Plans with fewer stages than processes, several of which share a stage, if that is not slower.

    Attributes:
        num_processes: number of processes; plans for another number of stages stay as they are.
        memory_limit: bytes that each stage may use.
        check: function that raises a PartitionError if replicas cannot share the stages of a plan in turns.
    """

    num_processes: int
    memory_limit: float
    check: Callable[[Plan, Sequence[int]], None] = noop

    def propose(self, planner: Planner, plan: Plan, costs: Costs, conditions: Conditions) -> Proposal | None:
        """Return the plan whose iteration is expected to be the shortest; None if it has one stage for each process."""
        schedule, size = conditions.schedule, planner.num_stages
        if planner.split_points is not None or size != self.num_processes:
            return None
        nbytes = planner.subject.nbytes
        trained = {name: nbytes[name] for name, p in planner.subject.module.named_parameters() if p.requires_grad}
        link = max(plan.links, key=lambda link: (link.per_byte, link.latency), default=Link())
        best, shortest = None, expected(plan, (1,) * size, schedule, link, trained)
        _log.info("%d stages: %.3g expected", size, shortest.iteration_s)
        for count in (count for count in range(size - 1, 0, -1) if size % count == 0):
            counts = (size // count,) * count
            fewer, memory = replace(planner, memory_limit=self.memory_limit).for_replicated_stages(counts, conditions)
            try:
                made = fewer.balanced(plan.graph, replace(costs, links=(link,)), memory)
                self._accept(made, counts)
            except PartitionError as error:
                _log.info("%d stages: %s", count, error)
                continue
            forecast = expected(made, counts, schedule, link, trained)
            _log.info("%d stages with %d processes each: %.3g expected", count, counts[0], forecast.iteration_s)
            if forecast.iteration_s <= shortest.iteration_s:
                made = replace(made, devices=processes_of(counts), forecast=forecast)
                best, shortest = Proposal(fewer, made, costs, memory), forecast
        return best

    def _accept(self, plan: Plan, counts: Sequence[int]) -> None:
        """Check that ``counts[k]`` processes can share each stage k of a plan; raise PartitionError otherwise."""
        self.check(plan, counts)
        states = [name for stage in plan.stages for name in stage.states]
        if states:
            raise PartitionError(f"the step changes '{states[0]}', but each replica would see only its own samples")


def check_sharing(run: PipelineRun, plan: Plan, counts: Sequence[int]) -> None:
    """Check that ``counts[k]`` processes can share each stage k of a plan, in any step of a run.

    Raises:
        PartitionError: they cannot.
    """
    if counts[-1] > 1 and run.models.step_log.batch_values.trained:
        raise PartitionError(
            "training updates metric objects, of which replicas of the last stage would each see a part of the data"
        )
    shared, pipeline = run.cluster.stage_map.placed(processes_of(counts)), run.deployment.pipeline
    check_shared(plan.graph, plan.cuts, shared)
    for graph in (pipeline.graph(step) for step in pipeline.steps if step != plan.graph.step):
        wide = scattered(graph, plan.stages_of)
        if wide and all(map(run.deployment.planner.subject.opens, wide)):
            # these units are opened when the step runs next; until then it counts as being on one stage
            cuts: Sequence[int] = (len(graph.nodes),) * (plan.num_stages - 1)
        else:
            cuts = cut_like(graph, plan.stages_of, plan.num_stages)
        check_shared(graph, cuts, shared)


def processes_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the processes of each stage, given how many there are; the last stage has rank 0."""
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
    speed = 1 / link.per_byte if link.per_byte else float("inf")
    frozen, size = num_frozen(plan.graph, plan.cuts, plan.graph.trained), sum(counts)
    backwards = [stage.backward * (stage.index >= frozen) for stage in plan.stages]
    stages = ReplicatedStageCosts(
        counts,
        [stage.forward * count for stage, count in zip(plan.stages, counts, strict=True)],
        [backward * count for backward, count in zip(backwards, counts, strict=True)],
        [stage.wire_bytes for stage in plan.stages[:-1]],
        [stage.gradient_bytes for stage in plan.stages[:-1]],
        [[speed] * size] * size,
        latency_s=link.latency,
    )
    held = [sum(trained.get(name, 0) for name in stage.parameters) for stage in plan.stages]
    reduce_s = [all_reduce_s(nbytes, count, speed) for count, nbytes in zip(counts, held, strict=True)]
    built = candidates(schedule.name, len(counts), schedule.num_microbatches)
    ordered = [forward_only(with_replicas(one, counts), frozen) for one in built]
    seconds = min(max(map(float.__add__, stages.ends_s(one), reduce_s)) for one in ordered)
    busy = schedule.num_microbatches * (sum(stages.forward_s) + sum(stages.backward_s))
    idle = max(0.0, 1 - busy / (size * seconds)) if seconds else 0.0
    return Forecast(schedule.name, schedule.num_microbatches, seconds, idle)

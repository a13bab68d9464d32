"""Run the stages of a pipeline that this process hosts, wired to their neighbours, for every step function."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_avgpipe.capture.batch_use import leaf_names
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.memory_channel import MemoryChannel
from lightning_avgpipe.engine.compiling import Execution
from lightning_avgpipe.engine.executor import IterationContext, Lane, execute
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs, Keeping
from lightning_avgpipe.engine.inspection import ForeignTensors
from lightning_avgpipe.engine.loaded_step import LoadedStep
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.engine.own_module import OwnAttributes
from lightning_avgpipe.engine.own_stream import OwnStream
from lightning_avgpipe.engine.stage import Stage, check_runnable
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.planning.program import StageProgram, stage_programs
from lightning_avgpipe.schedule import Schedule, in_turn, num_forward_only
from lightning_avgpipe.schedule.rules import check_hosted, trains, turns_of
from lightning_avgpipe.weights.double import Double, check_repeatable
from lightning_avgpipe.weights.store import WeightStore
from lightning_avgpipe.weights.tied import TiedParameters, copied_parameters, parameters_of


@dataclass(frozen=True)
class Outcome:
    """The results of one iteration of a pipeline in this process.

    Attributes:
        results: on a process of the last stage the step's result for each micro-batch, None for those of other
            replicas; None on other processes.
        skipped: micro-batches that were to train and have no loss, the same on every process that has them.
        count: number of micro-batches of this process.
    """

    results: list[Any] | None
    skipped: frozenset[int]
    count: int


class Pipeline:
    """One pipeline, with the stages of it that this process runs.

    Args:
        cluster: cluster of the processes; its channels are open.
        module: the whole module.
        execution: options of recomputation and compilation.
        number: number n, 0-based.
        place: put this pipeline's model into the module; None: it is there all the time.
        foreign_tensors: tensors of other pipelines' models, which this one must not use; None: it may use all tensors.
        weights: step function -> store of the versions of the weights that its actions use; other steps use one
            version.

    Attributes:
        cluster: as given.
        number: as given.
        steps: step functions that can be run, by name.
        place: as given; it may change between iterations.
        cache_limit: bytes on the host for kept outputs of frozen layers; None: none are kept.
        stream: stream on which it trains; None: the current one.
    """

    def __init__(
        self,
        cluster: Cluster,
        module: nn.Module,
        execution: Execution = Execution(),  # noqa: B008
        number: int = 0,
        place: Callable[[], None] | None = None,
        foreign_tensors: ForeignTensors | None = None,
        weights: Mapping[str, WeightStore] | None = None,
    ) -> None:
        self.number = number
        self._weights = weights or {}
        self._foreign_tensors = foreign_tensors
        self.cluster = cluster
        self._module = module
        self.place = place
        self._execution = execution
        self.steps: dict[str, LoadedStep] = {}
        self.cache_limit: float | None = None
        self.stream: OwnStream | None = None

    def graph(self, step: str) -> CallGraph:
        """Return the call graph of a step function."""
        return self.steps[step].graph

    def load(
        self,
        graph: CallGraph,
        cuts: Sequence[int],
        frozen: int = 0,
        relays: Collection[int] = (),
        wires: Sequence[Format | None] = (),
    ) -> None:
        """Make a step function runnable.

        Args:
            graph: call graph of the step.
            cuts: positions of the K-1 cuts.
            frozen: number of nodes, from the first, whose outputs are kept.
            relays: stages whose input may be forwarded, so that their forwards run on the next stage as well.
            wires: format of values and gradients on each link between stages; empty: as they are.
        Raises:
            ConfigurationError: such forwards change state that must not be changed twice.
        """
        self._execution.recompute.check(graph)
        if self.place is not None:
            self.place()
        programs = stage_programs(graph, cuts)
        for k in relays:
            check_repeatable(programs[k])
        doubles = {k: Double(programs[k], self._module) for k in relays}
        copies = TiedParameters(self._module, self.cluster, copied_parameters(programs))
        versions = self._weights.get(graph.step) if len(programs) > 1 else None
        if versions is not None:
            versions.divide({k: parameters_of(program) for k, program in enumerate(programs)}, self.cluster.stages)
        freezing = Freezing(graph, cuts, self._module)
        keeping = None
        if self.cache_limit is not None and frozen:
            outputs = FrozenOutputs(self.cache_limit, frozen)
            keeping = Keeping(outputs, self.cluster, graph, freezing, bisect.bisect_right(cuts, frozen))
        of_units = OwnAttributes(self._module, graph.of_units, self.number == 0)
        ahead = {
            k + 1: Stage(programs[k], self._module, self.cluster.device, double, shown=False, of_units=of_units)
            for k, double in doubles.items()
            if k + 1 in self.cluster.stages
        }
        stages = [
            Stage(
                programs[k], self._module, self.cluster.device, versions or copies, self._execution,
                self._foreign_tensors, self.number == 0 and k == self.cluster.stages[-1], of_units,
                None if keeping is None or k != keeping.stage else keeping.outputs, ahead.get(k), k in relays,
            )
            for k in self.cluster.stages
        ]  # fmt: skip
        leaves = self._leaves(programs, relays, keeping)
        self.steps[graph.step] = LoadedStep(
            graph, cuts, stages, copies, leaves, freezing, keeping, doubles, of_units, wires
        )

    def _leaves(
        self, programs: Sequence[StageProgram], relays: Collection[int], keeping: Keeping | None
    ) -> dict[int, frozenset[str]]:
        """Return rank -> names of the tensors of a batch that the process needs."""
        stage_map = self.cluster.stage_map
        leaves = {
            rank: frozenset().union(*(programs[k].leaves for k in stage_map.stages(rank)))
            for rank in range(self.cluster.group.world_size)
        }
        for k in relays:
            leaves[stage_map.owner(k + 1)] |= programs[k].leaves
        if keeping is not None:
            leaves[keeping.owner] |= keeping.leaves
        return leaves

    def load_like(self, other: Pipeline, step: str) -> None:
        """Make a step function runnable as it is in another pipeline."""
        loaded = other.steps[step]
        self.load(loaded.graph, loaded.cuts, relays=[*loaded.doubles], wires=loaded.wires)

    def unload(self) -> None:
        """Forget all step functions."""
        self.steps.clear()

    def leaves(self, step: str, rank: int, batch: Any) -> frozenset[str] | None:
        """Return the names of the batch's tensors that a process needs for a step; None if unknown: it needs all."""
        loaded = self.steps.get(step)
        if loaded is None or leaf_names(batch) != tuple(leaf.name for leaf in loaded.graph.leaves):
            return None
        return loaded.leaves.get(rank)

    def need_all(self, step: str) -> None:
        """Forget which tensors of a batch a step needs, so that every process gets all of them."""
        if step in self.steps:
            self.steps[step] = replace(self.steps[step], leaves={})

    def read_elsewhere(self) -> frozenset[tuple[str, str]]:
        """Return ``(path, name)`` of the attributes that step functions read on other processes than the last."""
        steps = [loaded for loaded in self.steps.values() if loaded.cuts]
        return frozenset(key for of in steps for key, position in of.graph.reads if position <= of.cuts[-1])

    def lanes(self, step: str, schedule: Schedule, task: Task, observers: Sequence[Observer] = ()) -> list[Lane]:
        """Return the lanes of this process, ready to begin an iteration.

        Raises:
            ScheduleError: the schedule forwards values past stages for which the step was not loaded so.
        """
        loaded, lanes = self.steps[step], []
        doubles = loaded.doubles
        if strange := schedule.relays - doubles.keys():
            raise ScheduleError(
                f"the schedule {schedule.name!r} has values pass the stages {', '.join(map(str, sorted(strange)))} for "
                f"{schedule.num_microbatches} micro-batches, and not with as many as training began with; let it do so "
                "with any number"
            )
        turns = turns_of(schedule)
        loaded.of_units.begin()
        frozen, training = num_forward_only(schedule), trains(schedule.rows[-1])
        stream = self.stream if training else None
        if stream is not None:
            stream.begin()
        for stage in loaded.stages:
            number, rank = stage.program.stage, self.cluster.rank
            if rank not in self.cluster.stage_map.ranks(number, training):
                continue
            ends = self.cluster.channels.transport.ends(self.number, number, training)
            if number <= frozen:  # the stage before the first trained one needs no gradients
                ends = replace(ends, to_previous=None)
            lane = Lane(stage, ends, task, self.place)
            row = in_turn(schedule.rows[number], *self.cluster.stage_map.share(number, rank, training))
            row = tuple(a for a in row if number >= frozen or a.micro_batch not in task.known)
            lane.begins = task.known if number == frozen else frozenset()
            lane.relays, lane.segments = number in schedule.relays, schedule.segments
            lane.wires = self._wire(loaded, number), self._wire(loaded, number - 1)
            if lane.relays:
                if self.place is not None:
                    self.place()
                assert ends.to_next is not None
                ends.to_next.put(doubles[number].sent())  # before the values, which are forwarded at once
            lane.takes = doubles[number - 1].take if number - 1 in schedule.relays else None
            lane.begin(row, observers, turns.get(number))
            lanes.append(lane)
            stage.begin(row, frozen, stream)
        return lanes

    def _wire(self, loaded: LoadedStep, hop: int) -> Format | None:
        """In which format values and gradients travel on a hop; within a process nothing does."""
        if not 0 <= hop < len(loaded.wires):
            return None
        owner = self.cluster.stage_map.owner
        return loaded.wires[hop] if owner(hop) != owner(hop + 1) else None

    def end(self) -> None:
        """Make the current stream wait for the pipeline's, after an iteration that has ended, also by an error."""
        if self.stream is not None:
            self.stream.end()

    def outcome(self, step: str, schedule: Schedule) -> Outcome:
        """Return the results of the iteration that has ended."""
        last, stage_map, rank = self.steps[step].stages[-1], self.cluster.stage_map, self.cluster.rank
        number, training = last.program.stage, trains(schedule.rows[-1])
        if rank not in stage_map.ranks(number, training):
            return Outcome(None, frozenset(), 0)
        first, every = stage_map.share(number, rank, training)
        numbers = range(first, schedule.num_microbatches, every)
        found = {i: last.results[i] for i in numbers} if last.program.is_last else None
        results = None if found is None else [found.get(i) for i in range(schedule.num_microbatches)]
        return Outcome(results, frozenset(last.skipped), len(numbers))


def run_together(
    pipelines: Sequence[Pipeline],
    step: str,
    schedules: Sequence[Schedule],
    tasks: Sequence[Task],
    observers: Iterable[Observer] = (),
) -> list[Outcome]:
    """Run one iteration of several pipelines of a cluster, interleaved as their inputs arrive.

    Args:
        pipelines: pipelines that have loaded the step.
        step: name of the step function.
        schedules: one schedule for each pipeline.
        tasks: one task for each pipeline, with the pipeline's number in its key.
        observers: observers of the iteration, each within those before it.
    Returns:
        One for each pipeline.
    Raises:
        ScheduleError: a schedule has actions that stages cannot run.
    """
    cluster = pipelines[0].cluster
    for schedule in schedules:
        check_runnable(schedule)
        check_hosted(schedule, [*map(cluster.stage_map.owner, range(cluster.stage_map.num_stages))])
    context = IterationContext(cluster.channels.waits, cluster.world.rank, tuple(observers))
    lanes = [
        lane
        for pipeline, schedule, task in zip(pipelines, schedules, tasks, strict=True)
        for lane in pipeline.lanes(step, schedule, task, context.observers)
    ]
    try:
        try:
            with intercepting():
                execute(lanes, context)
        finally:
            for pipeline in pipelines:
                pipeline.end()
        for observer in context.observers:
            observer.agree(cluster.world)
        return [pipeline.outcome(step, schedule) for pipeline, schedule in zip(pipelines, schedules, strict=True)]
    finally:
        clear(lanes)
        for pipeline in pipelines:
            pipeline.steps[step].own[-1].end()
        added = [obj for pipeline in pipelines[1:] for own in pipeline.steps[step].own[-2:] for obj in own.added()]
        for own in (own for pipeline in pipelines for own in pipeline.steps[step].own):
            own.accept(added)


def clear(lanes: Sequence[Lane]) -> None:
    """Drop all that is left of an iteration that has ended, also by an error."""
    for lane in lanes:
        lane.stage.clear()
        for end in (lane.ends.values, lane.ends.gradients):
            if isinstance(end, MemoryChannel):
                end.clear()

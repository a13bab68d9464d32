"""Run the stages of pipelines that this process hosts, connected to their neighbours, for every step function."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_avgpipe.capture.batch_use import leaf_names
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.channel import MemoryChannel
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.execution import Execution, OwnStream
from lightning_avgpipe.engine.executor import Lane, execute
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.engine.own_module import OwnAttributes, VersionedWeights
from lightning_avgpipe.engine.prefix import Shortcut, ShortcutMaker
from lightning_avgpipe.engine.stage import Stage, check_runnable
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.engine.tensor_use import ForeignTensors
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.planning.program import StageProgram, stage_programs
from lightning_avgpipe.planning.trained import TrainedParameters
from lightning_avgpipe.schedule import Schedule, in_turn, num_forward_only
from lightning_avgpipe.schedule.rules import check_hosted, trains, turns_of
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.weights.tied import TiedParameters, parameters_of, users_of_parameters

_MOST_AHEAD = 1  # most iterations that the host has queued and the device has not ended


class StepPart:
    """A part that a system adds to a step function which a pipeline has loaded; this one does nothing.

    Attributes:
        leaves: rank -> names of the tensors of a batch that the process needs in addition.
        own: attributes of further stages that run here.
    """

    leaves: Mapping[int, frozenset[str]] = {}
    own: Sequence[OwnAttributes] = ()

    def begin(self, lane: Lane, schedule: Schedule) -> None:
        """Begin an iteration on a lane, before it expects messages."""


# Functions that make the parts of a step from the step, the whole module and the cluster; registered by packages in
# ``systems``. Each may raise a ConfigurationError.
PARTS: list[Callable[[LoadedStep, nn.Module, Cluster], StepPart]] = []


@dataclass(frozen=True)
class LoadedStep:
    """A step function that can be run by this process.

    Attributes:
        graph: call graph of the step.
        cuts: positions of the K-1 cuts.
        programs: programs of all stages.
        stages: stages of this process.
        copies: parameters that several stages use.
        leaves: rank -> names of the tensors of a batch that the process needs; empty if unknown.
        trained: the trained parameters, which determine what stages have nothing to train.
        shortcut: kept outputs of the first nodes; None: none are kept.
        of_units: values of the attributes that units of any stage change.
        relays: stages whose input may be relayed, so that their forwards run on the next stage as well.
        wire_formats: format in which values and gradients are sent on each hop, shape ``(K-1,)``; empty: unchanged.
        parts: what systems add to the step.
    """

    graph: CallGraph
    cuts: Sequence[int]
    programs: Sequence[StageProgram]
    stages: Sequence[Stage]
    copies: TiedParameters
    leaves: Mapping[int, frozenset[str]]
    trained: TrainedParameters
    shortcut: Shortcut | None
    of_units: OwnAttributes
    relays: frozenset[int]
    wire_formats: Sequence[Format | None] = ()
    parts: Sequence[StepPart] = ()

    @property
    def own(self) -> list[OwnAttributes]:
        """The attribute values of further stages, then of the stages of this process, then those that units change."""
        further = (own for part in self.parts for own in part.own)
        return [*further, *(stage.module.attributes for stage in self.stages), self.of_units]


@dataclass(frozen=True)
class Outcome:
    """The results of one iteration of a pipeline in this process.

    Attributes:
        results: on a process of the last stage, the step's result for each micro-batch, with None for those of other
            replicas; None on other processes.
        skipped: micro-batches that should have trained and have no loss; every process that runs them has the same.
        count: number of micro-batches that this process has run.
    """

    results: list[Any] | None
    skipped: frozenset[int]
    count: int


class Pipeline:
    """One pipeline, with the stages of it that this process runs.

    Args:
        cluster: cluster of the processes; its channels are open.
        module: the whole module.
        execution: options for the execution of units.
        number: number n of the pipeline, 0-based.
        place: puts this pipeline's model into the module; None: it is always there.
        foreign_tensors: tensors of other pipelines' models, which this one must not use; None: it may use all tensors.
        weights: name of a step function -> store of the versions of the weights that its actions use; other steps use
            one version.

    Attributes:
        cluster: as given.
        number: as given.
        steps: step functions that can be run, by name.
        place: as given; it may change between iterations.
        shortcut: makes the shortcut of a step if outputs of its first nodes are kept; None: none are kept.
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
        weights: Mapping[str, VersionedWeights] | None = None,
    ) -> None:
        self.number = number
        self._weights = weights or {}
        self._foreign_tensors = foreign_tensors
        self.cluster = cluster
        self._module = module
        self.place = place
        self._execution = execution
        self.steps: dict[str, LoadedStep] = {}
        self.shortcut: ShortcutMaker | None = None
        self.stream: OwnStream | None = None
        self._ends: deque[Any] = deque()  # events at the ends of the last iterations

    def graph(self, step: str) -> CallGraph:
        """Return the call graph of a step function."""
        return self.steps[step].graph

    def load(
        self,
        graph: CallGraph,
        cuts: Sequence[int],
        num_kept_nodes: int = 0,
        relays: Collection[int] = (),
        wire_formats: Sequence[Format | None] = (),
    ) -> None:
        """Make a step function runnable.

        Args:
            graph: call graph of the step.
            cuts: positions of the K-1 cuts.
            num_kept_nodes: number of nodes, from the first, whose outputs are kept.
            relays: stages whose input may be relayed, so that their forwards run on the next stage as well.
            wire_formats: format in which values and gradients are sent on each hop; empty: unchanged.
        Raises:
            ConfigurationError: a system cannot run the step.
        """
        self._execution.recompute.check(graph)
        if self.place is not None:
            self.place()
        programs = stage_programs(graph, cuts)
        copies = TiedParameters(self._module, self.cluster, users_of_parameters(programs))
        versions = self._weights.get(graph.step) if len(programs) > 1 else None
        if versions is not None:
            versions.divide({k: parameters_of(program) for k, program in enumerate(programs)}, self.cluster.stages)
        trained = TrainedParameters(graph, cuts, self._module)
        shortcut = None
        if self.shortcut is not None and num_kept_nodes:
            shortcut = self.shortcut(
                num_kept_nodes, self.cluster, graph, trained, bisect.bisect_right(cuts, num_kept_nodes)
            )
        of_units = OwnAttributes(self._module, graph.changed_by_units, self.number == 0)
        stages = [
            Stage(
                programs[k],
                self._module,
                self.cluster.device,
                versions or copies,
                self._execution,
                self._foreign_tensors,
                is_visible=self.number == 0 and k == self.cluster.stages[-1],
                of_units=of_units,
                shortcut=None if shortcut is None or k != shortcut.stage else shortcut,
                relayed=k in relays,
                repeats=k != self.cluster.stages[0],
            )
            for k in self.cluster.stages
        ]
        leaves = self._leaves(programs, shortcut)
        loaded = LoadedStep(
            graph, cuts, programs, stages, copies, leaves, trained, shortcut, of_units, frozenset(relays), wire_formats
        )
        parts = [make(loaded, self._module, self.cluster) for make in PARTS]
        for part in parts:
            leaves |= {rank: leaves[rank] | names for rank, names in part.leaves.items()}
        self.steps[graph.step] = replace(loaded, parts=parts)

    def _leaves(self, programs: Sequence[StageProgram], shortcut: Shortcut | None) -> dict[int, frozenset[str]]:
        """Return for each rank the names of the tensors of a batch that the process needs."""
        stage_map = self.cluster.stage_map
        leaves = {
            rank: frozenset().union(*(programs[k].leaves for k in stage_map.stages(rank)))
            for rank in range(self.cluster.group.world_size)
        }
        if shortcut is not None:
            leaves[stage_map.owner(shortcut.stage)] |= shortcut.leaves
        return leaves

    def load_like(self, other: Pipeline, step: str) -> None:
        """Make a step function runnable as it is in another pipeline."""
        loaded = other.steps[step]
        self.load(loaded.graph, loaded.cuts, relays=loaded.relays, wire_formats=loaded.wire_formats)

    def leaves(self, step: str, rank: int, batch: Any) -> frozenset[str] | None:
        """Return the names of the batch's tensors that a process needs for a step; None if unknown: it gets all."""
        loaded = self.steps.get(step)
        if loaded is None or leaf_names(batch) != tuple(leaf.name for leaf in loaded.graph.leaves):
            return None
        return loaded.leaves.get(rank)

    def need_all(self, step: str) -> None:
        """Forget which tensors of a batch a step needs, so that every process gets all of them."""
        if step in self.steps:
            self.steps[step] = replace(self.steps[step], leaves={})

    def read_elsewhere(self) -> frozenset[tuple[str, str]]:
        """Return ``(path, name)`` of the attributes that step functions read on stages before the last one."""
        steps = [loaded for loaded in self.steps.values() if loaded.cuts]
        reads = ((loaded.cuts[-1], *read) for loaded in steps for read in loaded.graph.reads.items())
        return frozenset(key for last, key, position in reads if position <= last)

    def lanes(self, step: str, schedule: Schedule, task: Task, observers: Sequence[Observer] = ()) -> list[Lane]:
        """Return the lanes of this process, ready to begin an iteration.

        Raises:
            ScheduleError: the schedule relays values past stages that were not loaded for this.
        """
        loaded, lanes = self.steps[step], []
        if strange := schedule.relays - loaded.relays:
            raise ScheduleError(
                f"the schedule {schedule.name!r} relays values past the stages {', '.join(map(str, sorted(strange)))} "
                f"for {schedule.num_microbatches} micro-batches, and did not for the number with which training began; "
                "let it relay past the same stages for any number"
            )
        turns = turns_of(schedule)
        self._wait_for_device()
        loaded.of_units.begin()
        frozen, training = num_forward_only(schedule), trains(schedule.rows[-1])
        stream = self.stream if training else None
        if stream is not None:
            stream.begin()
        for stage in loaded.stages:
            number, rank = stage.program.stage, self.cluster.rank
            if rank not in self.cluster.stage_map.ranks(number, training):
                continue
            ends = self.cluster.transport.ends(self.number, number, training)
            if number <= frozen:  # the stage before the first trained one needs no gradients
                ends = replace(ends, to_previous=None)
            lane = Lane(stage, ends, task, self.place)
            row = in_turn(schedule.rows[number], *self.cluster.stage_map.share(number, rank, training))
            row = tuple(a for a in row if number >= frozen or a.micro_batch not in task.starts_from_kept)
            lane.starts_from_kept = task.starts_from_kept if number == frozen else frozenset()
            lane.relays, lane.segments = number in schedule.relays, schedule.segments
            lane.wire_formats = self._wire(loaded, number), self._wire(loaded, number - 1)
            for part in loaded.parts:
                part.begin(lane, schedule)
            lane.begin(row, observers, turns.get(number))
            lanes.append(lane)
            stage.begin(row, frozen, stream)
        return lanes

    def _wire(self, loaded: LoadedStep, hop: int) -> Format | None:
        """Return the format in which values and gradients are sent on a hop; None: unchanged, as within a process."""
        if not 0 <= hop < len(loaded.wire_formats):
            return None
        owner = self.cluster.stage_map.owner
        return loaded.wire_formats[hop] if owner(hop) != owner(hop + 1) else None

    def end(self) -> None:
        """Make the current stream wait for the pipeline's stream after an iteration, also if it ended by an error."""
        if self.stream is not None:
            self.stream.end()
        if self.stream is not None or self.cluster.group.world_size > 1:
            self._ends.append(port_of(self.cluster.device).event())

    def _wait_for_device(self) -> None:
        """Wait until the host is at most ``_MOST_AHEAD`` iterations ahead of the device.

        Tensors that streams pass to each other, such as messages, are freed when the device has used them. So the
        memory that they occupy grows with the work that the host has queued.
        """
        while len(self._ends) > _MOST_AHEAD:
            if (end := self._ends.popleft()) is not None:  # None on a device without streams
                end.synchronize()

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


class Engine:
    """A runner of the pipelines of a cluster in one loop, interleaved as their inputs arrive.

    Args:
        cluster: cluster of the pipelines.
        step: name of the step function, which the pipelines have loaded.
        observers: observers of the iterations, each within those before it.
        rolls: whether a pipeline begins its next iteration as soon as it has ended one here, so that the iterations of
            pipelines differ by at most one. This is not for steps that change attributes: pipelines would see each
            other's values.
    """

    def __init__(self, cluster: Cluster, step: str, observers: Iterable[Observer] = (), rolls: bool = False) -> None:
        self._cluster = cluster
        self._step = step
        self._observers = tuple(observers)
        self._rolls = rolls
        self._begun: dict[int, tuple[Pipeline, Schedule, list[Lane]]] = {}

    @property
    def runs(self) -> bool:
        """Whether pipelines are in an iteration."""
        return bool(self._begun)

    def begin(self, pipelines: Sequence[Pipeline], schedules: Sequence[Schedule], tasks: Sequence[Task]) -> None:
        """Begin an iteration of these pipelines, whose models are ready for it; nothing runs yet.

        Args:
            pipelines: pipelines that are not in an iteration.
            schedules: one schedule for each pipeline.
            tasks: one task for each pipeline, with the pipeline's number in its key.
        Raises:
            ScheduleError: a schedule has actions that stages cannot run, or relays values past stages while
                iterations roll.
        """
        stage_map = self._cluster.stage_map
        for schedule in schedules:
            check_runnable(schedule)
            check_hosted(schedule, [*map(stage_map.owner, range(stage_map.num_stages))])
            if self._rolls and schedule.relays:
                raise ScheduleError(
                    f"the schedule {schedule.name!r} relays values past stages, whose weights are passed on before "
                    "each iteration, so iterations cannot roll; use Averaging(rolling=False), or another schedule"
                )
        for pipeline, schedule, task in zip(pipelines, schedules, tasks, strict=True):
            assert pipeline.number not in self._begun
            lanes = pipeline.lanes(self._step, schedule, task, self._observers)
            self._begun[pipeline.number] = pipeline, schedule, lanes

    def finish(self, numbers: Sequence[int]) -> list[Outcome]:
        """Run actions of all pipelines until the iterations of these have ended here; return their outcomes."""
        ending = [self._begun[n] for n in numbers]
        own = [lane for _, _, lanes in ending for lane in lanes]
        self.run_until(lambda: not any(lane.actions for lane in own))
        for pipeline, _, _ in ending:
            pipeline.end()
        for observer in self._observers:
            observer.agree(self._cluster.world)
        outcomes = [
            pipeline.outcome(self._step, schedule) for pipeline, schedule, _ in map(self._begun.__getitem__, numbers)
        ]
        self._forget(numbers, channels=not self._rolls)  # channels may hold messages of the next iteration
        return outcomes

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run actions of all iterations that have begun, until ``over()`` is true or no action is left.

        Args:
            over: called between two actions, and when anything arrives.
        """
        lanes = [lane for _, _, lanes in self._begun.values() for lane in lanes]
        with intercepting():
            execute(lanes, self._cluster, self._observers, self._rolls, over)

    def clear(self) -> None:
        """Drop all iterations that have begun in this process, also after an error."""
        for pipeline, _, _ in self._begun.values():
            pipeline.end()
        self._forget([*self._begun])

    def _forget(self, numbers: Sequence[int], channels: bool = True) -> None:
        for n in numbers:
            pipeline, _, lanes = self._begun.pop(n)
            clear(lanes, channels)
            pipeline.steps[self._step].of_units.end()


def run_together(
    pipelines: Sequence[Pipeline],
    step: str,
    schedules: Sequence[Schedule],
    tasks: Sequence[Task],
    observers: Iterable[Observer] = (),
) -> list[Outcome]:
    """Run one iteration of several pipelines of a cluster to its end; the arguments are those of :class:`Engine`."""
    engine = Engine(pipelines[0].cluster, step, observers)
    engine.begin(pipelines, schedules, tasks)
    try:
        return engine.finish([pipeline.number for pipeline in pipelines])
    finally:
        engine.clear()
        others = [pipeline.steps[step] for pipeline in pipelines[1:]]
        states = [own for loaded in others for own in (loaded.stages[-1].module.attributes, loaded.of_units)]
        added = [obj for own in states for obj in own.merge_additions()]
        for own in (own for pipeline in pipelines for own in pipeline.steps[step].own):
            own.take_over(added)


def clear(lanes: Sequence[Lane], channels: bool = True) -> None:
    """Drop everything that is left of an iteration that has ended, also by an error.

    Args:
        lanes: lanes of the iteration.
        channels: whether channels within this process are emptied too.
    """
    for lane in lanes:
        lane.stage.clear()
        for end in (lane.ends.values, lane.ends.gradients) if channels else ():
            if isinstance(end, MemoryChannel):
                end.close()

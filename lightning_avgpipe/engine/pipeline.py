"""A pipeline in this process: the stages it hosts, wired to their neighbours, for every step function."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.batch_use import leaf_names
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.memory_channel import MemoryChannel
from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.engine.executor import IterationContext, Lane, execute
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs, digests
from lightning_avgpipe.engine.inspection import ForeignTensors
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.engine.stage import Stage, check_runnable
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.schedule import Schedule, in_turn, num_forward_only
from lightning_avgpipe.schedule.rules import check_hosted, trains, turns_of
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.weights.double import Double, check_repeatable
from lightning_avgpipe.weights.store import WeightStore
from lightning_avgpipe.weights.tied import TiedParameters, copied_parameters, parameters_of


@dataclass(frozen=True)
class Keeping:
    """Where outputs of frozen layers are kept.

    Attributes:
        stage: the first that trains.
        frozen: nodes, from the first.
        owners: ranks of the processes with the stage.
    """

    stage: int
    frozen: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What an iteration of a pipeline has given.

    Attributes:
        results: on a process of the last stage what the step returned for each micro-batch, None for those of other
            replicas; None elsewhere.
        skipped: micro-batches that were to train and have no loss, the same on every process that has them.
        count: micro-batches of this process.
    """

    results: list[Any] | None
    skipped: frozenset[int]
    count: int


class Pipeline:
    """The lanes of one pipeline that this process runs.

    Args:
        cluster: who hosts what; its channels are open.
        module: the whole module.
        recompute: what stages repeat.
        number: n, 0-based.
        place: puts this pipeline's model into the module; None: it is there all the time.
        foreign_tensors: tensors of other pipelines' models, which this one must not use; None: it may use everything.
        weights: step function -> versions of the weights that its actions use; of others there is one.

    Attributes:
        number: n.
        place: as given; it may change between iterations.
        kept: outputs of frozen layers; None: they are not kept.
    """

    def __init__(
        self,
        cluster: Cluster,
        module: nn.Module,
        recompute: Recompute = Recompute(),  # noqa: B008
        number: int = 0,
        place: Callable[[], None] | None = None,
        foreign_tensors: ForeignTensors | None = None,
        weights: Mapping[str, WeightStore] | None = None,
    ) -> None:
        self.number = number
        self._weights = weights or {}
        self._foreign_tensors = foreign_tensors
        self._cluster = cluster
        self._module = module
        self.place = place
        self._recompute = recompute
        self._stages: dict[str, list[Stage]] = {}
        self._of_units: dict[str, OwnAttributes] = {}
        self._graphs: dict[str, CallGraph] = {}
        self._cuts: dict[str, Sequence[int]] = {}
        self._copies: dict[str, TiedParameters] = {}
        self._leaves: dict[str, dict[int, frozenset[str]]] = {}
        self._freezing: dict[str, Freezing] = {}
        self.kept: FrozenOutputs | None = None
        self._keeping: dict[str, Keeping] = {}
        self._doubles: dict[str, dict[int, Double]] = {}  # of stages that values pass, on both ends of what goes on

    @property
    def steps(self) -> tuple[str, ...]:
        """Step functions that can be run."""
        return tuple(self._stages)

    def graph(self, step: str) -> CallGraph:
        """The call graph of a step function."""
        return self._graphs[step]

    def load(self, graph: CallGraph, cuts: Sequence[int], frozen: int = 0, relays: Collection[int] = ()) -> None:
        """Make a step function runnable.

        Args:
            graph: of the step.
            cuts: K-1 positions.
            frozen: nodes, from the first, whose outputs are kept.
            relays: stages that values may pass: their forwards run on the next stage as well.
        Raises:
            ConfigurationError: such forwards change what cannot be changed twice.
        """
        self._recompute.check(graph)
        if self.place is not None:
            self.place()
        programs = stage_programs(graph, cuts)
        for k in relays:
            check_repeatable(programs[k])
        doubles = self._doubles[graph.step] = {k: Double(programs[k], self._module) for k in relays}
        copies = TiedParameters(self._module, self._cluster, copied_parameters(programs))
        versions = self._weights.get(graph.step) if len(programs) > 1 else None
        if versions is not None:
            versions.divide({k: parameters_of(program) for k, program in enumerate(programs)}, self._cluster.stages)
        self._graphs[graph.step] = graph
        self._cuts[graph.step] = cuts
        self._freezing[graph.step] = Freezing(graph, cuts, self._module)
        self._leaves[graph.step] = {
            rank: frozenset().union(*(programs[k].leaves for k in self._cluster.stage_map.stages(rank)))
            for rank in range(self._cluster.group.world_size)
        }
        for k in relays:
            self._leaves[graph.step][self._cluster.stage_map.owner(k + 1)] |= programs[k].leaves
        keeper = bisect.bisect_right(cuts, frozen) if frozen and self.kept is not None else -1
        if keeper >= 0:
            owners = self._cluster.stage_map.ranks(keeper)
            for owner in owners:
                self._leaves[graph.step][owner] |= {leaf.name for leaf in graph.needed_leaves(0, frozen)}
            self._keeping[graph.step] = Keeping(keeper, frozen, owners)
            assert self.kept is not None
            prefix = [(n.kind, n.name, n.outputs, n.writes) for n in graph.nodes[:frozen]]
            states = [(name, p.requires_grad) for name, p in self._module.named_parameters()]
            described = (owners, prefix, graph.live(frozen), states)
            self.kept.follow(described if self._cluster.rank in owners else None, shares=len(owners) > 1)
        self._copies[graph.step] = copies
        of_units = self._of_units[graph.step] = OwnAttributes(self._module, graph.of_units, self.number == 0)
        ahead = {
            k + 1: Stage(programs[k], self._module, self._cluster.device, double, shown=False, of_units=of_units)
            for k, double in doubles.items()
            if k + 1 in self._cluster.stages
        }
        self._stages[graph.step] = [
            Stage(
                programs[k], self._module, self._cluster.device, versions or copies, self._recompute,
                self._foreign_tensors, self.number == 0 and k == self._cluster.stages[-1], of_units,
                *((self.kept, frozen) if k == keeper else (None, 0)), ahead.get(k), k in relays,
            )
            for k in self._cluster.stages
        ]  # fmt: skip

    def load_like(self, other: Pipeline, step: str) -> None:
        """Make a step function runnable that is runnable in another pipeline."""
        self.load(other._graphs[step], other._cuts[step], relays=[*other._doubles[step]])

    def unload(self) -> None:
        """Forget all step functions."""
        self._stages.clear()
        self._of_units.clear()
        self._graphs.clear()
        self._cuts.clear()
        self._copies.clear()
        self._leaves.clear()
        self._freezing.clear()
        self._keeping.clear()
        self._doubles.clear()

    def leaves(self, step: str, rank: int, batch: Any) -> frozenset[str] | None:
        """Names of the tensors of a batch that a process needs for a step; None if that is not known: all of them."""
        graph = self._graphs.get(step)
        if graph is None or step not in self._leaves or leaf_names(batch) != tuple(leaf.name for leaf in graph.leaves):
            return None
        return self._leaves[step][rank]

    def need_all(self, step: str) -> None:
        """From now on it is not known what a step needs of a batch, as before it was loaded."""
        self._leaves.pop(step, None)

    def read_elsewhere(self) -> frozenset[tuple[str, str]]:
        """Path of a module and name of the attributes that step functions read on other processes than the last."""
        return frozenset(
            key
            for step, graph in self._graphs.items()
            for key, position in graph.reads
            if self._cuts[step] and position <= self._cuts[step][-1]
        )

    def freezing(self, step: str) -> Freezing:
        """Which stages of a step function have nothing to train."""
        return self._freezing[step]

    def known(self, step: str, samples: Sequence[tuple[Any, int]], schedule: Schedule) -> frozenset[int]:
        """The micro-batches of an iteration for which outputs of frozen layers are kept. Every process calls it.

        Args:
            step: that will train.
            samples: data and number of samples, by micro-batch.
            schedule: of the iteration.
        """
        keeping, graph = self._keeping.get(step), self._graphs[step]
        if keeping is None or self.kept is None:
            return frozenset()
        names = {leaf.name for leaf in graph.needed_leaves(0, keeping.frozen)}
        # something may have been frozen or unfrozen since the plan was made
        applies = num_forward_only(schedule) == keeping.stage and self._freezing[step].trained == graph.trained
        found: frozenset[int] = frozenset()
        cluster, owners = self._cluster, keeping.owners
        if cluster.rank in owners:
            if not applies:  # and what is kept may not be true any more
                self.kept.forget()
            first, every = cluster.stage_map.share(keeping.stage, cluster.rank)
            mine = {i: samples[i] for i in range(first, len(samples), every)}
            there = applies and not schedule.turns and not _lacks(list(mine.values()), names)
            found = self.kept.look_up({i: digests(*sample, names) for i, sample in mine.items()} if there else {})
        if not applies:
            return found
        if len(owners) == 1:
            return cluster.group.broadcast(found, owners[0])
        found = frozenset().union(*cluster.group.exchange_objects(found))
        # replicas of stages before would not know whose turn it is
        return found if keeping.stage == 0 or len(found) == len(samples) else frozenset()

    def share_kept(self, step: str, known: Collection[int], schedule: Schedule) -> None:
        """After an iteration replicas tell each other what they keep now. Every process calls it.

        Args:
            step: that has trained.
            known: micro-batches for which outputs were kept before.
            schedule: of the iteration.
        """
        keeping, replicas = self._keeping.get(step), self._cluster.replicas
        if keeping is None or self.kept is None or replicas is None or len(known) == schedule.num_microbatches:
            return
        if self._cluster.rank in keeping.owners and len(keeping.owners) > 1:
            for number, news in enumerate(replicas.members.exchange_objects(self.kept.fresh())):
                if number != replicas.number:
                    self.kept.accept(news)

    def copies(self, step: str) -> TiedParameters:
        """The parameters that several stages use in a step function."""
        return self._copies[step]

    def run(self, step: str, schedule: Schedule, task: Task, observers: Iterable[Observer] = ()) -> list[Any] | None:
        """Run one iteration.

        Args:
            step: name of a loaded step function.
            schedule: rows for all K stages.
            task: the micro-batches, and what to do with them.
            observers: see the iteration.
        Returns:
            On the process of the last stage what the step returned for each micro-batch; None elsewhere.
        """
        return run_together([self], step, [schedule], [task], observers)[0].results

    def own(self, step: str) -> list[OwnAttributes]:
        """What each stage here, after those whose forwards run here as well, and then all units make of attributes."""
        stages = self._stages[step]
        doubles = (stage.double.attributes for stage in stages if stage.double is not None)
        return [*doubles, *(stage.attributes for stage in stages), self._of_units[step]]

    def lanes(self, step: str, schedule: Schedule, task: Task, observers: Sequence[Observer] = ()) -> list[Lane]:
        """Those of this process, ready to begin an iteration.

        Raises:
            ScheduleError: values pass stages that the step was not made runnable for.
        """
        lanes, doubles = [], self._doubles[step]
        if strange := schedule.relays - doubles.keys():
            raise ScheduleError(
                f"the schedule {schedule.name!r} has values pass the stages {', '.join(map(str, sorted(strange)))} for "
                f"{schedule.num_microbatches} micro-batches, and not with as many as training began with; let it do so "
                "with any number"
            )
        turns = turns_of(schedule)
        self._of_units[step].begin()
        frozen, training = num_forward_only(schedule), trains(schedule.rows[-1])
        for stage in self._stages[step]:
            number, rank = stage.program.stage, self._cluster.rank
            if rank not in self._cluster.stage_map.hosts(number, training):
                continue
            ends = self._cluster.transport.ends(self.number, number, training)
            # the first stage that trains has nobody to send gradients to
            to_previous = ends.to_previous if number > frozen else None
            lane = Lane(stage, ends.values, ends.to_next, ends.gradients, to_previous, task, self.place)
            row = in_turn(schedule.rows[number], *self._cluster.stage_map.share(number, rank, training))
            row = tuple(a for a in row if number >= frozen or a.micro_batch not in task.known)
            lane.begins = task.known if number == frozen else frozenset()
            lane.relays, lane.segments = number in schedule.relays, schedule.segments
            if lane.relays:
                if self.place is not None:
                    self.place()
                assert ends.to_next is not None
                ends.to_next.put(doubles[number].sent())  # before all values, which go on when they are expected
            lane.takes = doubles[number - 1].take if number - 1 in schedule.relays else None
            lane.begin(row, observers, turns.get(number))
            lanes.append(lane)
            stage.begin(row, frozen)
        return lanes

    def outcome(self, step: str, schedule: Schedule) -> Outcome:
        """What the iteration that has ended gave."""
        last, stage_map, rank = self._stages[step][-1], self._cluster.stage_map, self._cluster.rank
        number, training = last.program.stage, trains(schedule.rows[-1])
        if rank not in stage_map.hosts(number, training):
            return Outcome(None, frozenset(), 0)
        first, every = stage_map.share(number, rank, training)
        numbers = range(first, schedule.num_microbatches, every)
        found = {i: last.results[i] for i in numbers} if last.program.is_last else None
        results = None if found is None else [found.get(i) for i in range(schedule.num_microbatches)]
        return Outcome(results, frozenset(last.skipped), len(numbers))


class RollingPipelines:
    """Pipelines of a cluster that are in iterations of their own, one apart at most; mixed as they have work.

    Stages that change attributes cannot do this: pipelines would see each other's values.

    Args:
        cluster: of the pipelines.
        step: name of the step function.
    """

    def __init__(self, cluster: Cluster, step: str) -> None:
        self._context = IterationContext(cluster.waits, cluster.world.rank, oldest_first=True)
        self._step = step
        self._lanes: dict[int, list[Lane]] = {}
        self._begun: dict[int, tuple[Pipeline, Schedule]] = {}

    def begin(self, pipeline: Pipeline, schedule: Schedule, task: Task) -> None:
        """A pipeline begins an iteration: its model is ready for it. Nothing runs yet.

        Raises:
            ScheduleError: a schedule has actions that stages cannot run, or that cannot roll.
        """
        check_runnable(schedule)
        if schedule.relays:
            raise ScheduleError(
                f"the schedule {schedule.name!r} has values pass stages, whose weights go on before each iteration: "
                "iterations cannot roll; use rolling=False, or another schedule"
            )
        assert pipeline.number not in self._begun
        self._begun[pipeline.number] = pipeline, schedule
        self._lanes[pipeline.number] = pipeline.lanes(self._step, schedule, task)

    def finish(self, number: int) -> Outcome:
        """Run what there is to run, of all pipelines, until the iteration of one has ended here."""
        own = self._lanes[number]
        with intercepting(), torch.enable_grad():
            execute(
                [lane for lanes in self._lanes.values() for lane in lanes],
                self._context,
                lambda: not any(lane.actions for lane in own),
            )
        pipeline, schedule = self._begun[number]
        outcome = pipeline.outcome(self._step, schedule)
        for lane in own:  # what is in their channels belongs to the next iteration, which a neighbour may have begun
            lane.stage.clear()
        self._forget(number)
        return outcome

    def clear(self) -> None:
        """Nothing is under way any more, in this process."""
        for number in list(self._begun):
            clear(self._lanes[number])
            self._forget(number)

    def _forget(self, number: int) -> None:
        pipeline, _ = self._begun.pop(number)
        del self._lanes[number]
        pipeline.own(self._step)[-1].end()


def run_together(
    pipelines: Sequence[Pipeline],
    step: str,
    schedules: Sequence[Schedule],
    tasks: Sequence[Task],
    observers: Iterable[Observer] = (),
) -> list[Outcome]:
    """Run one iteration of several pipelines of a cluster, mixed as they have work.

    Args:
        pipelines: that can run the step.
        step: name of the step function.
        schedules: one for each pipeline.
        tasks: one for each pipeline; their keys say which it is.
        observers: see the iteration, each within those before it.
    Returns:
        One for each pipeline.
    Raises:
        ScheduleError: a schedule has actions that stages cannot run.
    """
    cluster = pipelines[0]._cluster
    for schedule in schedules:
        check_runnable(schedule)
        check_hosted(schedule, cluster.stage_map.owners())
    context = IterationContext(cluster.waits, cluster.world.rank, tuple(observers))
    lanes = [
        lane
        for pipeline, schedule, task in zip(pipelines, schedules, tasks, strict=True)
        for lane in pipeline.lanes(step, schedule, task, context.observers)
    ]
    try:
        with intercepting():
            execute(lanes, context)
        for observer in context.observers:
            observer.agree(cluster.world)
        return [pipeline.outcome(step, schedule) for pipeline, schedule in zip(pipelines, schedules, strict=True)]
    finally:
        clear(lanes)
        for pipeline in pipelines:
            pipeline.own(step)[-1].end()
        added = [obj for pipeline in pipelines[1:] for own in pipeline.own(step)[-2:] for obj in own.added()]
        for own in (own for pipeline in pipelines for own in pipeline.own(step)):
            own.accept(added)


def _lacks(samples: Sequence[tuple[Any, int]], names: Collection[str]) -> bool:
    """Whether tensors of these names have not come to this process."""
    leaves = (pair for data, _ in samples for pair in tree.flatten_with_names(data)[0])
    return any(isinstance(leaf, Absent) and name in names for name, leaf in leaves)


def clear(lanes: Sequence[Lane]) -> None:
    """Let nothing be left of an iteration that has ended, however it did."""
    for lane in lanes:
        lane.stage.clear()
        for end in (lane.values, lane.gradients):
            if isinstance(end, MemoryChannel):
                end.clear()

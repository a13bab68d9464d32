"""Schedule control: gives each iteration of training its schedule, and measures iterations to choose it.

::

    every rank    iteration 7 ....... report: time, memory          accept: from iteration 8 on advance 2
    rank 0        iteration 7 ....... reports of 6 and 7, if there, decide: 2, to all after iteration 7

No rank waits for a report: late reports count later. All ranks learn of a decision with what rank 0 publishes after
every iteration anyway, so all change the advance at the same iteration.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from torch import nn

from lightning_avgpipe.comm.clock import Stopwatch
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.accounting import DeviceMeter, Footprint, HostMeter, Meter
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.planning.model_memory import holdings_of_models, with_doubles
from lightning_avgpipe.schedule import Action, Schedule, in_turn, peak_stash
from lightning_avgpipe.schedule.adaptive import WINDOW, AdaptiveAdvance, Decision, IterationShape
from lightning_avgpipe.strategy.schedule_choice import Order, ScheduleChoice
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import pl, rank_zero_warn


class ScheduleControl:
    """Gives each iteration of one run of the trainer its schedule, and adapts the advance where that is asked for.

    A shape of iterations begins with advance 0, which needs the least memory. The memory of that iteration is measured,
    and tells what any other advance would need; with the next publication of rank 0 the first advance that fits is
    taken. Only times of ordinary iterations count: none that was measured or recorded, that had fewer samples than
    others, or that came after something else than an iteration of training.

    Args:
        order: order of actions, as asked for.
        cluster: the connected processes, with the stages that each hosts.
        memory_limit: returns the bytes that no stage may exceed now.
        module: module that is trained.
        observers: observers of each iteration, to which meters are added.
        holdings: memory that the stages of this process hold in any case.

    Attributes:
        choice: builds the schedules.
        advances: chooses the advance, on rank 0.
        observers: observers of each iteration.
        peaks: stage -> bytes at its peak, as measured last; of all stages, on all ranks.
    """

    def __init__(
        self,
        order: Order,
        cluster: Cluster,
        memory_limit: Callable[[], float],
        module: nn.Module,
        observers: Observers,
        holdings: RunHoldings,
    ) -> None:
        self.choice = ScheduleChoice(order, cluster, memory_limit, module)
        self.advances = AdvanceControl(cluster, self.choice)
        self.observers = observers
        self.peaks: dict[int, int] = {}
        self._cluster = cluster
        self._holdings = holdings
        self._shapes: dict[IterationShape, _Known] = defaultdict(_Known)
        self._measured = _Measured(Stopwatch(cluster.device))
        self._loaded: dict[str, Any] | None = None

    def schedule(self, parts: Sequence[MicroBatch], num_pipelines: int = 1, plan: Plan | None = None) -> Schedule:
        """Return the schedule of a pipeline with these micro-batches, for the next iteration of training.

        Args:
            parts: micro-batches of the pipeline.
            num_pipelines: N.
            plan: plan of the stages, which decides on broadcast forward; None: the schedule is as asked for.
        """
        shape = self._shape(parts, num_pipelines)
        return self.choice.schedule(shape, self._shapes[shape].advance, plan)

    def freeze(self, stages: int) -> None:
        """Let the first ``stages`` stages run forwards only. Every rank calls it before the iteration."""
        if stages != self.choice.frozen:
            self.choice.frozen = stages
            self.begin_again()

    def begin_again(self) -> None:
        """Forget what was measured and decided, since there is another plan. Every rank calls it."""
        if self.choice.plan is not None:  # a loaded state was meant for that plan
            self._loaded = None
        self.choice.follow(None)
        self.advances = AdvanceControl(self._cluster, self.choice)
        self.peaks.clear()
        self._shapes.clear()

    def _take(self, plan: Plan, num_microbatches: int) -> None:
        """Follow the plan of an iteration, and begin with the advance that its costs ask for."""
        if plan is self.choice.plan or not self.choice.depends_on_plan:
            return
        self.choice.follow(plan)
        if self.choice.adapts:
            self.advances.begin(self.choice.first_advance(num_microbatches), self._loaded)

    def measures(self, works: Sequence[Sequence[MicroBatch]], num_pipelines: int) -> bool:
        """Return whether the memory of such an iteration will be measured; all ranks return the same."""
        known = self._shapes[self._shape(works[0], num_pipelines)]
        return len(works) == num_pipelines and known.advance not in known.metered

    @contextlib.contextmanager
    def iteration(
        self,
        task: Task,
        works: Sequence[Sequence[MicroBatch]],
        plan: Plan,
        schedule: Schedule,
        num_pipelines: int = 1,
    ) -> Iterator[None]:
        """Within this context an iteration runs, of training or not.

        Args:
            task: task of pipeline 0.
            works: micro-batches of every pipeline that has a batch.
            plan: plan of the step.
            schedule: schedule of pipeline 0.
            num_pipelines: N. Memory is measured when all pipelines have a batch.
        """
        measured = self._measured
        if not task.trains:
            measured.follows = False
            yield
            return
        shape = self._shape(works[0], num_pipelines)
        known = self._shapes[shape]
        advance = known.advance
        self._take(plan, len(works[0]))
        meter = None
        if self.measures(works, num_pipelines):
            meter = self._holdings.meter(task, plan, works)
            known.metered.add(advance)
        measured.number += 1
        lap = measured.stopwatch.lap(measured.number) if self.choice.adapts else contextlib.nullcontext()
        with self.observers.having(*([] if meter is None else [meter])), lap:
            yield
        if meter is not None:
            found = self._holdings.footprints(meter, plan, schedule, len(works[0]), num_pipelines)
            measured.footprints += [(measured.number, k, f.peak, f.crest, f.changes) for k, f in found.items()]
        size = sum(part.size for work in works for part in work)
        known.largest = max(size, known.largest)
        ordinary = measured.follows and meter is None and not [*self.observers] and size == known.largest
        measured.follows = True
        if self._cluster.rank == 0:
            if self.choice.adapts or meter is not None:
                self.advances.note(measured.number, Ran(shape, advance, ordinary))
            if self.choice.adapts and meter is None:
                self.advances.estimate(plan, shape, schedule)

    def finish(self) -> Decisions:
        """Report what was measured after an iteration; on rank 0, return the decisions. Every rank calls it."""
        measured = self._measured
        if not self.choice.adapts and not measured.footprints:
            return None  # all ranks return here
        report, measured.footprints = (measured.stopwatch.finished(), measured.footprints), []
        for rank, reported in self._cluster.channels.control.report(report):
            self.advances.take(rank, reported)
        chosen = {shape: known.advance for shape, known in self._shapes.items()}
        return self.advances.decide(chosen, self.peaks) if self._cluster.rank == 0 else None

    def accept(self, news: Decisions) -> None:
        """Apply rank 0's decisions. Every rank calls it after the same iteration."""
        if news is not None:
            for *values, advance in news[0]:
                self._shapes[IterationShape(*values)].advance = advance
            self.peaks.update(news[1])

    def log(self, trainer: pl.Trainer) -> None:
        """Log the last decision, at the next step at which metrics are logged."""
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        if trainer.fit_loop._should_accumulate() or not (metrics := self.advances.metrics()):
            return
        metrics["avgpipe/peak_memory_bytes"] = float(max(self.peaks.values(), default=0))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _shape(self, parts: Sequence[MicroBatch], num_pipelines: int) -> IterationShape:
        """Return the shape of an iteration with these micro-batches.

        Lengths count as equal if the largest tensor has as many elements per sample, up to a factor of 2.
        """
        first = parts[0]
        elements = max((tensor.numel() for tensor in tree.tensors(first.data)), default=0) // max(1, first.size)
        return IterationShape(len(parts), num_pipelines, self._cluster.stage_map.num_stages, elements.bit_length())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return what rank 0 knows of advances; None if there is nothing."""
        return self.advances.state_dict() or self._loaded

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the state of a saved run; it applies after the first iteration, when it is known what fits."""
        self._loaded = state


@dataclass
class _Known:
    """What is known of a shape of iterations with the present plan.

    Attributes:
        advance: advance chosen for the shape, the same on every rank.
        metered: advances with which memory was measured.
        largest: largest number of samples.
    """

    advance: int = 0
    metered: set[int] = field(default_factory=set)
    largest: int = 0


@dataclass
class _Measured:
    """Measurements of training iterations on this rank that have not been reported yet.

    Attributes:
        stopwatch: measures the times.
        number: number of the last iteration.
        follows: whether nothing else has run since the last iteration.
        footprints: (number of the iteration, stage, values) for each measurement of memory.
    """

    stopwatch: Stopwatch
    number: int = 0
    follows: bool = False
    footprints: list[Any] = field(default_factory=list)


_log = logging.getLogger(__name__)

# (shape, advance) for each new decision, and (stage, peak bytes) for each new measurement; None if nothing is new.
Decisions = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]] | None
# (number, seconds) for each iteration; (number, stage, footprint values) for each measurement of memory.
Report = tuple[Sequence[tuple[int, float]], Sequence[Any]]


@dataclass
class Ran:
    """An iteration that ran.

    Attributes:
        shape: shape of the iteration.
        advance: advance that it ran with.
        counts: whether its time may be compared with others; see :class:`ScheduleControl`.
        times: rank -> seconds, of the ranks that have reported.
    """

    shape: IterationShape
    advance: int
    counts: bool
    times: dict[int, float] = field(default_factory=dict)


class AdvanceControl:
    """Chooses advances on rank 0, from what all ranks have measured with one plan.

    Args:
        cluster: the connected processes.
        choice: builds the schedules whose memory is predicted.
    """

    def __init__(self, cluster: Cluster, choice: ScheduleChoice) -> None:
        self._cluster = cluster
        self._choice = choice
        self._controller: AdaptiveAdvance | None = None
        self._ran: dict[int, Ran] = {}  # by number, until all have reported
        self._footprints: dict[IterationShape, dict[int, Footprint]] = defaultdict(dict)
        self._decided: dict[IterationShape, int] = {}
        self._too_large: set[IterationShape] = set()
        self._peaks: dict[int, int] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._unlogged: Decision | None = None

    def begin(self, start: int, loaded: dict[str, Any] | None) -> None:
        """Start the controller, once there is a plan.

        Args:
            start: advance to begin with.
            loaded: state of a saved run; it applies after the first iteration, when it is known what fits the memory.
        """
        self._controller = AdaptiveAdvance(start, self.predicted, self._choice.memory_limit(), self._choice.warm_up)
        if loaded is not None:
            self._controller.load_state_dict(loaded)

    def note(self, number: int, ran: Ran) -> None:
        """Note that an iteration ran; ranks report its times later, maybe not with their next report."""
        self._ran[number] = ran

    def estimate(self, plan: Plan, shape: IterationShape, schedule: Schedule) -> None:
        """Take the plan's estimates for a shape, where memory is not measured; they were made for this schedule."""
        if shape in self._footprints:
            return
        for k, (stage, flights) in enumerate(zip(plan.stages, peak_stash(schedule), strict=True)):
            stash = (stage.memory.stash + stage.memory.boundary) // flights if flights else 0
            self._footprints[shape][k] = Footprint.estimated(stage.memory.held, stash, self._row(schedule, k))

    def take(self, rank: int, report: Report) -> None:
        """Take in the measurements that a rank has reported."""
        times, footprints = report
        for number, seconds in times:
            if number in self._ran:  # else the iteration ran with an earlier plan
                self._ran[number].times[rank] = seconds
        for number, stage, *values in footprints:
            if number not in self._ran:
                continue
            replica, _ = self._cluster.stage_map.share(stage, rank)
            if replica == 0:  # other replicas have as many micro-batches, or one less
                self._footprints[self._ran[number].shape][stage] = Footprint(*values)
            self._peaks[stage] = max(values[0], self._peaks.get(stage, 0)) if replica else values[0]

    def decide(self, chosen: Mapping[IterationShape, int], peaks: Mapping[int, int]) -> Decisions:
        """Return what is new for all ranks, from the iterations that every rank has reported.

        Args:
            chosen: shape -> advance, as all ranks know it.
            peaks: stage -> peak bytes, as all ranks know it.
        """
        while self._ran and len(next(iter(self._ran.values())).times) == self._cluster.group.world_size:
            self._observe(self._ran.pop(next(iter(self._ran))))
        if self._controller is not None:
            for shape, footprints in self._footprints.items():
                if shape not in self._decided and len(footprints) == shape.num_stages:
                    self._decided[shape] = self._first(self._controller, shape)
        new = {s: h for s, h in self._decided.items() if chosen.get(s, 0) != h}
        higher = {k: peak for k, peak in self._peaks.items() if peaks.get(k) != peak}
        if not new and not higher:
            return None
        return tuple((*astuple(s), h) for s, h in new.items()), tuple(higher.items())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last decision, once; empty if there is no new decision."""
        decision, self._unlogged = self._unlogged, None
        if decision is None:
            return {}
        return {
            "avgpipe/advance": float(decision.advance),
            "avgpipe/iteration_s": statistics.median(self._recent),
        }

    def predicted(self, shape: IterationShape, advance: int) -> list[float]:
        """Return the peak of each stage in bytes, if iterations of a measured shape had this advance."""
        schedule, footprints = self._choice.schedule(shape, advance), self._footprints[shape]
        return [footprints[k].predicted(self._row(schedule, k)) for k in range(shape.num_stages)]

    def _row(self, schedule: Schedule, stage: int) -> Sequence[Action]:
        """Return the actions of a stage, or of its first replica."""
        return in_turn(schedule[stage], 0, len(self._cluster.stage_map.ranks(stage)))

    def _first(self, controller: AdaptiveAdvance, shape: IterationShape) -> int:
        """Return the advance that a shape begins with, or after a resume goes on with."""
        limit = self._choice.memory_limit()
        for stage, peak in enumerate(self.predicted(shape, 0)):
            if peak > limit:
                self._too_large.add(shape)
                rank_zero_warn(
                    f"stage {stage} keeps {nbytes(peak)} at its peak, more than memory_limit ({nbytes(limit)}), "
                    "although the schedule is the one that needs least; use more micro-batches, or a higher limit"
                )
                return 0
        return controller.advance(shape)

    def _observe(self, ran: Ran) -> None:
        shape, controller = ran.shape, self._controller
        if controller is None or not ran.counts or shape in self._too_large:
            return
        if ran.advance != self._decided.get(shape):
            return  # the iteration ran before all ranks knew of the last decision
        seconds = max(ran.times.values())
        self._recent.append(seconds)
        decision = controller.observe(shape, seconds)
        if decision is not None:
            self._decided[shape] = decision.advance
            self._unlogged = decision
            _log.info("advance %d from now on: %s", decision.advance, decision.reason)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the controller; None before :meth:`begin`."""
        return None if self._controller is None else self._controller.state_dict()


@dataclass(frozen=True)
class RunHoldings:
    """The memory of stages in a run of the trainer.

    Attributes:
        around: trainer, connection and options of the run.
        models: models that are trained.
    """

    around: Surroundings
    models: ParallelPipelines

    def meter(self, task: Task, plan: Plan, works: Sequence[Sequence[MicroBatch]] = ()) -> Meter | None:
        """Return a meter for the memory of an iteration; None where it cannot be measured.

        On the host that is a plan without measured costs, since its step may not bear being measured.

        Args:
            task: task of pipeline 0.
            plan: plan of the step.
            works: micro-batches of every pipeline; given where each pipeline has a model of its own.
        """
        device, module = self.around.cluster.device, self.around.trainer.lightning_module
        if port_of(device).memory.is_counted:
            return DeviceMeter(device)
        if not plan.measured:
            return None
        ensemble = self.models.ensemble if works else None
        others = range(1, 1 if ensemble is None else ensemble.models.size)
        beside = [] if ensemble is None else [t for n in others for t in ensemble.tensors(n).values()]
        batches = tree.tensors((tuple(map(tuple, task.args)), [part.data for parts in works for part in parts]))
        return HostMeter([*module.parameters(), *module.buffers(), *beside, *batches])

    def footprints(
        self, meter: Meter, plan: Plan, schedule: Schedule, num_microbatches: int, num_pipelines: int
    ) -> dict[int, Footprint]:
        """Return what each stage has kept in an iteration, given what it holds for all parallel models."""
        trainer, cluster, configuration = self.around.trainer, self.around.cluster, self.around.configuration
        module, rolls, ensemble = trainer.lightning_module, configuration.rolls, self.models.ensemble
        held = holdings_of_models(
            plan, cluster.stages, module, trainer.optimizers, num_microbatches, num_pipelines,
            cluster.stage_map.num_teams, configuration.options.policy, rolling=rolls,
            meeting=rolls and ensemble is not None and ensemble.averager.turns.are_there,
        )  # fmt: skip
        return meter.finish(with_doubles(held, plan, schedule, module, num_pipelines))

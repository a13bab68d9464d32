"""Schedule control: gives each iteration of training its schedule, and measures iterations to choose it.

::

    every rank    iteration 7 ....... report: time, memory          accept: from iteration 8 on advance 2
    rank 0        iteration 7 ....... reports of 6 and 7, if there, decide: 2, to all after iteration 7

No rank waits for a report: one that arrives late counts later. Rank 0 sends its decisions with what it publishes after
every iteration anyway, so all ranks change the advance at the same iteration.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_avgpipe.engine.accounting import DeviceMeter, Footprint, HostMeter, Meter
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import holdings, nbytes, with_doubles
from lightning_avgpipe.schedule import Action, Schedule, in_turn, peak_stash
from lightning_avgpipe.schedule.adaptive import AdaptiveAdvance, Decision, IterationShape
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.iteration import Works
from lightning_avgpipe.strategy.schedule_choice import ScheduleChoice, ScheduleRequest
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import Stopwatch, port_of
from lightning_avgpipe.utils.lightning import pl, rank_zero_warn

_log = logging.getLogger(__name__)

# shape -> advance for each new decision, and stage -> peak bytes for each new measurement; None if nothing is new.
Decisions = tuple[dict[IterationShape, int], dict[int, int]] | None
# (number, seconds) for each iteration; (number, stage, footprint) for each measurement of memory.
Report = tuple[Sequence[tuple[int, float]], Sequence[tuple[int, int, Footprint]]]


class ScheduleControl:
    """Gives each iteration of one run of the trainer its schedule, and adapts the advance if this was requested.

    The first iteration of each shape has advance 0, which needs the least memory. Its memory is measured, from which
    follows what any other advance would need. Rank 0 then chooses the first advance that fits, and publishes it. Only
    times of ordinary iterations count: the iteration was not measured or recorded, had as many samples as the largest,
    and came right after another iteration of training.

    Args:
        request: requested schedule.
        context: trainer, connection and options of the run.
        models: models that are trained.
        observers: observers of each iteration, to which meters are added.

    Attributes:
        choice: builds the schedules.
        observers: observers of each iteration.
        peaks: stage -> bytes at its peak, as last measured; all ranks know those of all stages.
    """

    def __init__(
        self, request: ScheduleRequest, context: RunContext, models: ParallelPipelines, observers: Observers
    ) -> None:
        self._context, self._models, self._cluster = context, models, context.cluster
        self._module = context.trainer.lightning_module
        self.choice = ScheduleChoice(request, self._cluster, context.memory_per_stage)
        self.observers = observers
        self.peaks: dict[int, int] = {}
        self._stopwatch = Stopwatch(self._cluster.device)
        self._number = 0  # of the last iteration of training
        self._follows = False  # whether nothing else has run since that iteration
        self._measured: list[tuple[int, int, Footprint]] = []  # until they are reported; see Report
        self._loaded: dict[str, Any] | None = None
        self._shapes: dict[IterationShape, _Known] = defaultdict(_Known)
        # on rank 0
        self._controller: AdaptiveAdvance | None = None
        self._ran: dict[int, _Ran] = {}  # by number, until all have reported
        self._reported_peaks: dict[int, int] = {}
        self._unlogged: Decision | None = None

    def schedule(self, parts: Sequence[MicroBatch], runs: bool = False) -> Schedule:
        """Return the schedule of a pipeline with these micro-batches, for the next iteration of training.

        Args:
            parts: micro-batches of the pipeline.
            runs: whether it is to run, see :meth:`ScheduleChoice.schedule`.
        """
        shape = self._shape(parts)
        return self.choice.schedule(shape, self._shapes[shape].advance, runs)

    def freeze(self, stages: int) -> None:
        """Let the first ``stages`` stages run forwards only. Every rank calls it before the iteration."""
        if stages != self.choice.frozen:
            self.choice.frozen = stages
            self.begin_again()

    def begin_again(self) -> None:
        """Forget what was measured and decided, since there is another plan. Every rank calls it."""
        if self.choice.plan is not None:  # a state that was loaded belongs to that plan
            self._loaded = None
        self.choice.use_plan(None)
        self._controller = self._unlogged = None
        for known in (self.peaks, self._shapes, self._ran, self._reported_peaks):
            known.clear()

    def measures(self, works: Works) -> bool:
        """Return whether the memory of an iteration with these micro-batches is measured; all ranks return the same."""
        known = self._shapes[self._shape(works[0])]
        return len(works) == self._context.configuration.num_pipelines and known.advance not in known.metered

    @contextlib.contextmanager
    def iteration(self, task: Task, works: Works, plan: Plan, schedule: Schedule) -> Iterator[None]:
        """Run an iteration, of training or not, within this context, and measure it.

        Args:
            task: task of pipeline 0.
            works: micro-batches of every pipeline that has a batch.
            plan: plan of the step.
            schedule: schedule of pipeline 0.
        """
        if not task.trains:
            self._follows = False
            yield
            return
        shape = self._shape(works[0])
        known = self._shapes[shape]
        advance = known.advance
        self._take(plan, len(works[0]))
        meter = None
        if self.measures(works):
            meter = self._meter(task, plan, works)
            known.metered.add(advance)
        self._number += 1
        lap = self._stopwatch.lap(self._number) if self.choice.adapts else contextlib.nullcontext()
        with self.observers.with_added(*([] if meter is None else [meter])), lap:
            yield
        if meter is not None:
            found = self._footprints(meter, plan, schedule, len(works[0]))
            self._measured += [(self._number, k, footprint) for k, footprint in found.items()]
        size = sum(part.size for work in works for part in work)
        known.largest = max(size, known.largest)
        ordinary = self._follows and meter is None and not [*self.observers] and size == known.largest
        self._follows = True
        if self._cluster.rank == 0:
            if self.choice.adapts or meter is not None:
                self._ran[self._number] = _Ran(shape, advance, ordinary)
            if self.choice.adapts and meter is None and not known.footprints:
                known.footprints = self._estimated(plan, schedule)

    def _take(self, plan: Plan, num_microbatches: int) -> None:
        """If the plan is new, use its costs, and start to adapt from the advance that they suggest."""
        choice = self.choice
        if plan is choice.plan or not choice.depends_on_plan:
            return
        choice.use_plan(plan)
        if choice.adapts:
            first, limit = choice.first_advance(num_microbatches), choice.memory_limit()
            self._controller = AdaptiveAdvance(first, self.predicted, limit, choice.warm_up)
            if self._loaded is not None:  # applies after the first iteration, which shows what fits the memory
                self._controller.load_state_dict(self._loaded)

    def finish(self) -> Decisions:
        """Report to rank 0 what was measured, after an iteration; on rank 0, return decisions. Every rank calls it."""
        if not self.choice.adapts and not self._measured:
            return None  # all ranks return here
        report, self._measured = (self._stopwatch.finished(), self._measured), []
        for rank, reported in self._cluster.control.report(report):
            self._note(rank, reported)
        return self._decide() if self._cluster.rank == 0 else None

    def accept(self, news: Decisions) -> None:
        """Apply rank 0's decisions. Every rank calls it after the same iteration."""
        if news is not None:
            for shape, advance in news[0].items():
                self._shapes[shape].advance = advance
            self.peaks.update(news[1])

    def log(self, trainer: pl.Trainer) -> None:
        """Log the last decision once, at the next step at which metrics are logged."""
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        if trainer.fit_loop._should_accumulate() or self._unlogged is None:
            return
        metrics = {
            "avgpipe/advance": float(self._unlogged.advance),
            "avgpipe/iteration_s": self._unlogged.measured_s,
            "avgpipe/peak_memory_bytes": float(max(self.peaks.values(), default=0)),
        }
        self._unlogged = None
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _shape(self, parts: Sequence[MicroBatch]) -> IterationShape:
        """Return the shape of an iteration with these micro-batches.

        Lengths count as equal if the largest tensor has as many elements per sample, up to a factor of 2.
        """
        first = parts[0]
        elements = max((tensor.numel() for tensor in tree.tensors(first.data)), default=0) // max(1, first.size)
        num_pipelines, num_stages = self._context.configuration.num_pipelines, self._cluster.stage_map.num_stages
        return IterationShape(len(parts), num_pipelines, num_stages, elements.bit_length())

    # -- memory ------------------------------------------------------------------------------------------------------

    def _meter(self, task: Task, plan: Plan, works: Sequence[Sequence[MicroBatch]] = ()) -> Meter | None:
        """Return a meter for the memory of an iteration; None if it cannot be measured.

        On the host it is not measured if the plan has no measured costs, since measuring may not work for its step.

        Args:
            task: task of pipeline 0.
            plan: plan of the step.
            works: micro-batches of every pipeline; given where each pipeline has a model of its own.
        """
        device, module = self._cluster.device, self._module
        if port_of(device).counts_memory:
            return DeviceMeter(device)
        if not plan.measured:
            return None
        ensemble = self._models.ensemble if works else None
        others = range(1, 1 if ensemble is None else ensemble.models.size)
        of_others = [] if ensemble is None else [t for n in others for t in ensemble.tensors(n).values()]
        batches = tree.tensors((tuple(map(tuple, task.args)), [part.data for parts in works for part in parts]))
        return HostMeter([*module.parameters(), *module.buffers(), *of_others, *batches])

    def _footprints(self, meter: Meter, plan: Plan, schedule: Schedule, num_microbatches: int) -> dict[int, Footprint]:
        """Return the measured memory of each stage of this process, with what it holds for all parallel models."""
        cluster, configuration, ensemble = self._cluster, self._context.configuration, self._models.ensemble
        rolls, num_pipelines = configuration.rolls, configuration.num_pipelines
        held = holdings(
            plan, cluster.stages, self._module, self._context.trainer.optimizers, num_microbatches, num_pipelines,
            cluster.stage_map.num_teams, configuration.options.policy,
            rolling=rolls or configuration.options.averaging.delay > 0,
            meeting=rolls and ensemble is not None and ensemble.averager.staggered is not None,
        )  # fmt: skip
        return meter.finish(with_doubles(held, plan, schedule, self._module, num_pipelines))

    def _estimated(self, plan: Plan, schedule: Schedule) -> dict[int, Footprint]:
        """Return footprints from the plan's estimates, which were made for this schedule, if memory is not measured."""
        found = {}
        for k, (stage, flights) in enumerate(zip(plan.stages, peak_stash(schedule), strict=True)):
            stash = (stage.memory.stash + stage.memory.boundary) // flights if flights else 0
            found[k] = Footprint.estimated(stage.memory.persistent, stash, self._row(schedule, k))
        return found

    def predicted(self, shape: IterationShape, advance: int) -> list[float]:
        """Return, on rank 0, the predicted peak in bytes of each stage for a measured shape with this advance."""
        schedule, footprints = self.choice.schedule(shape, advance), self._shapes[shape].footprints
        return [footprints[k].predicted(self._row(schedule, k)) for k in range(shape.num_stages)]

    def _row(self, schedule: Schedule, stage: int) -> Sequence[Action]:
        """Return the actions of a stage; if it has replicas, those of the first one."""
        return in_turn(schedule[stage], 0, len(self._cluster.stage_map.ranks(stage)))

    # -- rank 0 decides ----------------------------------------------------------------------------------------------

    def _note(self, rank: int, report: Report) -> None:
        """Store the measurements that a rank has reported, maybe of an earlier iteration."""
        times, footprints = report
        for number, seconds in times:
            if number in self._ran:  # otherwise the iteration ran with an earlier plan
                self._ran[number].times[rank] = seconds
        for number, stage, found in footprints:
            if number not in self._ran:
                continue
            replica, _ = self._cluster.stage_map.share(stage, rank)
            if replica == 0:  # other replicas have as many micro-batches, or one less
                self._shapes[self._ran[number].shape].footprints[stage] = found
            self._reported_peaks[stage] = max(found.peak, self._reported_peaks.get(stage, 0)) if replica else found.peak

    def _decide(self) -> Decisions:
        """Evaluate the iterations that every rank has reported; return what is new for all ranks."""
        while self._ran and len(next(iter(self._ran.values())).times) == self._cluster.group.world_size:
            self._observe(self._ran.pop(next(iter(self._ran))))
        if self._controller is not None:
            for shape, known in self._shapes.items():
                if known.decided is None and len(known.footprints) == shape.num_stages:
                    known.decided = self._first(self._controller, shape)
        new = {s: known.decided for s, known in self._shapes.items() if known.decided not in (None, known.advance)}
        higher = {k: peak for k, peak in self._reported_peaks.items() if self.peaks.get(k) != peak}
        return (new, higher) if new or higher else None

    def _first(self, controller: AdaptiveAdvance, shape: IterationShape) -> int:
        """Return the first advance of a shape that fits the memory, or after a resume the saved one."""
        limit = self.choice.memory_limit()
        for stage, peak in enumerate(self.predicted(shape, 0)):
            if peak > limit:
                self._shapes[shape].too_large = True
                rank_zero_warn(
                    f"stage {stage} keeps {nbytes(peak)} at its peak, more than memory_limit ({nbytes(limit)}), "
                    "although its schedule needs the least memory; use more micro-batches, or a higher limit"
                )
                return 0
        return controller.advance(shape)

    def _observe(self, ran: _Ran) -> None:
        known, controller = self._shapes[ran.shape], self._controller
        if controller is None or not ran.counts or known.too_large:
            return
        if ran.advance != known.decided:
            return  # the iteration ran before all ranks knew of the last decision
        decision = controller.observe(ran.shape, max(ran.times.values()))
        if decision is not None:
            known.decided = decision.advance
            self._unlogged = decision
            _log.info("advance %d from now on: %s", decision.advance, decision.reason)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of rank 0's controller of advances; None if there is none."""
        return self._loaded if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the state of a saved run, which applies after the first iteration, when it is known what fits."""
        self._loaded = state


@dataclass
class _Known:
    """What is known about a shape of iterations with the current plan.

    Attributes:
        advance: current advance of the shape, the same on every rank.
        metered: advances with which memory was measured.
        largest: largest number of samples of an iteration.
        footprints: on rank 0, the memory of each stage.
        decided: on rank 0, the last decision, which becomes ``advance`` when all ranks accept it.
        too_large: on rank 0, whether not even advance 0 fits the memory.
    """

    advance: int = 0
    metered: set[int] = field(default_factory=set)
    largest: int = 0
    footprints: dict[int, Footprint] = field(default_factory=dict)
    decided: int | None = None
    too_large: bool = False


@dataclass
class _Ran:
    """An iteration that ran.

    Attributes:
        shape: shape of the iteration.
        advance: advance that it ran with.
        counts: whether its time counts, as that of an ordinary iteration; see :class:`ScheduleControl`.
        times: rank -> seconds, of the ranks that have reported.
    """

    shape: IterationShape
    advance: int
    counts: bool
    times: dict[int, float] = field(default_factory=dict)

"""Schedule control: gives each iteration of training its schedule, and measures iterations to choose it.

::

    every rank    iteration 7 ....... report: time, memory          accept: from iteration 8 on advance 2
    rank 0        iteration 7 ....... reports of 6 and 7, if there, decide: 2, to all after iteration 7

No rank waits for a report: late reports count later. All ranks learn of a decision with what rank 0 publishes after
every iteration anyway, so all change the advance at the same iteration.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_avgpipe.comm.clock import Stopwatch
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.adaptive import IterationShape
from lightning_avgpipe.strategy.advance_control import AdvanceControl, Decisions, Ran
from lightning_avgpipe.strategy.run_holdings import RunHoldings
from lightning_avgpipe.strategy.schedule_choice import Order, ScheduleChoice
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import pl


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
            plan: plan of the stages, which decides whether values may pass stages; None: the schedule is as asked for.
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

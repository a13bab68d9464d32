"""Schedule control: which schedule an iteration of training runs with, and what is measured to choose it.

::

    every rank    iteration 7 ....... report: time, memory          accept: from iteration 8 on advance 2
    rank 0        iteration 7 ....... reports of 6 and 7, if there, decide: 2, to all after iteration 7

Nobody waits for a report: what comes late counts later. All ranks learn of a decision with what rank 0 publishes after
every iteration anyway, so all switch at the same one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.clock import Stopwatch
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.accounting import DeviceMeter, HostMeter, Meter
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.model_memory import holdings_of_models, with_doubles
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.adaptive import IterationShape
from lightning_avgpipe.schedule.own import Builder
from lightning_avgpipe.schedule.versions import POLICIES, WeightPolicy
from lightning_avgpipe.strategy.advance_control import AdvanceControl, Decisions, Ran
from lightning_avgpipe.strategy.schedule_choice import ScheduleChoice
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of


class ScheduleControl:
    """Gives each iteration of one run of the trainer its schedule, and adapts the advance where that is asked for.

    A shape begins with advance 0, which needs the least memory. That iteration is measured; what it kept tells what
    any other advance would need, and with the next news the first advance that fits is taken. Only times of whole,
    ordinary iterations count: none that was measured, recorded, had fewer samples than others, or came after
    something else than an iteration.

    Args:
        given: name of the schedule, or a function that builds it.
        advance: h, or ``"auto"``. Alone a process has nothing to overlap: there ``"auto"`` is 0.
        cluster: who hosts what.
        memory_limit: bytes that no stage may exceed, as of when it is called.
        module: that is trained.
        optimizers: that step it, as of when it is called.
        observers: of each iteration, to which what measures it is added.
        beside: what parallel models have of their own that are not in the module, as of when it is called.
        splits: whether stages can split their backwards, as far as that is known.
        policy: which weights actions use.
        meeting: whether what models need to meet one at a time is there; None: they meet together.

    Attributes:
        choice: builds the schedules.
        advances: decides, on rank 0.
        peaks: stage -> bytes at its peak, as measured last; of all stages, on all ranks.
    """

    def __init__(
        self,
        given: str | Builder,
        advance: int | Literal["auto"],
        cluster: Cluster,
        memory_limit: Callable[[], float],
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        observers: Observers,
        beside: Callable[[], Sequence[Tensor]] = list,
        splits: bool = True,
        policy: WeightPolicy = POLICIES["flush"],
        meeting: Callable[[], bool | None] = lambda: None,
    ) -> None:
        adapts = advance == "auto" and given == "advance_forward" and cluster.group.world_size > 1
        fixed = 0 if advance == "auto" else advance
        self.choice = ScheduleChoice(given, None if adapts else fixed, cluster, memory_limit, module, splits)
        self.peaks: dict[int, int] = {}
        self.advances = AdvanceControl(cluster, self.choice, memory_limit)
        self._cluster = cluster
        self._module = module
        self._optimizers = optimizers
        self._observers = observers
        self._beside = beside
        self._policy = policy
        self._meeting = meeting
        self._plan: Plan | None = None
        self._stopwatch = Stopwatch(cluster.device)
        self._chosen: dict[IterationShape, int] = {}  # the same on every rank
        self._metered: set[tuple[IterationShape, int]] = set()
        self._largest: Counter[IterationShape] = Counter()
        self._number = 0
        self._follows = False  # on an ordinary iteration
        self._report: list[Any] = []  # of this rank, not yet handed in

    def schedule(self, parts: Sequence[MicroBatch], num_pipelines: int = 1, plan: Plan | None = None) -> Schedule:
        """For the next iteration of training, of a pipeline with these micro-batches.

        Args:
            plan: of the stages, which broadcast forward depends on; None: as was asked for.
        """
        shape = self._shape(parts, num_pipelines)
        return self.choice.schedule(shape, self._chosen.get(shape, 0), plan)

    def freeze(self, stages: int) -> None:
        """From now on so many stages, from the first, run forwards only. Every rank calls it before the iteration."""
        if stages != self.choice.frozen:
            self.choice.frozen = stages
            self.begin_again()

    def begin_again(self) -> None:
        """There is another plan: what was measured and decided was so for the one before. Every rank calls it."""
        self.advances.begin_again(self._number + 1, self._plan is not None)
        self._plan = None
        self.choice.begin_again()
        self.peaks.clear()
        self._chosen.clear()
        self._metered.clear()
        self._largest.clear()

    def _take(self, plan: Plan, num_microbatches: int) -> None:
        """The first iteration knows the plan, and its costs what to begin with."""
        if plan is self._plan or not self.choice.depends_on_plan:
            return
        self._plan = plan
        self.choice.follow(plan)
        if self.choice.adapts:
            self.advances.begin(self.choice.first_advance(num_microbatches))

    def measures(self, works: Sequence[Sequence[MicroBatch]], num_pipelines: int) -> bool:
        """Whether the memory of such an iteration will be measured. The same on every rank."""
        shape = self._shape(works[0], num_pipelines)
        return len(works) == num_pipelines and (shape, self._chosen.get(shape, 0)) not in self._metered

    @contextlib.contextmanager
    def iteration(
        self,
        task: Task,
        works: Sequence[Sequence[MicroBatch]],
        plan: Plan,
        schedule: Schedule,
        num_pipelines: int = 1,
    ) -> Iterator[None]:
        """An iteration, of training or not, runs within this context.

        Args:
            task: of pipeline 0.
            works: micro-batches of every pipeline that has a batch.
            plan: of the step.
            schedule: of pipeline 0.
            num_pipelines: N. Memory is measured when all of them have a batch.
        """
        if not task.trains:
            self._follows = False
            yield
            return
        shape = self._shape(works[0], num_pipelines)
        advance = self._chosen.get(shape, 0)
        self._take(plan, len(works[0]))
        meter = None
        if self.measures(works, num_pipelines):
            meter = self._meter(task, plan, works)
            self._metered.add((shape, advance))
        self._number += 1
        with (
            self._observers.having(*([] if meter is None else [meter])),
            self._stopwatch.lap(self._number) if self.choice.adapts else contextlib.nullcontext(),
        ):
            yield
        if meter is not None:
            self._measured(meter, plan, schedule, len(works[0]), num_pipelines)
        size = sum(part.size for work in works for part in work)
        self._largest[shape] = max(size, self._largest[shape])
        ordinary = self._follows and meter is None and not [*self._observers] and size == self._largest[shape]
        self._follows = True
        if self._cluster.rank == 0:
            if self.choice.adapts or meter is not None:
                self.advances.note(self._number, Ran(shape, advance, ordinary))
            if self.choice.adapts and meter is None:
                self.advances.estimate(plan, shape, schedule)

    def finish(self) -> Decisions:
        """After an iteration: hand in what was measured; on rank 0, decide. Every rank calls it."""
        if not self.choice.adapts and not self._report:
            return None  # the same on every rank
        report, self._report = (self._stopwatch.finished(), self._report), []
        for rank, reported in self._cluster.channels.control.report(report):
            self.advances.take(rank, reported)
        return self.advances.decide(self._chosen, self.peaks) if self._cluster.rank == 0 else None

    def accept(self, news: Decisions) -> None:
        """Every rank takes rank 0's decisions on, after the same iteration."""
        if news is not None:
            self._chosen.update({IterationShape(*values): advance for *values, advance in news[0]})
            self.peaks.update(news[1])

    def log(self, trainer: pl.Trainer) -> None:
        """Loggers get the last decision at the next step at which metrics are logged."""
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        if trainer.fit_loop._should_accumulate() or not (metrics := self.advances.metrics()):
            return
        metrics["avgpipe/peak_memory_bytes"] = float(max(self.peaks.values(), default=0))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _shape(self, parts: Sequence[MicroBatch], num_pipelines: int) -> IterationShape:
        """Of a batch; lengths are alike if the largest tensor has as many elements per sample, up to a factor of 2."""
        first = parts[0]
        elements = max((tensor.numel() for tensor in tree.tensors(first.data)), default=0) // max(1, first.size)
        return IterationShape(len(parts), num_pipelines, self._cluster.stage_map.num_stages, elements.bit_length())

    def _meter(self, task: Task, plan: Plan, works: Sequence[Sequence[MicroBatch]] = ()) -> Meter | None:
        """None where it cannot be measured: a step whose costs were not measured may not bear to be watched."""
        if port_of(self._cluster.device).memory.is_counted:
            return DeviceMeter(self._cluster.device)
        if not plan.measured:
            return None
        batches = tree.tensors((tuple(map(tuple, task.args)), [part.data for parts in works for part in parts]))
        return HostMeter([*self._module.parameters(), *self._module.buffers(), *self._beside(), *batches])

    def _measured(
        self, meter: Meter, plan: Plan, schedule: Schedule, num_microbatches: int, num_pipelines: int
    ) -> None:
        """Report what an iteration kept."""
        stages, groups, meeting = self._cluster.stages, self._cluster.stage_map.num_teams, self._meeting()
        held = holdings_of_models(
            plan, stages, self._module, self._optimizers(), num_microbatches, num_pipelines, groups, self._policy,
            rolling=meeting is not None, meeting=bool(meeting),
        )  # fmt: skip
        found = meter.finish(with_doubles(held, plan, schedule, self._module, num_pipelines))
        self._report += [(self._number, k, f.peak, f.crest, f.changes) for k, f in found.items()]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What rank 0 knows of advances; None if there is nothing to know."""
        return self.advances.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on where a run was saved: after the first iteration, when it is known what fits the memory."""
        self.advances.load_state_dict(state)

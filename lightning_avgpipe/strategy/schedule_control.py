"""Schedule control: which schedule an iteration of training runs with, and what is measured to choose it.

::

    every rank    iteration 7 ....... report: time, memory          accept: from iteration 8 on advance 2
    rank 0        iteration 7 ....... reports of 6 and 7, if there, decide: 2, to all after iteration 7

Nobody waits for a report: what comes late counts later. All ranks learn of a decision with what rank 0 publishes after
every iteration anyway, so all switch at the same one.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.clock import Stopwatch
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.accounting import DeviceMeter, Footprint, HostMeter, Meter
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.forecast import stage_costs
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.planning.model_memory import holdings_of_models, with_doubles
from lightning_avgpipe.schedule import (
    Action,
    Schedule,
    build,
    first_advance,
    forward_only,
    from_warm_up,
    in_turn,
    peak_stash,
    stepped_warm_up,
    uneven_steps,
    with_replicas,
)
from lightning_avgpipe.schedule.adaptive import WINDOW, AdaptiveAdvance, Decision, IterationShape
from lightning_avgpipe.schedule.broadcast import Broadcast, without_relays
from lightning_avgpipe.schedule.choice import SAFEST, fastest
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.own import Builder, of_function
from lightning_avgpipe.schedule.recipes import RECIPES, devices_of
from lightning_avgpipe.schedule.versions import POLICIES, WeightPolicy
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of

_log = logging.getLogger(__name__)

# Of advances, by shape, and measured peaks, by stage; None if there is nothing new.
Decisions = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]] | None


@dataclass(frozen=True)
class _Iteration:
    """What an iteration ran with, and whether its time says something: it was an ordinary one."""

    shape: IterationShape
    advance: int
    counts: bool


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
        beside: what parallel models have of their own that are not in the module, as of when it is called.
        splits: whether stages can split their backwards, as far as that is known.
        policy: which weights actions use.

    Attributes:
        peaks: stage -> bytes at its peak, as measured last; of all stages, on all ranks.
        frozen: how many stages, from the first, run forwards only.
        wanted: another placement of the stages, for the schedule that ``"auto"`` would take; None: as they are.
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
    ) -> None:
        self._policy = policy
        self._splits = splits
        self.wanted: Placement | None = None
        self._may_want = cluster.group.world_size > 1 and cluster.stage_map.reader == cluster.stage_map.leader
        self.peaks: dict[int, int] = {}
        self._observers = observers
        self._beside = beside
        self._given = Broadcast() if given == "broadcast" else given
        self._built: dict[tuple[int, int, int], Schedule] = {}
        self._passed: dict[int, Schedule] = {}  # by M: what it is instead, where values may pass stages
        self._fixed = 0 if advance == "auto" else advance
        self._adapts = advance == "auto" and given == "advance_forward" and cluster.group.world_size > 1
        self._cluster = cluster
        self._memory_limit = memory_limit
        self._module = module
        self._optimizers = optimizers
        self._plan: Plan | None = None
        self._stopwatch = Stopwatch(cluster.device)
        self.frozen = 0
        self._steps: tuple[int, ...] = (1,) * (cluster.stage_map.num_stages - 1)
        self._chosen: dict[IterationShape, int] = {}  # the same on every rank
        self._metered: set[tuple[IterationShape, int]] = set()
        self._largest: Counter[IterationShape] = Counter()
        self._number = 0
        self._follows = False  # on an ordinary iteration
        self._report: list[Any] = []  # of this rank, not yet handed in
        # on rank 0
        self._controller: AdaptiveAdvance | None = None
        self._loaded: dict[str, Any] | None = None
        self._iterations: dict[int, _Iteration] = {}
        self._times: dict[int, dict[int, float]] = defaultdict(dict)
        self._next = 1
        self._of_plan = 1  # the first iteration with this plan
        self._footprints: dict[IterationShape, dict[int, Footprint]] = defaultdict(dict)
        self._decided: dict[IterationShape, int] = {}
        self._too_large: set[IterationShape] = set()
        self._measured: dict[int, int] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._unlogged: Decision | None = None

    # -- every rank, for every iteration -----------------------------------------------------------------------------

    def schedule(self, parts: Sequence[MicroBatch], num_pipelines: int = 1, plan: Plan | None = None) -> Schedule:
        """For the next iteration of training, of a pipeline with these micro-batches.

        Args:
            plan: of the stages, which broadcast forward depends on; None: as was asked for.
        """
        shape = self._shape(parts, num_pipelines)
        return self._schedule_of(shape, self._chosen.get(shape, 0), plan)

    def fix(self, advance: int) -> None:
        """From now on every iteration has this advance. Every rank calls it after the same iteration."""
        self._fixed, self._adapts = advance, False

    def freeze(self, stages: int) -> None:
        """From now on so many stages, from the first, run forwards only. Every rank calls it before the iteration."""
        if stages != self.frozen:
            self.frozen = stages
            self.begin_again()

    def begin_again(self) -> None:
        """There is another plan: what was measured and decided was so for the one before. Every rank calls it."""
        if self._plan is not None:
            self._loaded = None  # which was meant for the first plan
        self._plan = self._controller = None
        self._steps = (1,) * (self._cluster.stage_map.num_stages - 1)
        self._of_plan = self._number + 1
        for known in (
            self.peaks, self._chosen, self._metered, self._largest, self._footprints, self._decided, self._too_large,
            self._measured, self._recent, self._built, self._passed,
        ):  # fmt: skip
            known.clear()  # type: ignore[attr-defined]

    @property
    def _limit(self) -> float:
        return self._memory_limit()

    def _take(self, plan: Plan, num_microbatches: int) -> None:
        """The first iteration knows the plan, and its costs what to begin with."""
        if plan is self._plan or not (self._adapts or self._given == "auto"):
            return
        self._plan, start = plan, 0
        self._built.clear()
        if not self._adapts:
            return
        if plan.measured:
            costs = stage_costs(plan, self.frozen)
            self._steps = uneven_steps(costs)
            start = first_advance(self._steps, num_microbatches, costs)
        self._controller = AdaptiveAdvance(start, self._predicted_peak, self._limit, self._warm_up)
        if self._loaded is not None:
            self._controller.load_state_dict(self._loaded)

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
        parts = works[0]
        if not task.trains:
            self._follows = False
            yield
            return
        shape = self._shape(parts, num_pipelines)
        advance = self._chosen.get(shape, 0)
        self._take(plan, len(parts))
        unmetered = self.measures(works, num_pipelines)
        meter = self._meter(task, plan, works) if unmetered else None
        if unmetered:
            self._metered.add((shape, advance))
        self._number += 1
        with (
            self._observers.having(*([] if meter is None else [meter])),
            self._stopwatch.lap(self._number) if self._adapts else contextlib.nullcontext(),
        ):
            yield
        if meter is not None:
            stages, groups = self._cluster.stages, self._cluster.stage_map.num_teams
            found = meter.finish(
                with_doubles(
                    holdings_of_models(
                        plan, stages, self._module, self._optimizers(), len(parts), num_pipelines, groups, self._policy
                    ), plan, schedule, self._module, num_pipelines,
                )
            )  # fmt: skip
            self._report += [(self._number, k, f.peak, f.crest, f.changes) for k, f in found.items()]
        size = sum(part.size for work in works for part in work)
        self._largest[shape] = max(size, self._largest[shape])
        ordinary = self._follows and meter is None and not [*self._observers] and size == self._largest[shape]
        self._follows = True
        if self._cluster.rank == 0:
            if self._adapts or meter is not None:  # news of it will come, though maybe not with the next news
                self._iterations[self._number] = _Iteration(shape, advance, ordinary)
            if meter is None and self._adapts and shape not in self._footprints:
                self._estimate(plan, shape, schedule)

    def finish(self) -> Decisions:
        """After an iteration: hand in what was measured; on rank 0, decide. Every rank calls it."""
        if not self._adapts and not self._report:
            return None  # the same on every rank
        laps, measured = self._stopwatch.finished(), self._report
        self._report = []
        for rank, (times, footprints) in self._cluster.control_channel.report((laps, measured)):
            for number, seconds in times:
                self._times[number][rank] = seconds
            for number, stage, *values in footprints:
                if number < self._of_plan:
                    continue
                replica, _ = self._cluster.stage_map.share(stage, rank)
                if replica == 0:  # the others have as many micro-batches, or one less
                    self._footprints[self._iterations[number].shape][stage] = Footprint(*values)
                self._measured[stage] = max(values[0], self._measured.get(stage, 0)) if replica else values[0]
        return self._decide() if self._cluster.rank == 0 else None

    def accept(self, news: Decisions) -> None:
        """Every rank takes rank 0's decisions on, after the same iteration."""
        if news is not None:
            self._chosen.update({IterationShape(*values): advance for *values, advance in news[0]})
            self.peaks.update(news[1])

    def log(self, trainer: pl.Trainer) -> None:
        """Loggers get the last decision at the next step at which metrics are logged."""
        connector = trainer._logger_connector
        if self._unlogged is None or not trainer.loggers or not connector.should_update_logs:
            return
        if trainer.fit_loop._should_accumulate():
            return
        metrics = {
            "avgpipe/advance": float(self._unlogged.advance),
            "avgpipe/iteration_s": statistics.median(self._recent),
            "avgpipe/peak_memory_bytes": float(max(self.peaks.values(), default=0)),
        }
        self._unlogged = None
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _shape(self, parts: Sequence[MicroBatch], num_pipelines: int) -> IterationShape:
        """Of a batch; lengths are alike if the largest tensor has as many elements per sample, up to a factor of 2."""
        first = parts[0]
        elements = max((tensor.numel() for tensor in tree.tensors(first.data)), default=0) // max(1, first.size)
        return IterationShape(len(parts), num_pipelines, self._cluster.stage_map.num_stages, elements.bit_length())

    def _schedule_of(self, shape: IterationShape, advance: int, plan: Plan | None = None) -> Schedule:
        if self._adapts:
            schedule = from_warm_up(self._warm_up(shape, advance), shape.num_microbatches, str(self._given))
            return forward_only(self._shared(schedule), self.frozen)
        key = shape.num_stages, shape.num_microbatches, self._fixed
        if key not in self._built:
            self._built[key] = self._shared(self._build(*key))
        schedule = self._built[key]
        if schedule.relays:
            if plan is None:
                return schedule
            if shape.num_microbatches not in self._passed:
                self._passed[shape.num_microbatches] = self._passing(schedule, plan)
            schedule = self._passed[shape.num_microbatches]
        return forward_only(schedule, self.frozen)

    def _shared(self, schedule: Schedule) -> Schedule:
        return with_replicas(schedule, self._cluster.stage_map.stage_replicas)

    def _build(self, num_stages: int, num_microbatches: int, advance: int) -> Schedule:
        if not isinstance(self._given, str):
            return of_function(self._given, num_stages, num_microbatches)
        if self._given == "auto":
            return self._choose(num_stages, num_microbatches)
        hosts = self._cluster.stage_map.group_size
        return build(self._given, num_stages, num_microbatches, advance, devices_of(self._given, num_stages, hosts))

    def _choose(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The same on every rank: all know the plan. The first iteration, before there is one, needs least memory."""
        plan = self._plan
        if plan is None or plan.forecast is None:
            return build(SAFEST, num_stages, num_microbatches)
        planned = peak_stash(build(SAFEST, num_stages, plan.forecast.num_microbatches))
        most, needs = self._limit, [stage.memory for stage in plan.stages]
        # micro-batches of a batch in fewer parts are larger
        larger = plan.forecast.num_microbatches / num_microbatches

        def fits(schedule: Schedule) -> bool:
            return all(
                need.held + (need.stash + need.boundary) * larger * now / before <= most
                for need, now, before in zip(needs, peak_stash(schedule), planned, strict=True)
            )

        owners, costs = self._cluster.stage_map.owners(), stage_costs(plan, self.frozen)
        chosen = fastest(costs, num_microbatches, owners, fits, self._splits, self._may_want)
        placement = RECIPES[chosen.name].placement
        if self._may_want and RECIPES[chosen.name].needs == "v" and self._cluster.stage_map.placement != placement:
            self.wanted, self._may_want = placement, False  # once; until then
            if self._cluster.rank == 0:
                _log.info("schedule %s: stages are placed there and back from the next plan on", chosen.name)
            chosen = fastest(costs, num_microbatches, owners, fits, self._splits)
        if self._cluster.rank == 0:
            _log.info("schedule %s from now on, for %d micro-batches", chosen.name, num_microbatches)
        return chosen

    def _passing(self, schedule: Schedule, plan: Plan) -> Schedule:
        """1F1B where a schedule in which values pass stages cannot be had, or loses by simulation.

        The same on every rank: all know the plan. One's own function is not judged.
        """
        if not schedule.relays:
            return schedule
        needs, given, why = [stage.memory.total for stage in plan.stages], self._given, ""
        gain = None
        if isinstance(given, Broadcast) and plan.measured:
            sizes = {name: parameter.nbytes for name, parameter in self._module.named_parameters()}
            weights = [sum(sizes[name] for name in stage.parameters) for stage in plan.stages]
            copy_s = [link.per_byte * size for link, size in zip(plan.links, weights, strict=False)]
            owners, costs = self._cluster.stage_map.owners(), stage_costs(plan)
            here = costs.on(owners) if len(set(owners)) > 1 else costs
            gain = given.gain(here, schedule.num_microbatches, owners, copy_s)
        if self.frozen:
            why = f"the first {self.frozen} stages have nothing to train"
        elif max(needs) > self._limit:
            k = needs.index(max(needs))
            why = f"with it stage {k} needs {nbytes(needs[k])}, more than memory_limit ({nbytes(self._limit)})"
        elif gain is not None and gain < 1:
            why = f"by simulation of the measured costs it is {gain:.2f} times as fast"
        if self._cluster.rank == 0:
            name, count = schedule.name, schedule.num_microbatches
            if why:
                _log.info("schedule 1f1b instead of %s, for %d micro-batches: %s", name, count, why)
            else:
                gains = "" if gain is None else f": by simulation {gain:.2f} times as fast as 1f1b"
                _log.info("schedule %s, for %d micro-batches%s", name, count, gains)
        return without_relays(schedule) if why else schedule

    def _warm_up(self, shape: IterationShape, advance: int) -> tuple[int, ...]:
        return stepped_warm_up(self._steps, shape.num_microbatches, advance)

    def _meter(self, task: Task, plan: Plan, works: Sequence[Sequence[MicroBatch]] = ()) -> Meter | None:
        """None where it cannot be measured: a step whose costs were not measured may not bear to be watched."""
        if port_of(self._cluster.device).counts_memory:
            return DeviceMeter(self._cluster.device)
        if not plan.measured:
            return None
        batches = tree.tensors((tuple(map(tuple, task.args)), [part.data for parts in works for part in parts]))
        return HostMeter([*self._module.parameters(), *self._module.buffers(), *self._beside(), *batches])

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _estimate(self, plan: Plan, shape: IterationShape, schedule: Schedule) -> None:
        """Where memory is not measured, go by the plan's estimates, which were made for this schedule."""
        for k, (stage, flights) in enumerate(zip(plan.stages, peak_stash(schedule), strict=True)):
            stash = (stage.memory.stash + stage.memory.boundary) // flights if flights else 0
            self._footprints[shape][k] = Footprint.estimated(stage.memory.held, stash, self._row(schedule, k))

    def _predicted_peak(self, shape: IterationShape, advance: int) -> list[float]:
        schedule, footprints = self._schedule_of(shape, advance), self._footprints[shape]
        return [footprints[k].predicted(self._row(schedule, k)) for k in range(shape.num_stages)]

    def _row(self, schedule: Schedule, stage: int) -> Sequence[Action]:
        """Of a stage, or of its first replica."""
        return in_turn(schedule[stage], 0, len(self._cluster.stage_map.ranks(stage)))

    def _decide(self) -> Decisions:
        """Take in what has arrived from all ranks, in order; what is new goes to all of them."""
        while len(times := self._times.get(self._next, {})) == self._cluster.group.world_size:
            if self._next >= self._of_plan:
                self._observe(self._iterations[self._next], max(times.values()))
            del self._times[self._next], self._iterations[self._next]
            self._next += 1
        if self._controller is not None:
            for shape, footprints in self._footprints.items():
                if shape not in self._decided and len(footprints) == shape.num_stages:
                    self._decided[shape] = self._first(self._controller, shape)
        chosen = {s: h for s, h in self._decided.items() if self._chosen.get(s, 0) != h}
        peaks = {k: peak for k, peak in self._measured.items() if self.peaks.get(k) != peak}
        if not chosen and not peaks:
            return None
        return tuple((*astuple(s), h) for s, h in chosen.items()), tuple(peaks.items())

    def _first(self, controller: AdaptiveAdvance, shape: IterationShape) -> int:
        """The advance that a shape begins with, or after a resume goes on with."""
        for stage, peak in enumerate(self._predicted_peak(shape, 0)):
            if peak > self._limit:
                self._too_large.add(shape)
                rank_zero_warn(
                    f"stage {stage} keeps {nbytes(peak)} at its peak, more than memory_limit ({nbytes(self._limit)}), "
                    "although the schedule is the one that needs least; use more micro-batches, or a higher limit"
                )
                return 0
        return controller.advance(shape)

    def _observe(self, iteration: _Iteration, seconds: float) -> None:
        shape, controller = iteration.shape, self._controller
        if controller is None or not iteration.counts or shape in self._too_large:
            return
        if iteration.advance != self._decided.get(shape):
            return  # it ran before the last decision had come round
        self._recent.append(seconds)
        decision = controller.observe(shape, seconds)
        if decision is not None:
            self._decided[shape] = decision.advance
            self._unlogged = decision
            _log.info("advance %d from now on: %s", decision.advance, decision.reason)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What rank 0's controller knows; None if there is nothing to know."""
        return self._loaded if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on where a run was saved: after the first iteration, when it is known what fits the memory."""
        self._loaded = state

"""Rehearsals: trial iterations of training whose effects are undone.

::

    first batch     -> a copy goes through the transfer hooks, and through any number of iterations
                    -> everything is restored
    the same batch  -> training begins, as if nothing had happened
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.comm.probe import ClockOffset
from lightning_avgpipe.engine.accounting import Footprint
from lightning_avgpipe.engine.observer import MemoryGuard
from lightning_avgpipe.engine.recording import Recorder, Recording
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import Holding, holdings
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.state.untouched import unchanged, untouched
from lightning_avgpipe.strategy.hooks import changes_batches
from lightning_avgpipe.strategy.iteration import STEP, Works
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.schedule_choice import ScheduleRequest
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.training.stepping import scalers_of, without_gradients
from lightning_avgpipe.tuning.profile import Setting
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import DummyLogger, pl
from lightning_avgpipe.utils.patching import all_replaced, noop, replaced
from lightning_avgpipe.verify.plain import quiet

_TIMES = 3  # timed repetitions of an optimizer step; the first also makes the optimizer states
_SUMS = 2  # timed sums over tied parameters, few since these may be large; the first also connects the processes


class _Trials(ScheduleControl):
    """A schedule control for trial iterations, separate from that of training.

    Attributes:
        planned_microbatches: number of micro-batches of the batch from which the plan was made.
        metered: whether memory is measured.
        kept: memory that the stages of this process kept in the last measured iteration; None if it was not measured.
    """

    planned_microbatches = 1
    metered = False
    kept: dict[int, Kept] | None = None

    def freeze(self, stages: int) -> None:
        """Do nothing, so that a backward of every stage is measured, also of stages with nothing to train."""

    @contextlib.contextmanager
    def iteration(self, task: Task, works: Works, plan: Plan, schedule: Schedule) -> Iterator[None]:
        """Run a trial iteration within this context."""
        meter = self._meter(task, plan) if self.metered else None
        with self.observers.with_added(*([] if meter is None else [meter])):
            yield
        if meter is not None:
            optimizers = [unwrapped(optimizer) for optimizer in self._context.trainer.optimizers]
            held = holdings(plan, self._cluster.stages, self._module, optimizers, self.planned_microbatches)
            self.kept = {k: Kept(found, held[k]) for k, found in meter.finish(held).items()}


@dataclass(frozen=True)
class Kept:
    """The memory of a stage in a trial iteration: what its actions keep, and what it holds with any schedule."""

    footprint: Footprint
    holding: Holding


class Rehearsal:
    """Runs trial iterations on one batch; constructed by :func:`rehearsing`. Every process makes the same calls.

    Attributes:
        trainer: trainer of the run.
        pipeline_run: run of the trainer.
        batch_size: number of samples of the batch.
        planned_microbatches: number of micro-batches of the batch from which the plan is made.
    """

    def __init__(self, trainer: pl.Trainer, run: PipelineRun, batch: Any) -> None:
        self.pipeline_run = run
        self.trainer = trainer
        self._module = trainer.lightning_module
        self._batch = batch
        self.batch_size = sum(part.size for part in run.loop.splitter.parts(copy.deepcopy(batch)))
        self.planned_microbatches = 1

    def prepare(self, num_microbatches: int) -> None:
        """Make the stages, as the first iteration of training would."""
        self.planned_microbatches = num_microbatches
        setting = Setting(self.planned_microbatches, schedule=str(self.pipeline_run.configuration.options.schedule))
        loop, (batches, rest) = self.pipeline_run.loop, self._begin(setting, self._trials(setting))
        loop.prepare(loop.new_iteration(STEP, batches, rest))

    def run(self, setting: Setting) -> Recording:
        """Run one iteration of one pipeline without an optimizer step, and return its recording.

        Raises:
            MemoryShortage: the iteration does not fit the memory of some process; all processes raise it.
        """
        cluster = self.pipeline_run.cluster
        trials = self._trials(setting)
        self.pipeline_run.models.clear_gradients(partial(nn.Module.zero_grad, self._module))
        recorder = Recorder(cluster.world.rank, cluster.device)
        with trials.observers.with_added(recorder, MemoryGuard()):
            self.pipeline_run.loop.order.train(*self._begin(setting, trials))
        return recorder.finish(ClockOffset(), cluster.waits.timeout_s)

    def kept(self, setting: Setting) -> dict[int, Kept] | None:
        """Run an iteration, and return the memory that each stage of this process keeps; None if it cannot be measured.

        Call it after another iteration.

        Raises:
            MemoryShortage: see :meth:`run`.
        """
        trials = self._trials(setting)
        trials.metered = True
        with trials.observers.with_added(MemoryGuard()):
            self.pipeline_run.loop.order.train(*self._begin(setting, trials))
        return trials.kept

    def step_s(self, after: Callable[[], None]) -> float:
        """Return the seconds that the optimizers' steps take in this process. Call it after an iteration.

        Weights and optimizer states are restored when this method returns.

        Args:
            after: called once the optimizers have states.
        Raises:
            MemoryShortage: the states do not fit the memory of some process.
        """
        own = [p for p in self._module.parameters() if not p.is_meta]
        weights = [p.detach().cpu().clone() for p in own]

        def step() -> None:
            for optimizer in self._optimizers:
                type(optimizer).step(optimizer)  # the class's method: schedulers wrap the instance's, to count steps

        with contextlib.ExitStack() as undo:
            for optimizer in self._optimizers:
                undo.enter_context(unchanged(optimizer))
                for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                    undo.enter_context(replaced(optimizer, hooks, OrderedDict()))
            try:
                seconds = self._guarded(lambda: self._fastest_s(step), "the optimizer's step")
                after()
            finally:
                with torch.no_grad():
                    for parameter, weight in zip(own, weights, strict=True):
                        parameter.copy_(weight)
        return seconds

    def tied_s(self) -> float:
        """Return the seconds that it takes to sum the gradients of tied parameters over their stages.

        Call it after an iteration. Every process calls it.
        """
        deployment, world = self.pipeline_run.deployment, self.pipeline_run.cluster.world
        assert deployment.plan is not None
        times = _SUMS if deployment.plan.copied else 0
        wait = partial(world.barrier, "sums over tied parameters, which are timed")
        return self._fastest_s(deployment.parallel.sum_copied_gradients, times, wait)

    def averaging_s(self) -> float:
        """Return the seconds that this process takes to average one model with a reference.

        Raises:
            MemoryShortage: another model and another reference do not fit the memory of some process.
        """

        def run() -> float:
            own = [p.detach() for p in self._module.parameters() if not p.is_meta and p.requires_grad]
            model, centre = [t.clone() for t in own], [t.clone() for t in own]
            return self._fastest_s(lambda: AveragingStep([model], centre, 1).end(0.5, 1.0))

        return self._guarded(run, "averaging")

    def _guarded(self, do: Callable[[], float], what: str) -> float:
        """Return the result of ``do``; raise MemoryShortage on all processes if memory runs out in one of them."""
        guard, found = MemoryGuard(), [0.0]
        guard.run(lambda: found.append(do()), what)
        guard.agree(self.pipeline_run.cluster.world)
        return found[-1]

    def _fastest_s(self, do: Callable[[], None], times: int = _TIMES, before: Callable[[], object] = noop) -> float:
        """Return the seconds of the fastest of several runs of ``do``, without ``before``; 0 if there are no runs."""
        seconds = []
        for _ in range(times):
            before()
            begin = self._now()
            do()
            seconds.append(self._now() - begin)
        return min(seconds, default=0.0)

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [unwrapped(o) for o in self.trainer.optimizers]

    def _trials(self, setting: Setting) -> _Trials:
        run, request = self.pipeline_run, ScheduleRequest(setting.schedule, setting.advance)
        trials = _Trials(request, run.context, run.deployment.parallel, run.loop.schedule_control.observers)
        trials.planned_microbatches = self.planned_microbatches
        return trials

    def _begin(self, setting: Setting, trials: _Trials) -> tuple[list[Any], tuple[Any, ...]]:
        """Begin an iteration, and return its batches and the other arguments of the step."""
        run, configuration, m = self.pipeline_run, self.pipeline_run.configuration, setting.num_microbatches
        configuration.options = replace(configuration.options, num_pipelines=1, num_microbatches=m)
        run.loop.schedule_control = trials
        batch = run.context.distributor.seal(copy.deepcopy(self._batch), 0)  # a step may change its batch
        self._module._current_fx_name = "on_train_batch_start"
        self._module.on_train_batch_start(batch, 0)
        self._module._current_fx_name = "training_step"
        _, *rest = self.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values()
        return [batch], tuple(rest)

    def _now(self) -> float:
        port_of(self.pipeline_run.cluster.device).synchronize()
        return time.perf_counter()


@contextlib.contextmanager
def rehearsing(
    trainer: pl.Trainer, run: PipelineRun, batch: Any, num_microbatches: Callable[[int], int]
) -> Iterator[Rehearsal]:
    """Allow trial iterations on a batch within this context, and restore everything after it, bit for bit.

    These are restored: gradients, buffers, attributes of all submodules and of the datamodule, the precision plugin's
    state, collected logs, and the state of all random number generators. Callbacks, loggers and hooks around the
    backward are not called. The stages are kept, since training would make the same ones.

    Args:
        trainer: trainer that is about to use its first batch of training.
        run: run of the trainer.
        batch: batch as read from the dataloader; it is not changed.
        num_microbatches: returns, for a batch size, the number of micro-batches for which the stages are planned.
    """
    module = trainer.lightning_module
    changing = (run.configuration, "options"), (run.loop, "schedule_control"), (run.models, "num_fed")
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.enable_grad())
        undo.enter_context(_silenced(trainer, module))
        undo.enter_context(without_gradients(module.parameters()))
        if trainer.datamodule is not None and changes_batches(trainer):  # type: ignore[attr-defined]
            undo.enter_context(unchanged(trainer.datamodule))  # type: ignore[attr-defined]
        undo.enter_context(untouched(module))
        undo.enter_context(all_replaced((owner, name, getattr(owner, name)) for owner, name in changing))
        undo.enter_context(replaced(run.loop, "verifier", None))
        undo.enter_context(run.models.step_log.discarding_logs())
        undo.enter_context(run.deployment.parallel.trying())
        rehearsal = Rehearsal(trainer, run, run.batches.copied(batch))
        rehearsal.prepare(num_microbatches(rehearsal.batch_size))
        yield rehearsal
    if (plan := run.deployment.plan) is not None:
        run.deployment.holdings.equalise_start(plan.copied)  # buffers are again as each process has made them


@contextlib.contextmanager
def _silenced(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Call no callback, logger or backward hook within this context, and restore the gradient scalers after it."""
    loggers = trainer.loggers
    with contextlib.ExitStack() as undo:
        undo.enter_context(unchanged(trainer.precision_plugin))
        for scaler in scalers_of(trainer.precision_plugin):
            undo.enter_context(unchanged(scaler))
        undo.enter_context(quiet(trainer, "on_before_backward", "on_after_backward"))
        undo.enter_context(replaced(module, "_current_fx_name", None))
        undo.callback(setattr, trainer, "loggers", loggers)
        trainer.loggers = [DummyLogger() for _ in loggers]
        yield

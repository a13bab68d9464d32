"""Runs whose steps cannot be split into micro-batches, and so run whole, as they are written.

In one process such steps run as on one device. With several processes, each holds a part of the module, and all of them
run the same steps in lockstep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import parameters_in
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.alone import alone, in_hook
from lightning_avgpipe.engine.joint import Exchange
from lightning_avgpipe.engine.lockstep import Lockstep
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import Conditions, UpdateScheme, limit_of, memory_of, state_copies
from lightning_avgpipe.schedule import build
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.absent_weights import AbsentWeights
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.context import Own, RunContext
from lightning_avgpipe.strategy.deploying import announce, deploy, give_back
from lightning_avgpipe.strategy.gradient_check import GradientCheck
from lightning_avgpipe.strategy.hooks import AROUND_WHOLE_STEPS
from lightning_avgpipe.strategy.log import SyncedLoggerConnector
from lightning_avgpipe.strategy.metric_objects import BatchValues, local_metrics, metrics_of
from lightning_avgpipe.strategy.parallel_models import check_number
from lightning_avgpipe.training.stepping import NormsOverStages, scaling_together
from lightning_avgpipe.utils.lightning import is_overridden, is_param_in_hook_signature, pl
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.weights.by_size import divide_by_size
from lightning_avgpipe.weights.initialisation import on_meta

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def why_whole(module: pl.LightningModule) -> str | None:
    """Return why the steps of a module run whole; None if a pipeline may run them.

    A pipeline decides when a backward or an optimizer runs, and which samples a step sees. If the module decides this
    itself, its steps run as they are written.
    """
    if not module.automatic_optimization:
        return "uses manual optimization, in which training_step itself runs backwards and optimizers"
    if is_overridden("backward", module):
        return "overrides backward()"
    for name in _STEPS:
        step = getattr(module, name)
        own = getattr(step, "__func__", step)
        if callable(step) and is_param_in_hook_signature(own, "dataloader_iter", explicit=True):
            return f"takes dataloader_iter in {name}, which reads batches itself"
    return None


class PassthroughRun:
    """A run in which everything is as with Lightning's own strategy for one device.

    It has one process, with one stage and one micro-batch or steps that run whole.
    """

    plan: Plan | None = None

    def __init__(self, context: RunContext) -> None:
        self.check = GradientCheck(context)
        self._context = context

    def setup(self) -> None:
        """Do nothing: Lightning's own set-up is enough."""

    def model_to_device(self, own: Own) -> None:
        """Initialise everything that is on the meta device, and move the module to the device."""
        self._context.state.fill()
        own()

    def batch_to_device(self, own: Own, batch: Any, dataloader_idx: int) -> Any:
        """Move the batch to the device, with its transfer hooks."""
        return own()

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's own step."""
        return own(*args, **kwargs)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Run Lightning's own optimizer step, unless a gradient is infinite or NaN."""
        return own(optimizer, self.check.wrap_closure(closure), model, **kwargs)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Return an empty context: the module is the only model, and also the reference."""
        check_number(number or 0, 1)
        return contextlib.nullcontext()

    def teardown(self) -> None:
        """Do nothing."""


class WholeRun(PassthroughRun):
    """A run of the trainer in which all processes run whole steps in lockstep.

    Attributes:
        plan: plan of the process that owns each parameter and buffer; None before the first step.
        check: check of gradients before each optimizer step.
        absent_weights: wraps the hooks of callbacks, which each process runs for itself.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.absent_weights = AbsentWeights(context.trainer, None)
        self._trainer, self._cluster = context.trainer, context.cluster
        self._module = context.module
        self._batches = Batches(context)
        self._lockstep: Lockstep | None = None
        self._undo = contextlib.ExitStack()

    def setup(self) -> None:
        """Prepare the run; the module is divided when the first step begins."""
        context, trainer, cluster, enter = self._context, self._trainer, self._cluster, self._undo.enter_context
        deployment = self._deployment = deploy(context)
        context.state.begin(deployment)
        enter(intercepting())
        enter(all_replaced(local_metrics(metrics_of(self._module), BatchValues(), cluster.leaders, lambda: False)))
        enter(all_replaced(self._in_lockstep()))
        enter(scaling_together(trainer.precision_plugin, cluster, lambda optimizer: []))
        enter(changes.adapting_to_processes(context, deployment))
        enter(all_replaced(changes.gathering_weights_at_end(context, deployment)))
        enter(all_replaced(changes.without_inference_mode(trainer)))
        enter(all_replaced(changes.examples_beside_weights(self._module, lambda: self._lockstep is not None)))
        guarded = self.absent_weights.replacements()
        enter(all_replaced(each for each in guarded if each[0] is not self._module))  # its hooks run in lockstep
        enter(all_replaced(changes.syncing_metrics(trainer, self._connector.sync)))
        self._undo.callback(give_back, context, deployment)

    def _divide(self) -> dict[str, int]:
        """Divide the module by the size of its parts; return the rank of the owner of each parameter or buffer."""
        options, cluster, module = self._context.configuration.options, self._cluster, self._module
        conditions = Conditions(build("afab", 1, 1), state_copies=state_copies(self._trainer.optimizers))
        held = memory_of(module, conditions, UpdateScheme(), 0).persistent
        limit = limit_of(options.memory_limit, cluster.device, self._context.sharing_stages)
        num_stages = cluster.stage_map.num_stages
        self.plan = divide_by_size(module, num_stages, held, options.split_points, limit, metrics_of(module))
        owner = self._deployment.place_parameters(self.plan)
        announce(self.plan, cluster)
        return owner

    def teardown(self) -> None:
        """Give every process the whole module back."""
        self._undo.close()

    def model_to_device(self, own: Own) -> None:
        """Do nothing: weights are moved once the module is divided."""

    def batch_to_device(self, own: Own, batch: Any, dataloader_idx: int) -> Any:
        """Return the reader's batch on every rank's device, after its transfer hooks."""
        return self._batches.to_device(batch, dataloader_idx)

    # -- lockstep ----------------------------------------------------------------------------------------------------

    @property
    def lockstep(self) -> Lockstep:
        """The lockstep of all processes. The first access, which every process makes, divides the module."""
        if self._lockstep is None:
            owner, exchange = self._divide(), Exchange(self._cluster)
            self._lockstep = Lockstep(self._module, exchange, owner, metrics_of(self._module))
        return self._lockstep

    def _in_lockstep(self) -> Iterator[Replacement]:
        module, loop = self._module, self._trainer.fit_loop.epoch_loop
        yield module, "log", partial(self._log, module.log)
        yield module, "clip_gradients", partial(self._clip, module.clip_gradients)
        for optimization in (loop.automatic_optimization, loop.manual_optimization):
            yield optimization, "run", partial(self._run, optimization.run)
        for name in AROUND_WHOLE_STEPS:
            if is_overridden(name, module):
                yield module, name, self._together(name, getattr(module, name))
        for each in (*self._trainer.optimizers, *self._trainer.strategy._lightning_optimizers):
            yield each, "zero_grad", self._by_itself(each.zero_grad)  # type: ignore[attr-defined]
        for optimizer in self._trainer.optimizers:
            yield optimizer, "step", self._stepping(optimizer)

    @property
    def _connector(self) -> SyncedLoggerConnector:
        connector = self._trainer._logger_connector
        assert isinstance(connector, SyncedLoggerConnector)  # a single process runs whole steps as on one device
        return connector

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run a step in lockstep; a training step is called within :meth:`_run`, which is in lockstep already."""
        if name == "training_step":
            return own(*args, **kwargs)
        with self.lockstep.running(name, shows_output=False), alone():
            return own(*args, **kwargs)

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's optimization of one batch in lockstep; all processes know rank 0's metrics afterwards."""
        with self.lockstep.running("training_step", shows_output=False), alone():
            result = run(*args, **kwargs)
        self._connector.accept(self._cluster.control.relay(self._connector.snapshot())[0])
        return result

    def _together(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that all processes run in lockstep, except ``on_train_end`` if each has all weights again."""

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "on_train_end" and not self._cluster.group.count(on_meta(self._module)):
                return hook(*args, **kwargs)
            if name.endswith("_epoch_end") and not self._trainer.sanity_checking:
                self._connector.sync()
            with self.lockstep.running(name), alone(), in_hook():
                return hook(*args, **kwargs)

        return run

    # -- what each process does for itself -------------------------------------------------------------------------

    def _by_itself(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.lockstep.per_process():
                return method(*args, **kwargs)

        return run

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Step this process's parameters; the closure runs on all processes in lockstep."""
        with self.absent_weights.suspended(), self.lockstep.per_process():
            checked = self.check.wrap_closure(self._closure_in_lockstep(optimizer, closure))
            return own(optimizer, checked, model, **kwargs)

    def _stepping(self, optimizer: Optimizer) -> Callable[..., Any]:
        step = optimizer.step

        @functools.wraps(step)
        def run(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            with self.lockstep.per_process():
                if closure is not None:
                    return step(self._closure_in_lockstep(optimizer, closure), **kwargs)
                self.lockstep.agree_on_gradients(parameters_in(optimizer))
                return step(**kwargs)

        return run

    def _closure_in_lockstep(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs in lockstep, and then makes gradients that all processes have equal."""

        def run() -> Any:
            with self.lockstep.in_lockstep():
                result = closure()
            self.lockstep.agree_on_gradients(parameters_in(optimizer))
            return result

        return run

    def _clip(self, clip: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients by their norm over all processes."""
        with self.lockstep.per_process(), NormsOverStages(self._cluster).clipping(parameters_in(optimizer)):
            return clip(optimizer, *args, **kwargs)

    def _log(self, log: Callable[..., Any], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0 a value that another process may hold."""
        lockstep = self._lockstep
        if lockstep is not None and lockstep.joint.runs:
            raise AvgPipeError(
                f"self.log({name!r}) is called inside a submodule that one process runs; return the value and log it "
                "in the step"
            )
        if lockstep is not None and lockstep.follows and isinstance(value, Tensor):
            value = lockstep.contents(value)
        if self._cluster.rank == 0:
            with contextlib.nullcontext() if lockstep is None else lockstep.per_process():
                log(name, value, *args, **kwargs)

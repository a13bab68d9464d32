"""Whole steps: steps that cannot be split into micro-batches, and run as they are written.

In one process such steps run as on one device. On several processes each holds a part of the module, and all of them
run the same steps in lockstep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe.averaging.optimizer_clone import parameters_in
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.exchange import Exchange
from lightning_avgpipe.engine.lockstep import Lockstep
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.strategy.log import SyncedLoggerConnector
from lightning_avgpipe.strategy.metric_objects import BatchValues, local_metrics
from lightning_avgpipe.training.stepping import norms_over_stages
from lightning_avgpipe.utils.lightning import is_overridden, is_param_in_hook_signature, pl
from lightning_avgpipe.utils.patching import replaced

# Hooks of the LightningModule in which it may call its submodules or look at their weights.
_HOOKS = (
    *(
        f"on_{stage}{what}_{when}"
        for stage in ("train", "validation", "test", "predict")
        for what in ("", "_epoch", "_batch")
        for when in ("start", "end")
    ),
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def why_whole(module: pl.LightningModule) -> str | None:
    """Return why the steps of a module run whole; None if a pipeline may run them.

    A pipeline decides when a backward or an optimizer runs, and which samples a step sees. The steps of a module that
    decides this itself run as they are written.
    """
    if not module.automatic_optimization:
        return "uses manual optimization, in which training_step itself runs backwards and optimizers"
    if is_overridden("backward", module):
        return "overrides backward()"
    for name in _STEPS:
        step = getattr(module, name)
        if callable(step) and _takes_iterator(_own(step)):
            return f"takes dataloader_iter in {name}, which reads batches itself"
    return None


def _own(step: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(step, "__func__", step)  # type: ignore[no-any-return]


def _takes_iterator(step: Callable[..., Any]) -> bool:
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


class WholeSteps:
    """The whole steps of one run of the trainer on several processes.

    Args:
        trainer: trainer whose loops run the steps.
        cluster: the connected processes.
        divide: gives every process its part of the module; returns the name of what only one process holds -> its rank.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        cluster: Cluster,
        divide: Callable[[], Mapping[str, int]],
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._cluster = cluster
        self._divide = divide
        self._lockstep: Lockstep | None = None

    @property
    def lockstep(self) -> Lockstep:
        """The lockstep of all processes. Every process makes the first access together, which divides the module."""
        if self._lockstep is None:
            owner, exchange = self._divide(), Exchange(self._cluster)
            metrics = [m for m in self._module.modules() if isinstance(m, Metric)]
            self._lockstep = Lockstep(self._module, exchange, owner, metrics)
        return self._lockstep

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """Within this context trainer and module are changed as lockstep needs it."""
        module, loop = self._module, self._trainer.fit_loop.epoch_loop
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        with contextlib.ExitStack() as undo:
            undo.enter_context(intercepting())
            undo.enter_context(replaced(module, "log", functools.partial(self._log, module.log)))
            undo.enter_context(replaced(module, "clip_gradients", functools.partial(self._clip, module.clip_gradients)))
            undo.enter_context(local_metrics(metrics, BatchValues(), self._cluster.leaders, lambda: False))
            for optimization in (loop.automatic_optimization, loop.manual_optimization):
                undo.enter_context(replaced(optimization, "run", functools.partial(self._run, optimization.run)))
            for name in _HOOKS:
                if is_overridden(name, module):
                    undo.enter_context(replaced(module, name, self._together(name, getattr(module, name))))
            for each in (*self._trainer.optimizers, *self._trainer.strategy._lightning_optimizers):
                clear = self._apart(each.zero_grad)  # type: ignore[attr-defined]
                undo.enter_context(replaced(each, "zero_grad", clear))
            for optimizer in self._trainer.optimizers:
                undo.enter_context(replaced(optimizer, "step", self._stepping(optimizer)))
            yield

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self, name: str, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step in lockstep."""
        with self.lockstep.running(name, speaks=False), alone():
            return step(*args)

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one batch of training in lockstep; all processes know the metrics of rank 0 afterwards."""
        with self.lockstep.running("training_step", speaks=False), alone():
            result = run(*args, **kwargs)
        connector = self._trainer._logger_connector
        if isinstance(connector, SyncedLoggerConnector):
            metrics, _ = self._cluster.channels.control.relay(connector.snapshot(), None)
            connector.accept(metrics)
        return result

    def _together(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that all processes run in lockstep."""

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            connector = self._trainer._logger_connector
            decides = name.endswith("_epoch_end") and not self._trainer.sanity_checking
            if decides and isinstance(connector, SyncedLoggerConnector):
                connector.sync()
            with self.lockstep.running(name), alone():
                return hook(*args, **kwargs)

        return run

    # -- what each process does for itself -------------------------------------------------------------------------

    def _apart(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.lockstep.quiet():
                return method(*args, **kwargs)

        return run

    def optimizer_step(
        self, step: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step this process's parameters; the closure runs on all processes in lockstep."""
        with self.lockstep.quiet():
            return step(optimizer, self._closed(optimizer, closure), *args, **kwargs)

    def _stepping(self, optimizer: Optimizer) -> Callable[..., Any]:
        step = optimizer.step

        @functools.wraps(step)
        def run(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            with self.lockstep.quiet():
                if closure is not None:
                    return step(self._closed(optimizer, closure), **kwargs)
                self.lockstep.agree_on_gradients(parameters_in(optimizer))
                return step(**kwargs)

        return run

    def _closed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self.lockstep.again():
                result = closure()
            self.lockstep.agree_on_gradients(parameters_in(optimizer))
            return result

        return run

    def _clip(self, clip: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Clip by the norm over all processes."""
        with self.lockstep.quiet(), norms_over_stages(parameters_in(optimizer), self._cluster):
            return clip(optimizer, *args, **kwargs)

    def _log(self, log: Callable[..., Any], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0; the value may be held by another process."""
        lockstep = self._lockstep
        if lockstep is not None and lockstep.joint.runs:
            raise AvgPipeError(
                f"self.log({name!r}) is called inside a submodule that one process runs; return the value and log it "
                "in the step"
            )
        if lockstep is not None and lockstep.follows and isinstance(value, Tensor):
            value = lockstep.contents(value)
        if self._cluster.rank == 0:
            with contextlib.nullcontext() if lockstep is None else lockstep.quiet():
                log(name, value, *args, **kwargs)

"""Changes in Lightning while a pipeline runs; all of them are undone at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import parameters_in
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.hooks import has_any, users_hooks
from lightning_avgpipe.strategy.iteration import IterationOrder
from lightning_avgpipe.strategy.log import StepLog, SyncedLoggerConnector, looking_on
from lightning_avgpipe.strategy.metric_objects import local_metrics, metrics_of
from lightning_avgpipe.strategy.weight_averages import averaging_parts
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.stepping import norms_over_stages, without_gradients
from lightning_avgpipe.utils.lightning import (
    BaseFinetuning,
    BasePredictionWriter,
    RunningStage,
    ThroughputMonitor,
    grad_norm,
    is_overridden,
    pl,
    result,
)
from lightning_avgpipe.utils.patching import noop, replaced


@contextlib.contextmanager
def observing(trainer: pl.Trainer, step_log: StepLog, leaders: Collectives) -> Iterator[None]:
    """Within this context ``self.log`` collects over micro-batches, and metric objects only observe values."""
    module = trainer.lightning_module
    with contextlib.ExitStack() as undo:
        undo.enter_context(intercepting())
        undo.enter_context(replaced(module, "log", step_log.__call__))
        if is_overridden("log_dict", module):
            undo.enter_context(replaced(module, "log_dict", looking_on(module.log_dict)))
        undo.enter_context(replaced(module, "print", looking_on(module.print, rehearsed=False)))
        values, training = step_log.batch_values, lambda: bool(trainer.training)
        where = {"in_step": lambda: step_log.in_step, "elsewhere": lambda: step_log.elsewhere}
        undo.enter_context(local_metrics(metrics_of(module), values, leaders, training, **where))
        yield


@contextlib.contextmanager
def known_at_epoch_end(trainer: pl.Trainer) -> Iterator[None]:
    """Within this context all ranks know the metrics after the module's last hook of an epoch.

    Callbacks that monitor a metric run next.
    """
    connector, module = trainer._logger_connector, trainer.lightning_module
    epoch_end = module.on_train_epoch_end
    assert isinstance(connector, SyncedLoggerConnector)

    def on_train_epoch_end() -> None:
        epoch_end()
        if module._current_fx_name == "on_train_epoch_end":  # not where another hook calls this one
            connector.sync()

    with replaced(module, "on_train_epoch_end", on_train_epoch_end):
        yield


@contextlib.contextmanager
def _counting_groups(trainer: pl.Trainer, cluster: Cluster) -> Iterator[None]:
    """Within this context throughput is that of groups, in which several devices work on one batch."""
    with contextlib.ExitStack() as undo:
        for monitor in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(monitor, ThroughputMonitor):
                flops = monitor.available_flops and monitor.available_flops * cluster.group.world_size
                for stage, throughput in monitor._throughputs.items():
                    groups = cluster.stage_map.num_groups if stage is RunningStage.TRAINING else 1  # others share data
                    undo.enter_context(replaced(throughput, "world_size", groups))
                    undo.enter_context(replaced(throughput, "available_flops", flops))
        yield


@contextlib.contextmanager
def overlapping(trainer: pl.Trainer, order: IterationOrder, batches: Batches) -> Iterator[None]:
    """Within this context no iteration overlaps the end of an epoch, and a batch is moved to the device once."""
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    run, before_transfer = loop.run, module._on_before_batch_transfer

    def run_epoch(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        order.leave()

    def on_before_batch_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if batches.waits_for_its_turn else before_transfer(batch, dataloader_idx)

    with (
        replaced(loop, "run", run_epoch),
        replaced(module, "_on_before_batch_transfer", on_before_batch_transfer),
    ):
        yield


@contextlib.contextmanager
def showing_reference(trainer: pl.Trainer, deployment: Deployment) -> Iterator[None]:
    """Within this context validation sees the reference, and all models step with pipeline 0's hyper-parameters."""
    module, validation = trainer.lightning_module, trainer.fit_loop.epoch_loop.val_loop
    begin, end, clip = (
        validation._on_evaluation_model_eval, validation._on_evaluation_model_train, module.configure_gradient_clipping
    )  # fmt: skip

    def on_evaluation_model_eval() -> None:
        deployment.parallel.show_reference(True)
        begin()

    def on_evaluation_model_train() -> None:
        end()
        deployment.parallel.show_reference(False)

    @functools.wraps(clip)
    def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # the last hook before the step, after all hooks that may change a learning rate
        ensemble, first = deployment.parallel.ensemble, trainer.optimizers
        if ensemble is not None:  # the hooks of another pipeline may have changed that pipeline's own
            ensemble.optimizers.follow(None if any(optimizer is known for known in first) else optimizer)
        return clip(optimizer, *args, **kwargs)

    with (
        replaced(validation, "_on_evaluation_model_eval", on_evaluation_model_eval),
        replaced(validation, "_on_evaluation_model_train", on_evaluation_model_train),
        replaced(module, "configure_gradient_clipping", configure_gradient_clipping),
    ):
        yield


@contextlib.contextmanager
def without_inference_mode(trainer: pl.Trainer) -> Iterator[None]:
    """Within this context evaluation runs without gradients, but not in inference mode.

    A tensor that was made in inference mode does not tell whether code has written into it, so that a step which fills
    one from values of several stages could not be followed. Lightning does the same for FSDP and for gloo.
    """
    loops = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    with contextlib.ExitStack() as undo:
        for loop in loops:
            undo.enter_context(replaced(loop, "inference_mode", False))
        yield


@contextlib.contextmanager
def several_processes(trainer: pl.Trainer, cluster: Cluster, deployment: Deployment, early: bool) -> Iterator[None]:
    """Within this context all ranks know the metrics of rank 0, and callbacks that need results run on rank 0 only.

    Args:
        trainer: trainer of the run.
        cluster: the connected processes.
        deployment: deployment of the module on processes.
        early: whether batches are sent when they are read; else after the user's transfer hooks.
    """
    module, ends = trainer.lightning_module, [f"on_{stage}_epoch_end" for stage in ("train", "validation", "test")]
    looked_at = any(owner is not module for owner, _ in users_hooks(trainer, ends))  # those of the module rank 0 runs
    connector = SyncedLoggerConnector(trainer._logger_connector, cluster, looked_at)
    with contextlib.ExitStack() as undo:
        trainer._logger_connector = connector
        undo.callback(lambda: setattr(trainer, "_logger_connector", connector.detach()))
        undo.enter_context(replaced(BaseFinetuning, "filter_on_optimizer", staticmethod(_without_known)))
        # Only rank 0 logs: without this, Lightning would recommend sync_dist=True for every value.
        undo.enter_context(replaced(result, "_distributed_is_initialized", lambda: False))
        undo.enter_context(averaging_parts(trainer, module, deployment))
        undo.enter_context(_counting_groups(trainer, cluster))
        if cluster.world.rank != 0:
            for writer in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(writer, BasePredictionWriter):
                    undo.enter_context(replaced(writer, "write_on_batch_end", noop))
                    undo.enter_context(replaced(writer, "write_on_epoch_end", noop))
        if not cluster.reads:
            undo.enter_context(replaced(module, "_on_before_batch_transfer", _pass_on))
            if not early:  # then batches arrive converted
                undo.enter_context(replaced(trainer.precision_plugin, "convert_input", _pass_on))
        yield


def _without_known(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    known = {id(parameter) for parameter in parameters_in(optimizer)}
    return [parameter for parameter in params if id(parameter) not in known]


@contextlib.contextmanager
def sharing_at_end(
    trainer: pl.Trainer, cluster: Cluster, deployment: Deployment, drain: Callable[[], None]
) -> Iterator[None]:
    """Within this context hooks of the user at the end of training find all weights on every process, as with ddp.

    Args:
        trainer: trainer that trains.
        cluster: processes that divide the weights.
        deployment: the divided models.
        drain: called before weights are read, to drain the pipeline.
    """
    ends = trainer.fit_loop.on_run_end

    def on_run_end() -> None:
        own = torch.tensor(int(has_any(trainer, ["on_train_end"])), device="cpu")
        if not int(cluster.group.sum(own)):
            ends()
            return
        drain()
        with deployment.shared():
            ends()

    with replaced(trainer.fit_loop, "on_run_end", on_run_end):
        yield


@contextlib.contextmanager
def clipping(trainer: pl.Trainer, cluster: Cluster) -> Iterator[None]:
    """Within this context gradients are clipped by their norm over all stages, and norms over all stages are logged."""
    with contextlib.ExitStack() as undo:
        for owner, name in _clipping_hooks(trainer):
            undo.enter_context(
                replaced(owner, name, _with_norms(getattr(owner, name), trainer.lightning_module, cluster))
            )
        yield


def _clipping_hooks(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """Yield owners and names of the hooks in which gradients may be clipped, or looked at; every rank runs them."""
    yield trainer.lightning_module, "configure_gradient_clipping"
    for name in ("on_after_backward", "on_before_optimizer_step"):
        yield trainer.lightning_module, name
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if is_overridden(name, callback, pl.Callback):
                yield callback, name


def _with_norms(hook: Callable[..., Any], module: pl.LightningModule, cluster: Cluster) -> Callable[..., Any]:
    """Return a hook within which norms of gradients are taken over all stages."""

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        optimizers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Optimizer)]
        # in the optimizer's order, as Lightning clips: the rounding of a norm of norms depends on the order
        stepped = [p for optimizer in optimizers[:1] for p in parameters_in(optimizer)]
        known = {id(parameter) for parameter in stepped}
        parameters = [*stepped, *(p for p in module.parameters() if id(p) not in known)]
        with norms_over_stages(parameters, cluster), reports_over_stages(cluster):
            return hook(*args, **kwargs)

    return run


def _pass_on(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


# -- norms that user code asks for -------------------------------------------------------------------------------------


# Lightning's own function, which stays as it is while the code of grad_norm is replaced.
_of_process = FunctionType(grad_norm.__code__, grad_norm.__globals__, grad_norm.__name__, grad_norm.__defaults__)


@contextlib.contextmanager
def reports_over_stages(cluster: Cluster) -> Iterator[None]:
    """Within this context ``grad_norm`` reports the gradients of all processes. Each must call it equally often."""
    code, attributes = grad_norm.__code__, dict(vars(grad_norm))
    grad_norm.__code__ = _redirected.__code__
    grad_norm.over_stages = partial(_grad_norm_over_stages, cluster)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        grad_norm.__code__, grad_norm.__dict__ = code, attributes


def _grad_norm_over_stages(
    cluster: Cluster, module: nn.Module, norm_type: float | int | str, group_separator: str
) -> dict[str, Tensor]:
    """Return what ``grad_norm`` returns, for the gradients of all processes, on the host. Every process calls it."""
    prefix = "_".join(("grad", str(float(norm_type)), "norm"))
    with without_gradients(p for p in module.parameters() if p.is_meta):
        own = {name: norm.cpu() for name, norm in _of_process(module, norm_type, group_separator).items()}
    found = {name: norm for norms in cluster.group.exchange_objects(own) for name, norm in norms.items()}
    names = (f"{prefix}{group_separator}{name}" for name, _ in module.named_parameters())
    norms = {name: found[name] for name in names if name in found}
    if norms:
        norms[f"{prefix}_total"] = torch.tensor(list(norms.values()), device="cpu").norm(float(norm_type))
    return norms


def _redirected(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> Any:
    # its code takes the place of that of grad_norm, which finds itself in its own file
    return grad_norm.over_stages(module, norm_type, group_separator)  # type: ignore[attr-defined]

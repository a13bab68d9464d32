"""Changes to Lightning's objects while a pipeline runs; all of them are undone at the end."""

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
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.hooks import callbacks_reading_metrics, has_any, reads_metrics, users_hooks
from lightning_avgpipe.strategy.iteration import IterationOrder
from lightning_avgpipe.strategy.log import StepLog, SyncedLoggerConnector, observed_call
from lightning_avgpipe.strategy.loop import PipelineLoop
from lightning_avgpipe.strategy.metric_objects import local_metrics, metrics_of, set_device
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.stepping import NormsOverStages, without_gradients
from lightning_avgpipe.utils.lightning import (
    WEIGHT_AVERAGING,
    BaseFinetuning,
    BasePredictionWriter,
    ModelCheckpoint,
    RunningStage,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TrainerFn,
    grad_norm,
    is_overridden,
    pl,
    result,
)
from lightning_avgpipe.utils.patching import Replacement, all_replaced, noop
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import give_up


@contextlib.contextmanager
def observing(trainer: pl.Trainer, step_log: StepLog, leaders: Collectives) -> Iterator[None]:
    """Within this context ``self.log`` collects over micro-batches, and metric objects work on the last stage."""
    module, values = trainer.lightning_module, step_log.batch_values
    looks: list[Replacement] = [(module, "print", observed_call(module.print, rehearsed=False))]
    if is_overridden("log_dict", module):
        looks.append((module, "log_dict", observed_call(module.log_dict)))
    training, in_step, elsewhere = lambda: bool(trainer.training), step_log.in_step, step_log.lacks_results
    metrics = local_metrics(metrics_of(module), values, leaders, training, in_step, elsewhere)
    with intercepting(), all_replaced([(module, "log", step_log.__call__), *looks]), all_replaced(metrics):
        yield


def syncing_metrics(trainer: pl.Trainer, sync: Callable[[], None]) -> Iterator[Replacement]:
    """Yield replacements with which metrics are synced before each hook that may read what an earlier hook has logged.

    At the end of an epoch these are callbacks that monitor a metric, after the module's ``on_train_epoch_end``: all
    ranks must decide by the same values. At the end of a batch they are user callbacks after the first, schedulers that
    monitor a metric, which step after the module's hook, and Lightning's checkpoint callbacks, which come last.

    Args:
        trainer: trainer of the run.
        sync: sends rank 0's metrics to all ranks.
    """
    connector, module, at_end = trainer._logger_connector, trainer.lightning_module, "on_train_batch_end"
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    end_batch, end_epoch = connector.on_batch_end, module.on_train_epoch_end

    def after_syncing(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def synced(*args: Any, **kwargs: Any) -> Any:
            sync()
            return run(*args, **kwargs)

        return synced

    def on_batch_end() -> None:
        if trainer.training:
            sync()
        end_batch()

    def on_train_epoch_end() -> None:
        end_epoch()
        if module._current_fx_name == "on_train_epoch_end":  # not where another hook calls this one
            sync()

    for callback, name in callbacks_reading_metrics(trainer):
        yield callback, name, after_syncing(getattr(callback, name))
    checkpoints = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
    if any(owner not in checkpoints for owner, _ in users_hooks(trainer, [at_end])):
        if reads_metrics(trainer) or any(
            one.reduce_on_plateau and one.interval == "step" for one in trainer.lr_scheduler_configs
        ):
            yield connector, "on_batch_end", on_batch_end
        deciding = [c for c in checkpoints if c._every_n_train_steps or c._train_time_interval is not None]
        for checkpoint in deciding[:1]:
            yield checkpoint, at_end, after_syncing(checkpoint.on_train_batch_end)
    yield module, "on_train_epoch_end", on_train_epoch_end


def _counting_groups(trainer: pl.Trainer, cluster: Cluster) -> Iterator[Replacement]:
    """Yield replacements with which throughput monitors count groups of processes, each of which works on one batch."""
    for monitor in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(monitor, ThroughputMonitor):
            flops = monitor.available_flops and monitor.available_flops * cluster.group.world_size
            for stage, throughput in monitor._throughputs.items():
                groups = cluster.stage_map.num_groups if stage is RunningStage.TRAINING else 1  # all evaluate the same
                yield throughput, "world_size", groups
                yield throughput, "available_flops", flops


def ending_with_epoch(trainer: pl.Trainer, order: IterationOrder) -> Iterator[Replacement]:
    """Yield a replacement with which no iteration overlaps the end of an epoch."""
    loop = trainer.fit_loop.epoch_loop
    run = loop.run

    def run_epoch(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        order.put_back()

    yield loop, "run", run_epoch


def showing_reference(trainer: pl.Trainer, loop: PipelineLoop) -> Iterator[Replacement]:
    """Yield replacements with which validation sees the reference, and models step with pipeline 0's settings."""
    module, parallel = trainer.lightning_module, loop.deployment.parallel
    validation, clip = trainer.fit_loop.epoch_loop.val_loop, module.configure_gradient_clipping
    begin, end = validation._on_evaluation_model_eval, validation._on_evaluation_model_train

    def on_evaluation_model_eval() -> None:
        loop.order.drain()
        parallel.show_reference(True)
        loop.send_changes(loop.observed)  # if no hook between steps reads them, training may not have brought them yet
        begin()

    def on_evaluation_model_train() -> None:
        end()
        parallel.show_reference(False)

    @functools.wraps(clip)
    def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # this is the last hook before the step, after all hooks that may change a learning rate
        if parallel.ensemble is not None:
            parallel.ensemble.optimizers.follow()
        return clip(optimizer, *args, **kwargs)

    yield validation, "_on_evaluation_model_eval", on_evaluation_model_eval
    yield validation, "_on_evaluation_model_train", on_evaluation_model_train
    yield module, "configure_gradient_clipping", configure_gradient_clipping


def examples_beside_weights(module: pl.LightningModule, has_plan: Callable[[], bool]) -> Iterator[Replacement]:
    """Yield a replacement that moves example inputs to where the weights are, even before these are on the device.

    Lightning's model summary calls the module with ``example_input_array`` before the first batch.

    Args:
        module: module whose weights are on the host or on meta before there is a plan.
        has_plan: returns whether there is a plan, and weights are on the device.
    """
    move = module._apply_batch_transfer_handler

    @functools.wraps(move)
    def beside(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if device is None and not has_plan() and (parameter := next(module.parameters(), None)) is not None:
            device = parameter.device
        return move(batch, device, dataloader_idx)

    yield module, "_apply_batch_transfer_handler", beside


def without_inference_mode(trainer: pl.Trainer) -> Iterator[Replacement]:
    """Yield replacements with which evaluation runs without gradients, but not in inference mode.

    Tensors that were made in inference mode have no version counter, so writes to them cannot be followed, for example
    in a step that fills one with values of several stages. Lightning does the same for FSDP and for gloo.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        yield loop, "inference_mode", False


@contextlib.contextmanager
def adapting_to_processes(context: RunContext, deployment: Deployment) -> Iterator[None]:
    """Within this context all ranks have the metrics of rank 0, and callbacks that need results run on rank 0 only."""
    trainer, module, cluster = context.trainer, context.module, context.cluster
    ends = [f"on_{stage}_epoch_end" for stage in ("train", "validation", "test")]
    # hooks of callbacks only, since rank 0 alone runs those of the module
    callbacks_read_metrics = any(owner is not module for owner, _ in users_hooks(trainer, ends))
    connector = SyncedLoggerConnector(trainer._logger_connector, cluster, callbacks_read_metrics)
    trainer._logger_connector = connector
    try:
        with all_replaced([*_share_of_process(context), *_averaging_parts(trainer, deployment)]):
            yield
    finally:
        trainer._logger_connector = connector.detach()


def _share_of_process(context: RunContext) -> Iterator[Replacement]:
    """Yield replacements with which this process does only its share of what Lightning would do on every process."""
    trainer, cluster = context.trainer, context.cluster
    yield BaseFinetuning, "filter_on_optimizer", staticmethod(_without_known)
    # Only rank 0 logs: without this, Lightning would recommend sync_dist=True for every value.
    yield result, "_distributed_is_initialized", lambda: False
    yield from _counting_groups(trainer, cluster)
    if cluster.world.rank != 0:
        for writer in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(writer, BasePredictionWriter):
                yield writer, "write_on_batch_end", noop
                yield writer, "write_on_epoch_end", noop
    if not cluster.reads:
        yield trainer.lightning_module, "_on_before_batch_transfer", _pass_on
        if not context.distributor.sends_when_read:  # batches arrive converted, after the user's transfer hooks
            yield trainer.precision_plugin, "convert_input", _pass_on


def _without_known(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that the optimizer does not have; compared by identity, since some may be on meta."""
    known = {id(parameter) for parameter in parameters_in(optimizer)}
    return [parameter for parameter in params if id(parameter) not in known]


def gathering_weights_at_end(context: RunContext, deployment: Deployment) -> Iterator[Replacement]:
    """Yield a replacement that gives each process all weights during the hooks ``on_train_end``, as with ddp."""
    trainer, module, cluster = context.trainer, context.module, context.cluster
    ends = trainer.fit_loop.on_run_end

    def on_run_end() -> None:
        if not cluster.group.count(has_any(trainer, ["on_train_end"])):
            ends()
            return
        context.state.drain()
        with deployment.shared() as device:
            set_device(module, device)
            ends()
        set_device(module, cluster.device)

    yield trainer.fit_loop, "on_run_end", on_run_end


def clipping(trainer: pl.Trainer, norms: NormsOverStages) -> Iterator[Replacement]:
    """Yield replacements with which hooks clip gradients by norms over all stages, and ``grad_norm`` reports these.

    Every rank runs the hooks that may clip gradients or take their norms.
    """
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    hooks: list[tuple[Any, str]] = [(module, "configure_gradient_clipping")]
    for name in ("on_after_backward", "on_before_optimizer_step"):
        hooks += [(module, name), *((c, name) for c in callbacks if is_overridden(name, c, pl.Callback))]
    for owner, name in hooks:
        yield owner, name, _with_norms(getattr(owner, name), module, norms)


def _with_norms(hook: Callable[..., Any], module: pl.LightningModule, norms: NormsOverStages) -> Callable[..., Any]:
    """Return the hook, in which norms of gradients are now taken over all stages."""

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        optimizers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Optimizer)]
        # in the optimizer's order, as in Lightning, since the rounding of a norm of norms depends on the order
        stepped = [p for optimizer in optimizers[:1] for p in parameters_in(optimizer)]
        known = {id(parameter) for parameter in stepped}
        parameters = [*stepped, *(p for p in module.parameters() if id(p) not in known)]
        with norms.clipping(parameters), reports_over_stages(norms):
            return hook(*args, **kwargs)

    return run


def _pass_on(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


# -- averages of weights: each process averages the weights that it holds ----------------------------------------------


def _averaging_parts(trainer: pl.Trainer, deployment: Deployment) -> Iterator[Replacement]:
    """Yield replacements that divide averages of weights among the processes as the weights are, and save them whole.

    Raises:
        ConfigurationError: the callback copies the weights before training, but they are on the meta device.
    """
    module, holdings = trainer.lightning_module, deployment.holdings
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            if trainer.state.fn == TrainerFn.FITTING and on_meta(module):
                raise ConfigurationError(
                    f"{type(callback).__name__} copies the weights before training, but those of "
                    f"{type(module).__name__} are on the meta device until then; build it with contents, or remove the "
                    "callback"
                )
            holdings.copies.append(partial(getattr, callback, "_average_model"))
            yield from _from_an_epoch_on(callback, module, deployment)
        elif isinstance(callback, WEIGHT_AVERAGING) and callback._average_model is not None:  # None if not training
            holdings.copies.append(partial(getattr, callback._average_model, "module"))
            yield from _from_the_start_on(callback, module, deployment)


def _from_an_epoch_on(callback: Any, module: nn.Module, deployment: Deployment) -> Iterator[Replacement]:
    """Yield replacements for a callback whose average begins during training, as a copy of the divided module."""
    state_dict, average = callback.state_dict, callback._average_model

    def whole_state_dict() -> dict[str, Any]:
        state: dict[str, Any] = state_dict()
        if callback._average_model is not None:
            state["average_model_state"] = deployment.holdings.state_dict(callback._average_model)
        return state

    mean = callback._avg_fn  # may be the user's, which may need the numbers in a tensor

    def mean_of_present(averaged: Tensor, *others: Any) -> Tensor:
        return averaged if averaged.is_meta else mean(averaged, *others)

    yield callback, "_avg_fn", mean_of_present
    for name in ("update_parameters", "transfer_weights"):
        yield callback, name, _on_part(getattr(callback, name), module, lambda: callback._average_model)
    yield callback, "state_dict", whole_state_dict
    if average is not None:
        yield average, "to", partial(_move, average)


def _from_the_start_on(callback: Any, module: nn.Module, deployment: Deployment) -> Iterator[Replacement]:
    """Yield replacements for a callback whose average exists before the module is divided, and is divided with it."""
    average = callback._average_model

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        own = {name: buffer for name, buffer in average.named_buffers() if not name.startswith("module.")}
        return own | {f"module.{name}": value for name, value in deployment.holdings.state_dict(average.module).items()}

    swap, put, update = "_swap_models", "_copy_average_to_current", "update_parameters"
    for owner, name in ((callback, swap), (callback, put), (average, update)):
        yield owner, name, _on_part(getattr(owner, name), module, lambda: average.module)
    yield average, "state_dict", _on_part(state_dict, module, lambda: average.module)


def _on_part(function: Callable[..., Any], module: nn.Module, copy: Callable[[], nn.Module]) -> Callable[..., Any]:
    """Return a function that first drops the parameters from the copy that the module no longer has, then runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        give_up(copy(), [name for name, parameter in module.named_parameters() if parameter.is_meta])
        return function(*args, **kwargs)

    return run


def _move(average: nn.Module, device: torch.device | str) -> nn.Module:
    """Move the part of an average that this process holds: the average may already be divided when the epoch begins."""
    return average._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


# -- norms that user code takes ----------------------------------------------------------------------------------------


# A copy of Lightning's function, for use while the code of grad_norm is replaced.
_own_grad_norm = FunctionType(grad_norm.__code__, grad_norm.__globals__, grad_norm.__name__, grad_norm.__defaults__)


@contextlib.contextmanager
def reports_over_stages(norms: NormsOverStages) -> Iterator[None]:
    """Within this context ``grad_norm`` reports norms over all processes, which must all call it equally often."""
    code, attributes = grad_norm.__code__, dict(vars(grad_norm))
    grad_norm.__code__ = _redirected.__code__
    grad_norm.over_stages = partial(_grad_norm_over_stages, norms)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        grad_norm.__code__, grad_norm.__dict__ = code, attributes


def _grad_norm_over_stages(
    over_stages: NormsOverStages, module: nn.Module, norm_type: float | int | str, group_separator: str
) -> dict[str, Tensor]:
    """Return what ``grad_norm`` returns, for the gradients of all processes, on the host. Every process calls it."""
    over_stages.taken, prefix = True, "_".join(("grad", str(float(norm_type)), "norm"))
    with without_gradients(p for p in module.parameters() if p.is_meta):
        own = {name: norm.cpu() for name, norm in _own_grad_norm(module, norm_type, group_separator).items()}
    found = {name: norm for norms in over_stages.cluster.group.exchange_objects(own) for name, norm in norms.items()}
    names = (f"{prefix}{group_separator}{name}" for name, _ in module.named_parameters())
    norms = {name: found[name] for name in names if name in found}
    if norms:
        norms[f"{prefix}_total"] = torch.tensor(list(norms.values()), device="cpu").norm(float(norm_type))
    return norms


def _redirected(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> Any:
    # This code replaces that of grad_norm, so it runs with the global names of Lightning's file, such as grad_norm.
    return grad_norm.over_stages(module, norm_type, group_separator)  # type: ignore[attr-defined]

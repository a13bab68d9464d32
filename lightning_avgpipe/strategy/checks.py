"""Checks before training starts: each error says what was found, what is needed, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_avgpipe.averaging.optimizer_clone import unwrapped
from lightning_avgpipe.capture.tracer import is_compiled
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.schedule.own import of_function
from lightning_avgpipe.schedule.recipes import devices_of
from lightning_avgpipe.schedule.versions import Place
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.training.optimizer_shards import check_separable
from lightning_avgpipe.utils.lightning import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    is_overridden,
    pl,
    refuse_other,
)

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options


def overlapping(
    running: pl.Trainer, given: Options, num_stages: int, num_groups: int, replicas: int, tuned: bool
) -> None:
    """Check that batches of this run may overlap, if weight versions or rolling pipelines are asked for."""
    versions = not given.policy.drains
    single = given.num_pipelines == 1 and num_groups == 1 and not tuned
    if not versions and (given.averaging.rolling is not True or single):
        return
    option, instead = given.overlap
    use, plugin = f"or use {instead}", running.precision_plugin
    if any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in vars(plugin).values()):
        raise ConfigurationError(
            f"{option} with precision={plugin.precision!r}: a loss scaler skips the steps of all models and stages "
            f"together; use 'bf16-mixed', {use}"
        )
    if num_groups > 1 and (versions or replicas > 1):
        raise ConfigurationError(
            f"{option} with {num_groups} groups of processes ({'parallel models or ' * versions}replicas), which do a "
            f"part of each step together; use one group{' and num_pipelines' * (not versions)}, {use}"
        )
    if num_groups > 1 and tuned:
        raise ConfigurationError(
            f"{option} with AvgPipeTuner in {num_groups} groups of processes, which wait for each other while it "
            f"measures; remove it, {use}"
        )
    if tuned and versions:
        raise ConfigurationError(f"{option} with AvgPipeTuner, which times iterations one by one; remove it, {use}")
    if getattr(running, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            f"{option} and val_check_interval as a time: give it as a number of batches or a fraction, {use}"
        )
    if versions:
        _versions(running, given, num_stages, option, use)
    else:
        _rolling(running, use)


def _versions(running: pl.Trainer, given: Options, num_stages: int, option: str, use: str) -> None:
    accumulators = [c for c in running.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if running.accumulate_grad_batches > 1 or any(c.going_to_accumulate_grad_batches() for c in accumulators):
        raise ConfigurationError(
            f"{option} with accumulate_grad_batches: stages are updated after each batch; use larger batches, and more "
            f"of num_microbatches, {use}"
        )
    if num_stages > 1:
        try:
            given.policy.check(Place(0, num_stages, given.microbatches(num_stages)))
        except ScheduleError as error:
            raise ConfigurationError(str(error)) from error


def _rolling(running: pl.Trainer, use: str) -> None:
    module = running.lightning_module
    for name in ("on_before_zero_grad", "optimizer_zero_grad"):
        owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
        owners += [(callback, pl.Callback) for callback in running.callbacks]  # type: ignore[attr-defined]
        for owner, kind in owners:
            if hasattr(kind, name) and is_overridden(name, owner, kind):
                raise ConfigurationError(
                    f"Averaging(rolling=True) and {type(owner).__name__}.{name}: by then gradients of the next "
                    f"batch may have taken the place of those that it would see; use on_before_optimizer_step, {use}"
                )


def sharding(given: Options, num_models: int, replicas: int, tuned: bool) -> None:
    """Check that the processes of this run can divide optimizer states, if ``shard`` asks for it."""
    alone = replicas == 1 and not given.shares_stages
    if given.shard is not None and (num_models > 1 or tuned or alone):
        found = "AvgPipeTuner, which tries several models"
        if num_models > 1 or alone:
            found = f"{num_models} parallel models" if num_models > 1 else "one replica"
        raise ConfigurationError(
            f"shard={given.shard!r} with {found}: it is for replicas of one model, which divide what one would hold; "
            "use replicas=2 or more, one group, one pipeline and no tuner, or leave shard out"
        )


def processes(num_stages: int, layout: DeviceLayout) -> None:
    """Check that stages, replicas and groups take all processes, with the same number of stages on each device."""
    world_size, each = layout.world_size, layout.devices_of_replica
    copies = layout.replicas * layout.models
    size = sum(layout.stage_replicas) or min(num_stages, each)
    if size * copies != world_size:
        found = f"replicas={list(layout.stage_replicas) or layout.replicas}"
        count = world_size // size
        fits = size * count == world_size and count % layout.models == 0
        remedy = f"replicas={count // layout.models}, Averaging(groups={count})" if fits else ""
        raise ConfigurationError(
            f"num_stages={num_stages}, {found}, groups={layout.models} take {size * copies} processes, but there are "
            f"{world_size} ({layout}); use devices={size * copies // (layout.nodes * layout.sharing) or 1}"
            f"{f', or one of {remedy}' if remedy else ''}"
        )
    if not layout.stage_replicas and num_stages % each:
        below = num_stages // each * each
        raise ConfigurationError(
            f"num_stages={num_stages} on {each} devices{' of each replica' if copies > 1 else ''}: every device must "
            f"host the same number of stages; use num_stages={below} or {below + each}"
        )


def backend(name: str, device: torch.device) -> None:
    """Check that this build of torch has a backend for torch.distributed.

    Otherwise the error of connecting would blame the address.
    """
    for part in name.split(","):
        wanted = part.rpartition(":")[2]
        if not dist.is_backend_available(wanted):
            known = [known for known in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(known)]
            raise ConfigurationError(
                f"Links(backend={name!r}): torch {torch.__version__} has no backend {wanted!r} here, only "
                f"{', '.join(known)}; leave backend out, which chooses one for the device ({device})"
            )


def whole(model: pl.LightningModule, why: str, given: Options, num_groups: int) -> None:
    """Check that no option asks a module whose steps run whole for what such steps cannot do.

    Args:
        model: the module.
        why: why its steps run whole.
        given: options of the strategy.
        num_groups: number of groups of processes.
    """
    name = type(model).__name__
    asked = {
        "num_microbatches": (given.splits, "a batch stays whole; use 'auto', and a smaller batch"),
        "num_pipelines": (given.num_pipelines > 1, "there is one model; use num_pipelines=1"),
        "replicas": (given.replicates, "there is one copy of the model; use replicas=1, or strategy='ddp'"),
        "averaging.groups": ((given.averaging.groups or 1) > 1, "there is one model; leave groups out"),
        "averaging.processes_per_device": (
            given.averaging.processes_per_device > 1,
            "there is one model; use processes_per_device=1",
        ),
        "num_stages": (num_groups > 1, "more devices than stages make copies of the model; use num_stages='auto'"),
        "compile": (given.compile is not False, "call self.compile() in configure_model"),
        "recompute": (bool(given.recompute), "nothing is repeated; use torch.utils.checkpoint inside of a submodule"),
    }
    whole = f"{name} {why}; such steps run whole"
    combinations.refuse(given, asked, lambda option, what: f"{whole}, and with {option} that cannot be: {what}")


def contents(model: pl.LightningModule) -> None:
    """Check that all parameters and buffers of a module have a shape."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"'{lazy[0]}' of {type(model).__name__} has no shape before its first forward, and a model is divided into "
            "stages before that; run a batch through the model where it is built, or give layers their sizes "
            "(nn.Linear instead of nn.LazyLinear)"
        )


def optimizers(model: pl.LightningModule, found: Sequence[Optimizer], sharded: bool) -> None:
    """Check the optimizers that ``configure_optimizers`` returned; with ``sharded`` also that states can be divided."""
    for optimizer in found:
        if isinstance(unwrapped(optimizer), LBFGS):
            raise ConfigurationError(
                f"{type(model).__name__}.configure_optimizers returns LBFGS, which evaluates its closure several times "
                "per step; a pipeline evaluates it once. Use an optimizer without closure, such as SGD or AdamW"
            )
        if sharded:
            check_separable(unwrapped(optimizer))


def schedule(given: Options, num_stages: int, hosts: int) -> None:
    """Check that a schedule fits the stages and the processes that host them; try a user's function for each M."""
    try:
        if not isinstance(given.schedule, str):
            for count in range(1, given.microbatches(num_stages) + 1):  # the last batch may be small
                of_function(given.schedule, num_stages, count)
        elif given.schedule != "auto":
            devices_of(given.schedule, num_stages, hosts)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error


def stages(wanted: int, now: int, layout: DeviceLayout) -> None:
    """Check that the processes of a group can host another number of stages evenly, while training goes on.

    Args:
        wanted: new number of stages.
        now: present number of stages.
        layout: layout of all processes on devices.
    """
    size = layout.group_size(now)
    if wanted % size:
        raise ConfigurationError(
            f"reconfigure(num_stages={wanted}): {size} processes host the {now} stages of each group, so the number "
            f"must be a multiple of {size}; use num_stages={max(1, wanted // size) * size}"
        )
    if layout.groups(wanted) != layout.groups(now):
        raise ConfigurationError(
            f"reconfigure(num_stages={wanted}): {layout.num_devices} devices are {len(layout.groups(now))} groups with "
            f"num_stages={now} and would be {len(layout.groups(wanted))}, which stay as they are while training runs; "
            "begin with this number"
        )


def split_points(module: nn.Module, names: Sequence[str] | None, num_stages: int) -> None:
    """Check the number of split points; raise a PartitionError for those that name no submodule."""
    if names is not None:
        combinations.num_split_points(names, num_stages)
        Divisible(module).split((), names)


def trainer(running: pl.Trainer, world_size: int, num_pipelines: int = 1) -> None:
    """Check the trainer's options and callbacks, for several processes and parallel models."""
    if world_size > 1 or num_pipelines > 1:
        for callback in running.callbacks:  # type: ignore[attr-defined]
            refuse_other(type(callback).__name__, callback)
    if num_pipelines > 1:
        _one_model_only(running, num_pipelines)
    if world_size == 1:
        return
    if num_pipelines > 1 and running.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "sync_batchnorm=True makes the replicas of a stage wait for each other within an action, and "
            f"num_pipelines={num_pipelines} runs actions as they come; use num_pipelines=1, or remove it"
        )
    refused: list[tuple[type, str]] = [
        (BatchSizeFinder, "restarts training in ways that the stages cannot follow together"),
        (ModelPruning, "puts other parameters into layers of which each process holds a part"),
    ]
    for callback in running.callbacks:  # type: ignore[attr-defined]
        for kind, why in refused:
            if isinstance(callback, kind):
                raise ConfigurationError(
                    f"{type(callback).__name__} {why}, and is not supported on {world_size} processes yet; remove it, "
                    "or use one (devices=1)"
                )
    averaged = any(isinstance(c, weight_averaging()) for c in running.callbacks)  # type: ignore[attr-defined]
    if averaged and running.strategy.save_distributed_checkpoint:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "save_distributed_checkpoint=True saves the weights that each process holds, but WeightAveraging puts "
            "averages in their place; use save_distributed_checkpoint=False"
        )
    if getattr(running, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            "val_check_interval as a time differs between processes; give it as a number of batches or a fraction"
        )


_IN_ONE_ORDER = ("advance_forward", "1f1b", "afab")


def synchronised(running: pl.Trainer, given: Options, stage_map: StageMap) -> None:
    """Check ``Trainer(sync_batchnorm=True)``: all replicas of a stage must run their actions in the same order."""
    layer_sync = running.strategy._layer_sync  # type: ignore[attr-defined]
    if layer_sync is None or stage_map.world_size == 1:
        return
    if stage_map.replicas == 1 and not stage_map.stage_replicas:
        raise ConfigurationError("sync_batchnorm=True is for replicas; a stage sees the whole batch: remove it")
    if type(layer_sync).__name__ != "TorchSyncBatchNorm":  # of either package
        raise ConfigurationError(
            f"the plugin {type(layer_sync).__name__} replaces layers by others, which replicas of stages know nothing "
            "of; remove it, or use sync_batchnorm=True"
        )
    shares = [rank for rank in range(stage_map.group_size) if len(stage_map.stages(rank)) > 1]
    scripted = [name for name, m in running.lightning_module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    compiled = [name for name, m in running.lightning_module.named_modules() if is_compiled(m)]
    refused = {
        f"num_stages={stage_map.num_stages}": (bool(shares), f"one stage on each of {stage_map.group_size} devices"),
        f"schedule={given.schedule!r}": (given.schedule not in _IN_ONE_ORDER, f"one of {', '.join(_IN_ONE_ORDER)}"),
        f"the scripted {', '.join(scripted[:2])}": (bool(scripted), "modules that are not compiled by torch.jit"),
        f"the compiled {', '.join(compiled[:2])}": (bool(compiled), "modules that are not compiled"),
        f"compile={given.compile!r}": (given.compile is not False, "modules that are not compiled"),
    }
    for what, (is_so, needed) in refused.items():
        if is_so:
            raise ConfigurationError(
                "sync_batchnorm=True makes the replicas of a stage wait for each other within an action, so with "
                f"{what} they could wait for ever, or normalise apart; it needs {needed}. Change that, or remove it: "
                "then each micro-batch is normalised by itself"
            )


def _one_model_only(running: pl.Trainer, num_pipelines: int) -> None:
    for callback in running.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, *weight_averaging())):
            raise ConfigurationError(
                f"{type(callback).__name__} averages the weights of one model, but num_pipelines={num_pipelines} "
                "trains parallel ones, whose reference is an average already; remove it, or use num_pipelines=1"
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} puts other parameters into the layers of one model, but "
                f"num_pipelines={num_pipelines} trains parallel ones; remove it, or use num_pipelines=1"
            )


def weight_averaging() -> tuple[type, ...]:
    """Return the type of callback that keeps an average of the weights, which Lightning has since 2.6; else nothing."""
    found = getattr(pl.callbacks, "WeightAveraging", None)
    return () if found is None else (found,)


def same_checkpoint(paths: Sequence[str]) -> None:
    """Check that all ranks have loaded the same checkpoint, or none.

    Args:
        paths: path on each rank; empty if none was loaded.
    """
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise ConfigurationError(
                f"rank 0 has loaded {paths[0] or 'no checkpoint'}, rank {rank} {path or 'no checkpoint'}; put "
                "checkpoints where all processes see them, or give ckpt_path as a path"
            )


def same_options(options: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks were given the same options.

    Args:
        options: name -> value, for each rank.
    """
    for rank, given in enumerate(options):
        for name, value in given.items():
            if value != options[0][name]:
                raise ConfigurationError(
                    f"{name} is {options[0][name]!r} on rank 0, but {value!r} on rank {rank}; give AvgPipeStrategy the "
                    "same options in all processes"
                )

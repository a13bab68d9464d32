"""What cannot work is said before training starts: what was found, what is needed, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_avgpipe.capture.attributes import is_compiled
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.elastic.optimizer_clone import unwrapped
from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.schedule.own import of_function
from lightning_avgpipe.schedule.recipes import devices_of
from lightning_avgpipe.schedule.versions import Place
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.training.optimizer_shards import check_separable
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.packages import check_callbacks

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options


def groups(given: Options, num_groups: int, device: torch.device) -> None:
    """Check that groups may die, if they may, and others go on."""
    asked = given.min_groups
    if asked is None:
        return
    if asked > num_groups or num_groups == 1:
        raise ConfigurationError(
            f"min_groups={asked}, but there {'is' if num_groups == 1 else 'are'} {num_groups} "
            f"group{'s' * (num_groups > 1)} of processes; fewer stages than devices make more, or leave it out"
        )
    if not port_of(device).is_host and given.process_group_backend != "gloo":
        raise ConfigurationError(
            f"min_groups={asked} on {device.type}: what a dead process leaves undone between devices cannot be given "
            "up; use process_group_backend='gloo', which connects over the host, or leave min_groups out"
        )
    if dist.is_torchelastic_launched():
        raise ConfigurationError(
            f"min_groups={asked} under torchrun, which ends all processes when one dies; let it start all again from "
            "the last checkpoint (--max-restarts), without min_groups, or let the script start them (python train.py)"
        )


def survival(given: Options, tuned: bool) -> None:
    """Check that groups may die in this run, if they may."""
    if given.min_groups is not None and tuned:
        raise ConfigurationError(
            f"min_groups={given.min_groups} with AvgPipeTuner, which chooses for all groups; run it without min_groups "
            "once, and set what it found"
        )


def comeback(running: pl.Trainer, whole: bool) -> None:
    """Check that a process which was started anew can come back to the others, as far as it is known at its start.

    Args:
        running: the trainer.
        whole: whether its steps run whole, or in one process.
    """
    finds = any(isinstance(callback, LearningRateFinder) for callback in running.callbacks)  # type: ignore[attr-defined]
    if running.state.fn == TrainerFn.FITTING and not whole and not finds:
        return
    reason = "LearningRateFinder would train before" if finds else "its first run is no fit()"
    reason = "its steps run whole" if whole else reason
    raise ConfigurationError(
        f"rank {running.global_rank} was started anew, but its group cannot come back: {reason}. The others go on "
        "without it"
    )


def overlapping(running: pl.Trainer, given: Options, num_stages: int, num_groups: int, tuned: bool) -> None:
    """Check that batches of this run may overlap, if they are to."""
    versions = not given.policy.drains
    if not versions and (given.rolling is not True or (given.num_pipelines == 1 and num_groups == 1 and not tuned)):
        return
    option, instead = given.overlap
    use, plugin = f"or use {instead}", running.precision_plugin
    if any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in vars(plugin).values()):
        raise ConfigurationError(
            f"{option} with precision={plugin.precision!r}: a loss scaler skips the steps of all models and stages "
            f"together; use 'bf16-mixed', {use}"
        )
    if num_groups > 1 and (versions or given.replicas != 1):
        raise ConfigurationError(
            f"{option} with {num_groups} groups of processes ({'parallel models or ' * versions}replicas), which do a "
            f"part of each step together; use num_stages='auto'{' and num_pipelines' * (not versions)}, {use}"
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
                    f"rolling=True and {type(owner).__name__}.{name}: by then gradients of the next batch may have "
                    f"taken the place of those that it would see; use on_before_optimizer_step, {use}"
                )


def sharding(given: Options, num_models: int, tuned: bool) -> None:
    """Check that the processes of this run can divide optimizer states, if they are to."""
    if given.shard_optimizer_states and (num_models > 1 or tuned):
        found = f"{num_models} parallel models" if num_models > 1 else "AvgPipeTuner, which tries several models"
        raise ConfigurationError(
            f"shard_optimizer_states=True with {found}: it is for replicas of one model; use as many replicas as there "
            "are groups of processes and no tuner, or shard_optimizer_states=False"
        )


def processes(num_stages: int, layout: DeviceLayout) -> None:
    """Check that the stages fit the devices of a replica: several on each, or one on each of a group."""
    if layout.stage_replicas:
        return
    world_size, each = layout.devices_of_replica, " of each replica" if layout.replicas > 1 else ""
    if num_stages >= world_size:
        if num_stages % world_size:
            below = num_stages // world_size * world_size
            raise ConfigurationError(
                f"num_stages={num_stages} on {world_size} devices{each}: every device must host the same number of "
                f"stages; use num_stages={below} or {below + world_size}"
            )
        return
    if world_size % num_stages:
        raise ConfigurationError(
            f"{world_size} devices{each} for num_stages={num_stages}: the number of devices (world size) must be a "
            f"multiple of the number of stages, which makes groups, or a divisor, which puts several stages on each; "
            f"use devices={world_size // num_stages * num_stages} or num_stages={world_size}"
        )


def backend(name: str, device: torch.device) -> None:
    """Check that torch.distributed has a backend, before the address is blamed for not connecting with it."""
    for part in name.split(","):
        wanted = part.rpartition(":")[2]
        if not dist.is_backend_available(wanted):
            known = [known for known in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(known)]
            raise ConfigurationError(
                f"process_group_backend={name!r}: torch {torch.__version__} has no backend {wanted!r} here, only "
                f"{', '.join(known)}; leave process_group_backend out, which chooses one for the device ({device})"
            )


def whole(model: pl.LightningModule, why: str, given: Options, num_groups: int, abreast: bool) -> None:
    """Check what was asked of steps that run whole, in so many groups of processes.

    Args:
        abreast: whether they may run on micro-batches that step optimizers together.
    """
    name = type(model).__name__
    alone = "a batch is split only where training_step optimizes manually, in one process"
    asked = {
        "num_microbatches": (given.splits and not abreast, f"{alone}; use 'auto', and a smaller batch"),
        "num_pipelines": (given.num_pipelines > 1, "there is one model; use num_pipelines=1"),
        "replicas": (given.replicas != 1, "there is one copy of the model; use replicas=1, or strategy='ddp'"),
        "processes_per_device": (given.processes_per_device > 1, "there is one model; use processes_per_device=1"),
        "num_stages": (num_groups > 1, "more devices than stages train parallel models; use num_stages='auto'"),
        "compile": (given.compile is not False, "call self.compile() in configure_model"),
        "recompute": (bool(given.recompute), "nothing is repeated; use torch.utils.checkpoint inside of a submodule"),
    }
    whole = f"{name} {why}; such steps run whole"
    combinations.refuse(given, asked, lambda option, what: f"{whole}, and with {option} that cannot be: {what}")


def contents(model: pl.LightningModule) -> None:
    """Check that a module is as it will be trained."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"'{lazy[0]}' of {type(model).__name__} has no shape before its first forward, and a model is divided into "
            "stages before that; run a batch through the model where it is built, or give layers their sizes "
            "(nn.Linear instead of nn.LazyLinear)"
        )


def optimizers(model: pl.LightningModule, found: Sequence[Optimizer], sharded: bool) -> None:
    """Check the optimizers that ``configure_optimizers`` returned, whose states replicas may divide among them."""
    for optimizer in found:
        if isinstance(unwrapped(optimizer), LBFGS):
            raise ConfigurationError(
                f"{type(model).__name__}.configure_optimizers returns LBFGS, which evaluates its closure several times "
                "per step; a pipeline evaluates it once. Use an optimizer without closure, such as SGD or AdamW"
            )
        if sharded:
            check_separable(unwrapped(optimizer))


def schedule(given: Options, num_stages: int, hosts: int) -> None:
    """Check that a schedule fits the stages, of which so many processes host all; one's own is tried at every size."""
    try:
        if not isinstance(given.schedule, str):
            for count in range(1, given.microbatches(num_stages) + 1):  # the last batch may be small
                of_function(given.schedule, num_stages, count)
        elif given.schedule != "auto":
            devices_of(given.schedule, num_stages, hosts)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error


def stages(wanted: int, now: int, layout: DeviceLayout) -> None:
    """Refuse numbers of stages that the processes of a group cannot host evenly, while training goes on."""
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
    """Refuse another number of names than stages need, and with a PartitionError those that name no submodule."""
    if names is not None:
        combinations.num_split_points(names, num_stages)
        Divisible(module).split((), names)


def trainer(running: pl.Trainer, world_size: int, num_pipelines: int = 1) -> None:
    """Check the trainer's options against stages on several processes, and parallel models."""
    if world_size > 1 or num_pipelines > 1:
        check_callbacks(running, running.callbacks)  # type: ignore[attr-defined]
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
                    "or use one (devices=1, processes_per_device=1)"
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
    """Check ``Trainer(sync_batchnorm=True)``: all replicas of a stage must come to the same action next."""
    layer_sync = running.strategy._layer_sync  # type: ignore[attr-defined]
    if layer_sync is None or stage_map.world_size == 1:
        return
    if given.replicas == 1:
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
    """The callback that keeps an average beside the weights; Lightning has it since 2.6."""
    found = getattr(pl.callbacks, "WeightAveraging", None)
    return () if found is None else (found,)


def same_checkpoint(paths: Sequence[str]) -> None:
    """Check that all ranks have loaded the same checkpoint, or none.

    Args:
        paths: by rank.
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
        options: by rank.
    """
    for rank, given in enumerate(options):
        for name, value in given.items():
            if value != options[0][name]:
                raise ConfigurationError(
                    f"{name} is {options[0][name]!r} on rank 0, but {value!r} on rank {rank}; give AvgPipeStrategy the "
                    "same options in all processes"
                )

"""What cannot work is said before training starts: what was found, what is needed, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_avgpipe.capture.units import split_units
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.elastic.optimizer_clone import unwrapped
from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.schedule.broadcast import Broadcast
from lightning_avgpipe.schedule.builders import NAMES
from lightning_avgpipe.schedule.own import of_function
from lightning_avgpipe.schedule.recipes import devices_of
from lightning_avgpipe.schedule.versions import Place
from lightning_avgpipe.training.optimizer_shards import check_separable
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.packages import check_callbacks

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options

__all__ = [
    "backend",
    "contents",
    "groups",
    "optimizers",
    "options",
    "overlapping",
    "processes",
    "same_checkpoint",
    "same_options",
    "schedule",
    "sharing_later",
    "split_points",
    "stages",
    "survival",
    "trainer",
    "whole",
    "without_effect",
]


def options(given: Options) -> None:
    """Check those of the strategy's own arguments against each other that can be judged alone."""
    if given.split_points is not None and given.num_stages not in ("auto", len(given.split_points) + 1):
        raise ConfigurationError(
            f"split_points names {len(given.split_points)} units, but num_stages={given.num_stages} needs "
            f"{int(given.num_stages) - 1}: one for each stage after the first"
        )
    if given.advance not in ("auto", 0) and given.schedule != "advance_forward":
        raise ConfigurationError(
            f"advance={given.advance} has no meaning for schedule={given.schedule!r}; use schedule='advance_forward', "
            "or advance=0"
        )
    if (given.replicas == "auto") != (given.planner == "spp"):
        raise ConfigurationError(
            f"replicas={given.replicas!r} and planner={given.planner!r}: the planner 'spp' chooses stages and their "
            "replicas together; use both planner='spp' and replicas='auto', or neither"
        )
    if given.planner != "spp" and given.bandwidth != "measured":
        raise ConfigurationError(f"bandwidth has no use with planner={given.planner!r}; use planner='spp', or leave it")
    if given.shares_stages:
        _stage_replicas(given)
    if given.shard_optimizer_states:
        _sharded(given)
    if given.loss_weight is not None and given.loss_reduction == "sum":
        raise ConfigurationError(
            "loss_weight says what micro-batches count in a mean, but loss_reduction='sum' adds their losses up; leave "
            "one of them out"
        )
    if given.outer_optimizer is not None and given.outer_lr != "auto":
        raise ConfigurationError(
            f"outer_lr={given.outer_lr} and an outer_optimizer: both move the reference; give the optimizer its own lr "
            "and leave outer_lr='auto'"
        )
    if given.outer_optimizer is not None:
        _try_outer(given.outer_optimizer)
    if given.min_groups is not None:
        _apart(given)
    if given.rolling:
        _without_barrier(given)
    if not given.policy.drains:
        _without_drain(given)


def _apart(given: Options) -> None:
    """Refuse what groups cannot do any more when one of them has died."""
    together = {
        "replicas": (given.replicas != 1, "groups that train the same model are one model without one of them"),
        "shard_optimizer_states": (given.shard_optimizer_states, "it is for replicas"),
        "rolling": (given.rolling, "it is for one group"),
        "weight_policy": (not given.policy.drains, "it is for one group"),
        "verify": (bool(given.verify), "a plain step follows all groups"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "all processes write it together"),
        "start_method": (given.start_method != "popen", "all processes are ended when one dies"),
    }
    for option, (asked, why) in together.items():
        if asked:
            raise ConfigurationError(
                f"min_groups={given.min_groups} with {option}={getattr(given, option)!r}: {why}; leave one of them out"
            )


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


def _without_drain(given: Options) -> None:
    """Refuse what stages would have to do together, and what has no order that versions count by."""
    policy = given.policy
    ordered = given.schedule in ("1f1b", "advance_forward") and given.advance in ("auto", 0)
    apart = {
        "num_pipelines": (given.num_pipelines > 1, "there is one pipeline, which needs no others to fill its time"),
        "replicas": (given.replicas != 1, "replicas would wait for each other at each step"),
        "rolling": (given.rolling, "it is for parallel pipelines"),
        "schedule": (given.schedule not in ("1f1b", "advance_forward"), "versions are those of the order of 1F1B"),
        "advance": (not ordered, "versions are those of the order of 1F1B"),
        "recompute": (
            not isinstance(given.recompute, bool) and policy.backward is not None,
            "its stages repeat forwards as a whole, to use other weights in backwards",
        ),
        "on_nonfinite": (given.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (bool(given.verify), "a plain step has no versions"),
        "reader": (given.reader == "first", "its process is the last to end a batch"),
    }
    for option, (asked, why) in apart.items():
        if asked:
            raise ConfigurationError(
                f"weight_policy={given.weight_policy!r} with {option}={getattr(given, option)!r}: {why}; leave it out, "
                "or use weight_policy='flush'"
            )


def _without_barrier(given: Options) -> None:
    """Refuse what parallel models would have to do together."""
    together = {
        "outer_optimizer": (given.outer_optimizer is not None, "models meet the reference one after the other"),
        "average_every": (given.average_every > 1, "each model meets the reference after each step"),
        "on_nonfinite": (given.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (bool(given.verify), "a plain step follows one model"),
        "reader": (given.reader == "first", "its process is the last to end a batch"),
        "schedule": (
            given.schedule == "broadcast" or isinstance(given.schedule, Broadcast),
            "weights go on to the next stage before an iteration, and not while another one runs",
        ),
    }
    for option, (asked, why) in together.items():
        if asked:
            raise ConfigurationError(
                f"rolling=True with {option}={getattr(given, option)!r}: {why}; leave it out, or use rolling=False"
            )


def overlapping(running: pl.Trainer, given: Options, num_stages: int, num_groups: int, tuned: bool) -> None:
    """Check that batches of this run may overlap, if they are to."""
    versions = not given.policy.drains
    if not versions and (not given.rolling or (given.num_pipelines == 1 and num_groups == 1 and not tuned)):
        return
    option = f"weight_policy={given.weight_policy!r}" if versions else "rolling=True"
    use = "or use weight_policy='flush'" if versions else "or use rolling=False"
    plugin = running.precision_plugin
    if any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in vars(plugin).values()):
        raise ConfigurationError(
            f"{option} with precision={plugin.precision!r}: a loss scaler skips the steps of all models and stages "
            f"together; use 'bf16-mixed', {use}"
        )
    if num_groups > 1:
        instead = "num_stages='auto'" + ("" if versions else " and num_pipelines")
        raise ConfigurationError(
            f"{option} with {num_groups} groups of processes (of parallel models or replicas), which do a part of "
            f"each step together; use {instead}, {use}"
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
    if any(isinstance(m, Metric) for m in module.modules()):
        raise ConfigurationError(
            f"rolling=True and a metric object in {type(module).__name__}: it would see batches mixed; log tensors, "
            f"{use}"
        )
    for name in ("on_before_zero_grad", "optimizer_zero_grad"):
        owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
        owners += [(callback, pl.Callback) for callback in running.callbacks]  # type: ignore[attr-defined]
        for owner, kind in owners:
            if hasattr(kind, name) and is_overridden(name, owner, kind):
                raise ConfigurationError(
                    f"rolling=True and {type(owner).__name__}.{name}: by then gradients of the next batch may have "
                    f"taken the place of those that it would see; use on_before_optimizer_step, {use}"
                )


def _stage_replicas(given: Options) -> None:
    counts: Any = list(given.stage_replicas) or "auto"
    if counts != "auto" and given.num_stages not in ("auto", len(counts)):
        raise ConfigurationError(
            f"replicas={counts} names {len(counts)} stages, but num_stages={given.num_stages}; give a number for each "
            "stage, or leave num_stages='auto'"
        )
    chooses = counts == "auto"
    refused = {
        "schedule": (given.schedule not in NAMES, "forwards and backwards by warm-ups; use schedule='advance_forward'"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file; use False"),
        "rolling": (given.rolling, "models that step together; use False"),
        "num_stages": (chooses and given.num_stages != "auto", "num_stages='auto', since the planner chooses it"),
        "split_points": (chooses and given.split_points is not None, "no split_points, since the planner cuts"),
        "num_microbatches": (chooses and given.num_microbatches == "auto", "a number, on which the plan depends"),
        "memory_limit": (chooses and given.memory_limit is not None, "no limit, since plans are made by time alone"),
        "processes_per_device": (given.processes_per_device > 1, "one process on each device"),
        "recompute": (chooses and given.recompute is True, "submodules by name, or none"),
    }
    for name, (set_, needed) in refused.items():
        if set_:
            raise ConfigurationError(
                f"replicas={counts!r} and {name}={getattr(given, name)!r}: replicas of single stages need {needed}, or "
                "replicate whole pipelines (replicas=2)"
            )


def sharing_later(given: Options, stage_map: StageMap) -> None:
    """Check options for training in which processes begin with a stage each, and share fewer of them later."""
    group_size, count = stage_map.group_size, stage_map.num_stages
    refused = {
        "num_stages": (count != group_size, f"one stage on each of {group_size} devices; use num_stages={group_size}"),
        "replicas": (given.replicas != 1, "replicas=1 at first, since it makes them of what is freed"),
        "num_pipelines": (given.num_pipelines > 1, "one model; use num_pipelines=1"),
        "verify": (bool(given.verify), "no verification, since a replica has but a share of a batch"),
    }
    if stage_map.num_groups > 1:
        refused["num_stages"] = True, f"all devices in one group; use num_stages={stage_map.world_size}"
    for name, (found, needed) in refused.items():
        if found:
            raise ConfigurationError(
                f"AdaptiveFreezing(freed='replicas') with {name}={getattr(given, name)!r} needs {needed}, or leave "
                "freed=None"
            )
    try:
        replace(given, replicas=[1] * count)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"AdaptiveFreezing(freed='replicas') makes replicas of single stages later: {error}; or leave freed=None"
        ) from error


def _sharded(given: Options) -> None:
    refused = {
        "replicas": (given.replicas in (1, [1]), "replicas, which share the states; use replicas=2, say"),
        "num_pipelines": (given.num_pipelines > 1, "one pipeline; use num_pipelines=1"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file; use False"),
    }
    for name, (set_, needed) in refused.items():
        if set_:
            raise ConfigurationError(
                f"shard_optimizer_states=True and {name}={getattr(given, name)!r}: it needs {needed}, or "
                "shard_optimizer_states=False"
            )


def sharding(given: Options, num_models: int, tuned: bool) -> None:
    """Check that the processes of this run can divide optimizer states, if they are to."""
    if given.shard_optimizer_states and (num_models > 1 or tuned):
        found = f"{num_models} parallel models" if num_models > 1 else "AvgPipeTuner, which tries several models"
        raise ConfigurationError(
            f"shard_optimizer_states=True with {found}: it is for replicas of one model; use as many replicas as there "
            "are groups of processes and no tuner, or shard_optimizer_states=False"
        )


def _try_outer(outer_optimizer: Any) -> None:
    """Step a parameter with it that nobody else has."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    asked = "it must make an optimizer from parameters whose step() needs no closure, such as SGD"
    try:
        made = outer_optimizer([parameter])
        if isinstance(made, Optimizer):
            made.step()
    except Exception as error:
        raise ConfigurationError(
            f"outer_optimizer={outer_optimizer!r}: {asked}; tried with one parameter it says {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"outer_optimizer={outer_optimizer!r}: {asked}; it made a {type(made).__name__}")


def without_effect(given: Options) -> None:
    """Say which options have no effect, where one model is trained and nobody may change that."""
    elastic = {"alpha": None, "outer_lr": "auto", "outer_optimizer": None, "average_every": 1}
    found = [f"{name}={getattr(given, name)!r}" for name, default in elastic.items() if getattr(given, name) != default]
    if found:
        rank_zero_warn(
            f"AvgPipeStrategy: {', '.join(found)} without effect: there is one pipeline, and nothing to average. Use "
            "num_pipelines=2 or more, or leave that out"
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


def whole(model: pl.LightningModule, why: str, given: Options, num_groups: int) -> None:
    """Check what was asked of steps that run whole, in so many groups of processes."""
    name = type(model).__name__
    asked = {
        "num_microbatches": (given.splits, "a batch is not split; use num_microbatches='auto', and a smaller batch"),
        "num_pipelines": (given.num_pipelines > 1, "there is one model; use num_pipelines=1"),
        "replicas": (given.replicas != 1, "there is one copy of the model; use replicas=1, or strategy='ddp'"),
        "processes_per_device": (given.processes_per_device > 1, "there is one model; use processes_per_device=1"),
        "num_stages": (num_groups > 1, "more devices than stages train parallel models; use num_stages='auto'"),
        "recompute": (bool(given.recompute), "nothing is repeated; use torch.utils.checkpoint inside of a submodule"),
    }
    for option, (set_, what) in asked.items():
        if set_:
            raise ConfigurationError(
                f"{name} {why}; such steps run whole, and with {option}={getattr(given, option)!r} that cannot be: "
                f"{what}"
            )


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
    if names is None:
        return
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(names)} units, but num_stages={num_stages} needs {num_stages - 1}: one for each "
            "stage but the first"
        )
    split_units(module, (), names)


def trainer(running: pl.Trainer, world_size: int, num_pipelines: int = 1) -> None:
    """Check the trainer's options against stages on several processes, and parallel models."""
    if world_size > 1 or num_pipelines > 1:
        check_callbacks(running, running.callbacks)  # type: ignore[attr-defined]
    if num_pipelines > 1:
        _one_model_only(running, num_pipelines)
    if world_size == 1:
        return
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
    if running.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        if running.strategy.replicas == 1:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "sync_batchnorm=True is for data parallelism; a stage sees the whole batch: remove it"
            )
        raise ConfigurationError(
            "sync_batchnorm=True makes processes wait for each other within a step, but stages of replicas take "
            "micro-batches in orders of their own, each normalised by itself: remove it, and use fewer micro-batches"
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

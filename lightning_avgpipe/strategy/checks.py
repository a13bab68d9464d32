"""Checks of options, module and trainer: each error says what was found, what is needed, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.capture.tracer import is_compiled
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.schedule.builders import of_function
from lightning_avgpipe.schedule.recipes import devices_of
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.strategy.combinations import Facts
from lightning_avgpipe.strategy.hooks import users_hooks
from lightning_avgpipe.strategy.options import Configuration, Options
from lightning_avgpipe.training.stepping import check_separable, scalers_of
from lightning_avgpipe.utils.lightning import (
    WEIGHT_AVERAGING,
    BasePredictionWriter,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    TrainerFn,
    pl,
    rank_zero_info,
    rank_zero_warn,
    refuse_other,
)
from lightning_avgpipe.utils.names import listed

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy


def overlapping(running: pl.Trainer, given: Options, run: Facts) -> None:
    """Check that batches of this run may overlap, if an option asks for weight versions or rolling pipelines."""
    versions = not given.policy.drains
    single = given.num_pipelines == 1 and run.num_groups == 1 and not run.tuned
    if not versions and (given.averaging.rolling is not True or single):
        return
    option, instead = given.overlap
    use, plugin = f"or use {instead}", running.precision_plugin
    if any(scaler.is_enabled() for scaler in scalers_of(plugin)):
        raise ConfigurationError(
            f"{option} with precision={plugin.precision!r}: a loss scaler skips the steps of all models and stages "
            f"together; use 'bf16-mixed', {use}"
        )
    if run.num_groups > 1 and (versions or run.replicas > 1):
        raise ConfigurationError(
            f"{option} with {run.num_groups} groups of processes ({'parallel models or ' * versions}replicas), which "
            f"do a part of each step together; use one group{' and num_pipelines' * (not versions)}, {use}"
        )
    if run.num_groups > 1 and run.tuned:
        raise ConfigurationError(
            f"{option} with AvgPipeTuner in {run.num_groups} groups of processes, which wait for each other while it "
            f"measures; remove it, {use}"
        )
    if run.tuned and versions:
        raise ConfigurationError(f"{option} with AvgPipeTuner, which times iterations one by one; remove it, {use}")
    if getattr(running, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            f"{option} and val_check_interval as a time: give it as a number of batches or a fraction, {use}"
        )
    if versions:
        _versions(running, given, run.num_stages, option, use)
    else:
        _rolling(running, use)


def _versions(running: pl.Trainer, given: Options, num_stages: int, option: str, use: str) -> None:
    """Check the requirements of weight versions; ``option`` and ``use`` are parts of the error messages."""
    accumulators = [c for c in running.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if running.accumulate_grad_batches > 1 or any(c.going_to_accumulate_grad_batches() for c in accumulators):
        raise ConfigurationError(
            f"{option} with accumulate_grad_batches: stages are updated after each batch; use larger batches, and more "
            f"of num_microbatches, {use}"
        )
    if num_stages > 1:
        try:
            given.policy.check(num_stages, given.microbatches(num_stages))
        except ScheduleError as error:
            raise ConfigurationError(str(error)) from error


def _rolling(running: pl.Trainer, use: str) -> None:
    """Check the requirements of rolling pipelines; ``use`` is a part of the error message."""
    for owner, name in users_hooks(running, ("on_before_zero_grad", "optimizer_zero_grad")):
        raise ConfigurationError(
            f"Averaging(rolling=True) and {type(owner).__name__}.{name}: when it is called, the gradients may be those "
            f"of the next batch; use on_before_optimizer_step, {use}"
        )


def sharding(given: Options, run: Facts) -> None:
    """Check that the processes of this run can divide optimizer states, if ``shard`` asks for it."""
    alone = run.replicas == 1 and not given.shares_stages
    if given.shard is not None and (run.num_models > 1 or run.tuned or alone):
        found = "one replica" if alone else "AvgPipeTuner, which tries several models"
        if run.num_models > 1:
            found = f"{run.num_models} parallel models"
        raise ConfigurationError(
            f"shard={given.shard!r} with {found}: it is for replicas of one model, which divide what one would hold; "
            "use replicas=2 or more, one group, one pipeline and no tuner, or leave shard out"
        )


def processes(num_stages: int, layout: DeviceLayout) -> None:
    """Check that stages, replicas and groups use all processes, with the same number of stages on each device."""
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

    Without this check the processes would fail to connect, with an error about the address.
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
    """Check that no option is set that is impossible for a module whose steps run whole.

    Args:
        model: the module.
        why: why its steps run whole, as the rest of a sentence about the module.
        given: options of the strategy.
        num_groups: number of groups of processes.
    """
    name = type(model).__name__
    asked = {
        "system": (given.system is not None, "nothing is averaged; leave it out"),
        "num_microbatches": (given.splits, "a batch stays whole; use 'auto', and a smaller batch"),
        "num_pipelines": (given.num_pipelines > 1, "there is one model; use num_pipelines=1"),
        "replicas": (given.asks_for_replicas, "there is one copy of the model; use replicas=1, or strategy='ddp'"),
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
    """Check that all parameters and buffers of a module have a shape, and are whole tensors."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    distributed = [name for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")]  # DTensors
    if distributed:
        raise ConfigurationError(
            f"'{distributed[0]}' of {type(model).__name__} is a DTensor, of which each process of a mesh has a part; "
            "stages hold whole tensors, and move them. Leave fully_shard, parallelize_module or distribute_tensor out: "
            "more stages divide a model among more processes, and replicas=2 with shard='optimizer' divides optimizer "
            "states"
        )
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"'{lazy[0]}' of {type(model).__name__} has no shape before its first forward, and a model is divided into "
            "stages before that; run a batch through the model where it is built, or give layers their sizes "
            "(nn.Linear instead of nn.LazyLinear)"
        )


def optimizers(
    model: pl.LightningModule, found: Sequence[Optimizer], sharded: bool, divided: bool, gathered: bool
) -> None:
    """Check the optimizers that ``configure_optimizers`` returned.

    Args:
        model: the module.
        found: the optimizers.
        sharded: whether replicas divide the optimizer states.
        divided: whether several processes divide the parameters.
        gathered: whether checkpoints gather states of several processes or models.
    """
    for optimizer in map(unwrapped, found):
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                f"{type(model).__name__}.configure_optimizers returns LBFGS, which needs the gradients of all "
                "parameters at once; a process may have those of its stages only. Use another one, such as SGD or AdamW"
            )
        if sharded or divided:
            check_separable(optimizer, sharded)
        # Lightning's placeholder for "no optimizer" has no parameter groups, and nothing to save
        saved = [*optimizer.state_dict()] if gathered and optimizer.param_groups else ["state", "param_groups"]
        if not {"state", "param_groups"}.issubset(saved):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.state_dict() has {listed([*map(repr, saved)])}, but checkpoints of "
                "several processes or models are made of 'state' and 'param_groups', as the optimizers of torch have "
                "them; use one of these, or one process (devices=1) with num_pipelines=1"
            )


def schedule(given: Options, num_stages: int, hosts: int) -> None:
    """Check that a schedule fits the stages and the processes that host them; try a user's function with each M."""
    try:
        if not isinstance(given.schedule, str):
            for count in range(1, given.microbatches(num_stages) + 1):  # the last batch may be small
                of_function(given.schedule, num_stages, count)
        elif given.schedule != "auto":
            devices_of(given.schedule, num_stages, hosts)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error


def stages(wanted: int, now: int, layout: DeviceLayout) -> None:
    """Check that the processes of a group can each host the same number of stages after a change during training.

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
    """Check the number of split points; raise a PartitionError if one of them names no submodule."""
    if names is not None:
        combinations.num_split_points(names, num_stages)
        Divisible(module).split((), names)


def no_run_in_progress(cluster: Cluster | None, module: pl.LightningModule) -> None:
    """Check that no run of the trainer is still in progress on several processes.

    Args:
        cluster: the processes of the last run; None before the first one.
        module: the module that a new run is about to train or to evaluate.
    Raises:
        ConfigurationError: a run is in progress, so a hook must have called a method of the trainer.
    """
    if cluster is not None and cluster.is_open and cluster.world.world_size > 1:
        function = module.trainer.state.fn
        assert function is not None
        raise ConfigurationError(
            f"trainer.{function.value}() was called within another run of the same trainer, whose stages are on "
            f"{cluster.world.world_size} processes until it has ended. Call it after that run, or let the trainer "
            "validate while it trains (val_check_interval, check_val_every_n_epoch)"
        )


def trainer(running: pl.Trainer, world_size: int, num_pipelines: int = 1, num_teams: int = 1) -> None:
    """Check the trainer's options and callbacks, for several processes and parallel models.

    Args:
        running: the trainer.
        world_size: number of processes.
        num_pipelines: number of parallel models of each group of processes.
        num_teams: number of groups of processes that train models of their own; replicas count as one.
    Raises:
        ConfigurationError: an option or a callback is not supported.
    """
    several, parallel = world_size > 1, num_pipelines > 1
    models = f"num_pipelines={num_pipelines} trains parallel ones"
    found, one = (models, "num_pipelines=1") if parallel else (f"{num_teams} groups train parallel ones", "one group")
    alone = f"is not supported on {world_size} processes yet; remove it, or use one (devices=1)"
    refused: list[tuple[bool, Any, str]] = [
        (
            parallel or num_teams > 1,
            (StochasticWeightAveraging, *WEIGHT_AVERAGING),
            f"averages the weights of one model, but {found}, whose reference is an average already; remove it, or "
            f"use {one}",
        ),
        (
            parallel,
            ModelPruning,
            f"puts other parameters into the layers of one model, but {models}; remove it, or use num_pipelines=1",
        ),
        (several, BatchSizeFinder, f"restarts training in ways that the stages cannot follow together, and {alone}"),
        (several, ModelPruning, f"puts other parameters into layers of which each process holds a part, and {alone}"),
    ]
    for callback in running.callbacks:  # type: ignore[attr-defined]
        if several or parallel:
            refuse_other(type(callback).__name__, callback)
        for applies, kinds, why in refused:
            if applies and isinstance(callback, kinds):
                raise ConfigurationError(f"{type(callback).__name__} {why}")
    if not several:
        return
    if parallel and running.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "sync_batchnorm=True makes the replicas of a stage wait for each other within an action, and "
            f"num_pipelines={num_pipelines} runs actions as they come; use num_pipelines=1, or remove it"
        )
    averaged = any(isinstance(c, WEIGHT_AVERAGING) for c in running.callbacks)  # type: ignore[attr-defined]
    if averaged and running.strategy.save_distributed_checkpoint:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "save_distributed_checkpoint=True saves the weights that each process holds, but WeightAveraging puts "
            "averages in their place; use save_distributed_checkpoint=False"
        )
    writers = [c for c in running.callbacks if isinstance(c, BasePredictionWriter)]  # type: ignore[attr-defined]
    reader = running.strategy.cluster.stage_map.reader  # type: ignore[attr-defined]
    if writers and reader != 0 and running.state.fn == TrainerFn.PREDICTING:
        rank_zero_warn(
            f"Links(reader='first') with {type(writers[0]).__name__}: predictions are written by rank 0, which does "
            f"not know the indices of their samples, since rank {reader} reads the data; batch_indices is empty. Use "
            "Links(reader='last') if they are needed"
        )
    if getattr(running, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            "val_check_interval as a time differs between processes; give it as a number of batches or a fraction"
        )


_IN_ONE_ORDER = ("advance_forward", "1f1b", "afab")  # schedules in which the order of a stage's actions is fixed


def synchronised(running: pl.Trainer, given: Options, stage_map: StageMap) -> None:
    """Check ``Trainer(sync_batchnorm=True)``: all replicas of a stage must run their actions in the same order."""
    layer_sync = running.strategy._layer_sync  # type: ignore[attr-defined]
    if layer_sync is None or stage_map.world_size == 1:
        return
    if stage_map.replicas == 1 and not stage_map.stage_replicas:
        raise ConfigurationError("sync_batchnorm=True is for replicas; a stage sees the whole batch: remove it")
    if type(layer_sync).__name__ != "TorchSyncBatchNorm":  # of either package
        raise ConfigurationError(
            f"the plugin {type(layer_sync).__name__} replaces layers in a way that replicas of stages do not support; "
            "remove it, or use sync_batchnorm=True"
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
                f"{what} they could wait forever, or normalise apart; it needs {needed}. Change that, or remove it: "
                "then each micro-batch is normalised by itself"
            )


def same_on_all_ranks(found: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]]) -> None:
    """Check that all ranks have loaded the same checkpoint, or none, and have the same options and hooks.

    Args:
        found: for each rank the path of the loaded checkpoint (empty: none), the options by name, and the names of the
            user's hooks.
    Raises:
        ConfigurationError: something differs; the message names the rank and both values.
    """
    first, options, hooks = found[0]
    for rank, (path, given, others) in enumerate(found):
        if path != first:
            raise ConfigurationError(
                f"rank 0 has loaded {first or 'no checkpoint'}, rank {rank} {path or 'no checkpoint'}; put "
                "checkpoints where all processes see them, or give ckpt_path as a path"
            )
        for name, value in given.items():
            if value != options[name]:
                raise ConfigurationError(
                    f"{name} is {options[name]!r} on rank 0, but {value!r} on rank {rank}; give AvgPipeStrategy the "
                    "same options in all processes"
                )
        counted, there = Counter(hooks), Counter(others)
        for hook in (*(counted - there), *(there - counted)):
            raise ConfigurationError(
                f"rank 0 has {counted[hook] or 'no'} {hook}, rank {rank} {there[hook] or 'none'}, but processes decide "
                "by hooks what they tell each other; give the callback to all processes, and look at "
                "trainer.is_global_zero inside it"
            )


# -- whether parallel pipelines roll -----------------------------------------------------------------------------------


def can_roll(running: pl.Trainer, given: Options, cluster: Cluster, run: Facts) -> bool:
    """Return whether pipelines of this run can roll, as far as that is known before the first batch.

    Every process calls it.

    Args:
        running: the trainer.
        given: options of the strategy.
        cluster: the connected processes.
        run: facts about the run.
    Raises:
        ConfigurationError: an option asks for overlapping batches, which is not possible in this run.
    """
    rolling = given.averaging.rolling
    if rolling != "auto":
        overlapping(running, given, run)
        return rolling
    overlapping(running, given.with_rolling(False), run)
    found = ""
    try:
        # there may be several pipelines later, even if there is one now
        wanted = replace(given.with_rolling(True), num_pipelines=max(2, given.num_pipelines))
        overlapping(running, wanted, run)
    except ConfigurationError as error:
        found = str(error)
    return not is_rolling_refused(found, cluster)


def is_rolling_refused(found: str, cluster: Cluster) -> bool:
    """Return whether any process has a reason against rolling with ``rolling="auto"``, and log it. All call it.

    Args:
        found: this process's reason against rolling; empty: there is none.
        cluster: the connected processes.
    """
    why = next(filter(None, cluster.world.exchange_objects(found)), "")
    if why:
        rank_zero_info(f"Averaging(rolling='auto'): pipelines do not roll: {why}")
    return bool(why)


# -- while training runs -----------------------------------------------------------------------------------------------


def check_changes(changes: Mapping[str, Any], configuration: Configuration, strategy: AvgPipeStrategy) -> None:
    """Check that the options can be changed while training runs.

    Args:
        changes: new values by option; None: the option stays as it is.
        configuration: the strategy's options as they are now.
        strategy: strategy whose options change.
    Raises:
        ConfigurationError: a change is not possible.
        PartitionError: a split point is not a submodule.
    """
    now, wanted, module = configuration.options, configuration.options_with(changes), strategy.lightning_module
    layout, num_stages = strategy.device_layout, strategy.num_stages
    if strategy.whole is not None:
        raise ConfigurationError(f"reconfigure: {type(module).__name__} {strategy.whole}; its steps run whole")
    if strategy.passthrough and module is not None:
        raise ConfigurationError(
            "reconfigure: with one device, one stage, one micro-batch and one pipeline this run began as with "
            "strategy='auto', and has no pipeline to change; begin with 2 or more of stages, micro-batches or pipelines"
        )
    moves = changes["num_stages"] is not None or changes["split_points"] is not None
    if moves and (now.shares_stages or now.shard):
        sharded = " with their parts of the optimizer states" * (now.shard is not None)
        raise ConfigurationError(
            f"reconfigure: replicas={now.replicas!r} stay where they are{sharded}, and so do their stages; begin with "
            "the stages that you want"
        )
    if module is not None:
        trainer(module.trainer, module.trainer.world_size, wanted.num_pipelines, strategy.num_teams)
        wanted_stages = num_stages if changes["num_stages"] is None else changes["num_stages"]
        rolling = wanted.with_rolling(configuration.can_roll) if wanted.averaging.rolling == "auto" else wanted
        overlapping(module.trainer, rolling, replace(strategy.facts, num_stages=wanted_stages, tuned=False))
        stages(wanted_stages, num_stages, layout)
        schedule(now, wanted_stages, layout.group_size(wanted_stages))
        split_points(module, wanted.split_points, wanted_stages)

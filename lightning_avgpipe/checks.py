"""What cannot work is said before training starts: what was found, what is needed, what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.runtime.memory import parse_limit

if TYPE_CHECKING:
    from lightning_avgpipe.options import Options

__all__ = [
    "contents",
    "loss",
    "optimizers",
    "options",
    "processes",
    "same_checkpoint",
    "trainer",
    "whole",
]

_SCHEDULES = ("advance_forward", "1f1b", "afab")
_COSTS = ("measured", "flops")
_START_METHODS = ("popen", "spawn", "fork")


def options(given: Options) -> None:
    """Check the strategy's own arguments, as far as they can be judged alone."""
    if given.num_stages != "auto" and not _is_count(given.num_stages):
        raise ConfigurationError(f"num_stages={given.num_stages!r}: must be 'auto' or an integer of at least 1")
    if not _is_count(given.processes_per_device):
        raise ConfigurationError(
            f"processes_per_device={given.processes_per_device!r}: must be an integer of at least 1"
        )
    _check_choice("schedule", given.schedule, _SCHEDULES)
    _check_counts(given.num_pipelines, given.num_microbatches, given.advance, given.schedule)
    _check_split_points(given.split_points, given.num_stages)
    _check_choice("loss_reduction", given.loss_reduction, ("mean", "sum"))
    _check_choice("reader", given.reader, ("last", "first"))
    _check_choice("send_batch", given.send_batch, ("needed", "all"))
    _check_choice("start_method", given.start_method, _START_METHODS)
    _check_choice("costs", given.costs, _COSTS)
    _check_cache(given.costs_cache)
    parse_limit(given.memory_limit)
    _check_recompute(given.recompute)
    _check_elasticity(given.alpha, given.outer_lr, given.outer_optimizer, given.average_every)


def _check_split_points(split_points: Any, num_stages: Any) -> None:
    if split_points is None:
        return
    if isinstance(split_points, str):
        raise ConfigurationError(f"split_points={split_points!r}: must be a list of names; use [{split_points!r}]")
    if num_stages != "auto" and len(split_points) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(split_points)} units, but num_stages={num_stages} needs {num_stages - 1}: "
            "one for each stage after the first"
        )


def _check_counts(num_pipelines: Any, num_microbatches: Any, advance: Any, schedule: str) -> None:
    if not _is_count(num_pipelines):
        raise ConfigurationError(f"num_pipelines={num_pipelines!r}: must be an integer of at least 1")
    if num_microbatches != "auto" and not _is_count(num_microbatches):
        raise ConfigurationError(f"num_microbatches={num_microbatches!r}: must be 'auto' or an integer of at least 1")
    if advance != "auto" and (not isinstance(advance, int) or isinstance(advance, bool) or advance < 0):
        raise ConfigurationError(f"advance={advance!r}: must be 'auto' or an integer of at least 0; 0 is 1F1B")
    if advance not in ("auto", 0) and schedule != "advance_forward":
        raise ConfigurationError(
            f"advance={advance} has no meaning for schedule={schedule!r}; use schedule='advance_forward', or advance=0"
        )


def _check_cache(costs_cache: Any) -> None:
    if costs_cache is not None and not isinstance(costs_cache, (str, os.PathLike)):
        raise ConfigurationError(
            f"costs_cache={costs_cache!r}: must be a directory, 'auto' for the user's cache directory, or None for none"
        )


def _check_recompute(recompute: Any) -> None:
    if isinstance(recompute, str):
        raise ConfigurationError(f"recompute={recompute!r}: must be a list of names; use [{recompute!r}]")
    if not isinstance(recompute, bool) and not (
        isinstance(recompute, (list, tuple)) and recompute and all(isinstance(name, str) for name in recompute)
    ):
        raise ConfigurationError(
            f"recompute={recompute!r}: must be True (whole stages), False, or a list of names of submodules"
        )


def _check_elasticity(alpha: Any, outer_lr: Any, outer_optimizer: Any, average_every: Any) -> None:
    if alpha is not None and not (_is_number(alpha) and 0 <= alpha <= 1):
        raise ConfigurationError(
            f"alpha={alpha!r}: must be a number from 0 (models never meet) to 1 (they become equal), or None for 1/N"
        )
    if outer_lr != "auto" and not (_is_number(outer_lr) and outer_lr > 0):
        raise ConfigurationError(f"outer_lr={outer_lr!r}: must be a number above 0, or 'auto' for the square root of N")
    if outer_optimizer is not None and not callable(outer_optimizer):
        raise ConfigurationError(
            f"outer_optimizer={outer_optimizer!r}: must make an optimizer from parameters, such as "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)"
        )
    if outer_optimizer is not None and outer_lr != "auto":
        raise ConfigurationError(
            f"outer_lr={outer_lr} and an outer_optimizer: both move the reference; give the optimizer its own lr and "
            "leave outer_lr='auto'"
        )
    if not _is_count(average_every):
        raise ConfigurationError(f"average_every={average_every!r}: must be an integer of at least 1")


def _check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{option}={value!r}: must be one of {', '.join(map(repr, choices))}")


def processes(num_stages: int, world_size: int) -> None:
    """Check that the stages fit the processes: several on each, or one on each of a group."""
    if num_stages >= world_size:
        if num_stages % world_size:
            below = num_stages // world_size * world_size
            raise ConfigurationError(
                f"num_stages={num_stages} on {world_size} devices: every device must host the same number of stages; "
                f"use num_stages={below} or {below + world_size}"
            )
        return
    if world_size % num_stages:
        raise ConfigurationError(
            f"{world_size} devices for num_stages={num_stages}: the number of devices (world size) must be a multiple "
            f"of the number of stages, which makes groups, or a divisor, which puts several stages on each; "
            f"use devices={world_size // num_stages * num_stages} or num_stages={world_size}"
        )


def whole(model: pl.LightningModule, why: str, given: Options, world_size: int) -> None:
    """Check what was asked of steps that run whole."""
    name = type(model).__name__
    asked = {
        "num_microbatches": (given.splits, "a batch is not split; use num_microbatches='auto', and a smaller batch"),
        "num_pipelines": (given.num_pipelines > 1, "there is one model; use num_pipelines=1"),
        "processes_per_device": (given.processes_per_device > 1, "there is one model; use processes_per_device=1"),
        "recompute": (bool(given.recompute), "nothing is repeated; use torch.utils.checkpoint inside of a submodule"),
    }
    for option, (set_, what) in asked.items():
        if set_:
            raise ConfigurationError(
                f"{name} {why}; such steps run whole, and with {option}={getattr(given, option)!r} that cannot be: "
                f"{what}"
            )
    if world_size > 1:
        raise ConfigurationError(f"{name} {why}; such steps run whole, in one process so far: use devices=1")


def contents(model: pl.LightningModule) -> None:
    """Check that a module is as it will be trained."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"'{lazy[0]}' of {type(model).__name__} has no shape before its first forward, and a model is divided into "
            "stages before that; run a batch through the model where it is built, or give layers their sizes "
            "(nn.Linear instead of nn.LazyLinear)"
        )


def optimizers(model: pl.LightningModule, found: Sequence[Optimizer]) -> None:
    """Check the optimizers that ``configure_optimizers`` returned."""
    for optimizer in found:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(inner, LBFGS):
            raise ConfigurationError(
                f"{type(model).__name__}.configure_optimizers returns LBFGS, which evaluates its closure several times "
                "per step; a pipeline evaluates it once. Use an optimizer without closure, such as SGD or AdamW"
            )


def trainer(running: pl.Trainer, world_size: int, num_pipelines: int = 1) -> None:
    """Check the trainer's options against stages on several processes, and parallel models."""
    if num_pipelines > 1:
        _one_model_only(running, num_pipelines)
    if world_size == 1:
        return
    refused: list[tuple[type, str]] = [
        (StochasticWeightAveraging, "averages parameters of which each process holds a part"),
        (BatchSizeFinder, "restarts training in ways that the stages cannot follow together"),
        (ModelPruning, "puts other parameters into layers of which each process holds a part"),
    ]
    refused += [(kind, "averages parameters of which each process holds a part") for kind in _weight_averaging()]
    for callback in running.callbacks:  # type: ignore[attr-defined]
        for kind, why in refused:
            if isinstance(callback, kind):
                raise ConfigurationError(
                    f"{type(callback).__name__} {why}, and is not supported on {world_size} processes yet; remove it, "
                    "or use one (devices=1, processes_per_device=1)"
                )
    if getattr(running, "_val_check_time_interval", None) is not None:
        raise ConfigurationError(
            "val_check_interval as a time differs between processes; give it as a number of batches or a fraction"
        )
    if running.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        raise ConfigurationError("sync_batchnorm=True is for data parallelism; a stage sees the whole batch: remove it")


def _one_model_only(running: pl.Trainer, num_pipelines: int) -> None:
    for callback in running.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, *_weight_averaging())):
            raise ConfigurationError(
                f"{type(callback).__name__} averages the weights of one model, but num_pipelines={num_pipelines} "
                "trains parallel ones, whose reference is an average already; remove it, or use num_pipelines=1"
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} puts other parameters into the layers of one model, but "
                f"num_pipelines={num_pipelines} trains parallel ones; remove it, or use num_pipelines=1"
            )


def _weight_averaging() -> list[type]:
    found = getattr(pl.callbacks, "WeightAveraging", None)  # since Lightning 2.6
    return [] if found is None else [found]


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def loss(result: Any) -> torch.Tensor:
    """The loss in what training_step returned."""
    found = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(found, torch.Tensor):
        raise ConfigurationError(
            f"training_step returned {type(result).__name__} without a loss for one micro-batch; it must return a "
            "tensor, or a dict with the key 'loss', every time"
        )
    return found

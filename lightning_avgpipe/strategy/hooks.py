"""The user's hooks: groups of names by what a hook may do, and which of them the module and its callbacks define."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from lightning_avgpipe.utils.lightning import LIGHTNING, BasePredictionWriter, LambdaCallback, is_overridden, pl

_STAGES = ("train", "validation", "test", "predict")
_ENDS = ("start", "end")
_OF_OPTIMIZATION = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# Hooks that see gradients.
GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
# Hooks that run after the forward of the first micro-batch of a batch, and before those of the others.
BETWEEN_MICRO_BATCHES = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
# Hooks that run within a training step, after a forward, and see what their own process has.
WITHIN_STEPS = (*BETWEEN_MICRO_BATCHES, *GRADIENTS, "optimizer_step")
# Hooks that run between two training steps, and may read weights.
BETWEEN_STEPS = (
    *(f"on_train_{what}_{when}" for what in ("batch", "epoch") for when in _ENDS),
    "on_train_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    *TRANSFER,
    "lr_scheduler_step",
)
# Hooks that run between the batches of an evaluation, or after them, and may read the module.
OF_EVALUATION = tuple(
    f"on_{stage}_{when}"
    for stage in _STAGES[1:]
    for when in ("end", "epoch_start", "epoch_end", "batch_start", "batch_end")
)
# Hooks in which one callback may read what another one has logged just before.
LOGGING_LAST = ("on_train_batch_end", *(f"on_{stage}_epoch_end" for stage in _STAGES[:3]))
# Hooks of the LightningModule that use what a step returned or collected, which only the last stage has.
WITH_RESULTS = tuple(f"on_{stage}_{what}_end" for stage in _STAGES for what in ("batch", "epoch"))
# Hooks that every process of a group runs equally often and in the same order, while a model trains.
RUN_BY_ALL_PROCESSES = frozenset(
    f"on_{what}_{when}" for what in ("train_epoch", "train_batch", "validation_epoch", "validation") for when in _ENDS
) | {*GRADIENTS, "optimizer_step", "lr_scheduler_step"}
# Hooks in which a LightningModule whose steps run whole may call its submodules, or read their weights.
AROUND_WHOLE_STEPS = (
    *(f"on_{stage}{what}_{when}" for stage in _STAGES for what in ("", "_epoch", "_batch") for when in _ENDS),
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
# All hooks that may read weights: all but those that transform batches.
SEEING_WEIGHTS = tuple(
    name
    for name in dict.fromkeys((*dir(pl.LightningModule), *dir(pl.Callback)))
    if name in _OF_OPTIMIZATION or (name.startswith("on_") and name != "on_gpu" and "batch_transfer" not in name)
)

# Step -> the hook that is given what it has returned for a batch.
_BATCH_ENDS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}
_METRICS = frozenset(("callback_metrics", "logged_metrics", "progress_bar_metrics"))  # of the trainer
# Callbacks of these packages read weights only through the strategy.
_LOOK_AT_NO_WEIGHTS = tuple(f"{name}." for name in (*LIGHTNING, "lightning_avgpipe"))


def users_hooks(trainer: pl.Trainer, names: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Yield (owner, name) for each of these hooks that the module overrides, or a callback that is not Lightning's."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners: list[tuple[Any, type]] = [(trainer.lightning_module, pl.LightningModule)]
    owners += [
        (callback, pl.Callback)
        for callback in callbacks  # a LambdaCallback is Lightning's, but calls functions of the user
        if isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(_LOOK_AT_NO_WEIGHTS)
    ]
    for owner, base in owners:
        for name in names:
            hook = getattr(owner, name, None)
            if hasattr(base, name) and getattr(hook, "__func__", hook) is not getattr(base, name):
                yield owner, name


def user_hook_names(trainer: pl.Trainer) -> list[str]:
    """Return names of all hooks of the user, which must be the same on all processes, since messages depend on them."""
    return [f"{type(owner).__name__}.{name}" for owner, name in users_hooks(trainer, (*SEEING_WEIGHTS, *TRANSFER))]


def has_any(trainer: pl.Trainer, names: Collection[str]) -> bool:
    """Return whether the module, or a callback that is not Lightning's, overrides any of these hooks."""
    return any(True for _ in users_hooks(trainer, names))


def callbacks_reading_metrics(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """Yield (callback, name) for user callbacks' hooks that read metrics which an earlier callback may have logged."""
    for name in LOGGING_LAST:
        callbacks = [owner for owner, _ in users_hooks(trainer, [name]) if owner is not trainer.lightning_module]
        yield from ((callback, name) for callback in callbacks[1:] if _names_metrics(getattr(callback, name)))


def reads_metrics(trainer: pl.Trainer) -> bool:
    """Return whether the code of any hook of the user mentions the trainer's metrics."""
    return any(_names_metrics(getattr(owner, name)) for owner, name in users_hooks(trainer, SEEING_WEIGHTS))


def _names_metrics(hook: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return code is None or not _METRICS.isdisjoint(code.co_names)


def arguments_used_at_batch_end(trainer: pl.Trainer, step: str) -> frozenset[str]:
    """Return which of the arguments ``outputs`` and ``batch`` callbacks of the user use at the end of a step's batch.

    Every process calls these hooks. Writers of predictions are not counted, since they run on rank 0 only.
    """
    found = [
        _named(getattr(owner, name))
        for owner, name in users_hooks(trainer, [_BATCH_ENDS[step]])
        if owner is not trainer.lightning_module and not isinstance(owner, BasePredictionWriter)
    ]
    return frozenset().union(*found)


def _named(hook: Callable[..., Any]) -> set[str]:
    """Return which of its arguments ``outputs`` and ``batch`` a hook uses, under any name; both if it has no code."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    by_name = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    parameters = [p.name for p in inspect.signature(hook).parameters.values() if p.kind not in by_name]
    arguments = {"outputs": parameters[:3][-1], "batch": parameters[:4][-1]}  # the last parameter may be *args
    if code is None:
        return {*arguments}
    used = {*code.co_cellvars}
    for instruction in dis.get_instructions(code):
        used.update(instruction.argval if type(instruction.argval) is tuple else (str(instruction.argval),))
    return {what for what, name in arguments.items() if name in used}


def changes_batches(trainer: pl.Trainer) -> bool:
    """Return whether the module or the datamodule overrides a transfer hook, and so may change batches."""
    owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    return any(is_overridden(hook, owner) for owner in owners if owner is not None for hook in TRANSFER)

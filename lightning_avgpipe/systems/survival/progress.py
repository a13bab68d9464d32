"""How far the training of a group is, so that a group that comes back goes on from there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import load_states, parameters_in, states_of, unwrapped
from lightning_avgpipe.training.holdings import is_counter, with_moving_counters
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import call, pl

# Lightning counts how often something was ready, has started, was processed and has completed
_COUNTS = ("ready", "started", "processed", "completed")


def _counters(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the counters of a trainer that advance with batches, steps and epochs."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    step = epoch.automatic_optimization.optim_progress.optimizer.step
    counted = {"batch": epoch.batch_progress, "step": step, "epoch": fit.epoch_progress}
    return {f"{name} {kind}": getattr(c, kind) for name, c in counted.items() for kind in ("current", "total")}


def _done(trainer: pl.Trainer, within: bool) -> dict[str, int]:
    """Return the number of batches and steps that are done, and of epochs that have begun.

    Args:
        trainer: the trainer.
        within: whether an iteration is going on, which does not count; otherwise one has just ended, which counts, even
            if not all counters have advanced yet.
    """
    return {
        name: counter.completed if within and not name.startswith("epoch") else counter.ready
        for name, counter in _counters(trainer).items()
    }


def _all(count: int, most: int | None) -> bool:
    """Return whether a limit is reached; -1 and None mean that there is no limit."""
    return most is not None and 0 <= most <= count


def progress_of(trainer: pl.Trainer, within: bool) -> dict[str, Any]:
    """Return how far training is, with the state of schedulers and callbacks.

    Args:
        trainer: the trainer.
        within: whether an iteration has begun.
    """
    fit, loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current.ready
    over = loop._num_ready_batches_reached()
    return {
        "done": _done(trainer, within),
        "epoch is over": over,
        "training is over": _all(trainer.global_step, loop.max_steps) or (over and _all(epoch, fit.max_epochs)),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": call._call_callbacks_state_dict(trainer),
    }


def go_to(trainer: pl.Trainer, progress: dict[str, Any], within: bool) -> None:
    """Move training to where another group is.

    All counts of a counter move by the same number, so those that are ahead within an iteration stay ahead. If the
    other group is at the end of an epoch, an iteration that has begun here becomes one of the next epoch. Then only the
    other group runs the end of the epoch, with its callbacks and schedulers that watch a metric.

    Args:
        trainer: the trainer.
        progress: what the other group's :func:`progress_of` has returned.
        within: whether an iteration has begun here.
    """
    counters, done, theirs = _counters(trainer), _done(trainer, within), dict(progress["done"])
    if within and progress["epoch is over"]:
        theirs |= {"batch current": 0, "step current": 0}
        theirs |= {name: theirs[name] + 1 for name in ("epoch current", "epoch total")}
    further = {name: theirs[name] - count for name, count in done.items()}
    for name, counter in counters.items():
        for count in _COUNTS:
            if hasattr(counter, count):
                setattr(counter, count, getattr(counter, count) + further[name])
    trainer.fit_loop.epoch_loop._batches_that_stepped += further["step total"]
    if trainer.fit_loop._data_fetcher is not None:  # it recognises the last batch by its number
        trainer.fit_loop._data_fetcher.fetched += further["batch current"]
    for config, state in zip(trainer.lr_scheduler_configs, progress["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": progress["callbacks"]})


def optimizer_states(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the states of this process's optimizers, by the position of a parameter, and their hyper-parameters."""
    found = []
    for optimizer in map(unwrapped, optimizers):
        groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        found.append((states_of(optimizer), groups))
    return found


def load_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Load states that :func:`optimizer_states` has returned and that are on the host."""
    for optimizer, (state, groups) in zip(map(unwrapped, optimizers), states, strict=True):
        parameters, moving = parameters_in(optimizer), with_moving_counters(optimizer)

        def moved(to: Tensor, name: str, value: Tensor, moving: Collection[int] = moving) -> Tensor:
            return value if id(to) not in moving and is_counter(to, name, value) else value.to(to.device)

        own = {
            i: {name: tree.map_tensors(partial(moved, parameters[i], name), value) for name, value in entry.items()}
            for i, entry in state.items()
        }
        load_states(optimizer, own)
        for group, theirs in zip(optimizer.param_groups, groups, strict=True):
            group.update(tree.map_tensors(lambda tensor: tensor.clone(), theirs))

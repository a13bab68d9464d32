"""How far a group's training is, for a group that comes back and goes on from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import load_states, parameters_in, unwrapped
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import call, pl

# Lightning counts how often something was ready, has started, was processed and has completed
_COUNTS = ("ready", "started", "processed", "completed")


def _counters(trainer: pl.Trainer) -> Iterator[tuple[str, Any, str]]:
    """Yield the name of each counter of a trainer that moves on, its object, and the count of it that is compared."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    step = epoch.automatic_optimization.optim_progress.optimizer.step
    yield "epoch", fit.epoch_progress.current, "processed"
    yield "epochs", fit.epoch_progress.total, "processed"
    yield "batch", epoch.batch_progress.current, "processed"
    yield "batches", epoch.batch_progress.total, "processed"
    yield "step", step.current, "completed"
    yield "steps", step.total, "completed"


def progress_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Return how far training is, with the state of schedulers and callbacks."""
    return {
        "counts": {name: getattr(counter, compared) for name, counter, compared in _counters(trainer)},
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": call._call_callbacks_state_dict(trainer),
    }


def go_to(trainer: pl.Trainer, progress: dict[str, Any]) -> None:
    """Go on from where another group is. Both are at the same place of an iteration, or this one is within the next.

    All counts of a counter move by the same number, so those that are ahead within an iteration stay ahead.
    """
    for name, counter, compared in _counters(trainer):
        further = progress["counts"][name] - getattr(counter, compared)
        for count in _COUNTS:
            if hasattr(counter, count):
                setattr(counter, count, getattr(counter, count) + further)
        fetcher = trainer.fit_loop._data_fetcher
        if name == "batch" and fetcher is not None:  # which knows the last batch by its number
            fetcher.fetched += further
    trainer.fit_loop.epoch_loop._batches_that_stepped = progress["stepped"]
    for config, state in zip(trainer.lr_scheduler_configs, progress["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": progress["callbacks"]})


def optimizer_states(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the states of this process's optimizers, by the position of a parameter, and their hyper-parameters."""
    found = []
    for optimizer in map(unwrapped, optimizers):
        states = {i: dict(optimizer.state[p]) for i, p in enumerate(parameters_in(optimizer)) if optimizer.state.get(p)}
        groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        found.append((states, groups))
    return found


def load_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Load states of :func:`optimizer_states`, which are on the host."""
    for optimizer, (state, groups) in zip(map(unwrapped, optimizers), states, strict=True):
        parameters = parameters_in(optimizer)

        def moved(value: Any, to: Tensor) -> Any:  # counts of steps stay on the host
            return value.to(to.device) if isinstance(value, Tensor) and value.ndim else value

        own = {i: {key: moved(value, parameters[i]) for key, value in entry.items()} for i, entry in state.items()}
        load_states(optimizer, own)
        for group, theirs in zip(optimizer.param_groups, groups, strict=True):
            group.update(tree.map_tensors(lambda tensor: tensor.clone(), theirs))

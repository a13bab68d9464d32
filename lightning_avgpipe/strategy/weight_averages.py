"""Lightning's weight averaging callbacks on several processes: each process averages the weights that it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.lightning import WEIGHT_AVERAGING, StochasticWeightAveraging, TrainerFn, pl
from lightning_avgpipe.utils.patching import Replacement
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import give_up


def averaging_parts(trainer: pl.Trainer, deployment: Deployment) -> Iterator[Replacement]:
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

    def on_part(function: Callable[..., Any]) -> Callable[..., Any]:
        return _on_part(function, module, lambda: average.module)

    for name in ("_swap_models", "_copy_average_to_current"):
        yield callback, name, on_part(getattr(callback, name))
    yield average, "update_parameters", on_part(average.update_parameters)
    yield average, "state_dict", on_part(state_dict)


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

"""Averages of weights on several processes: each process averages the weights that it holds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.lightning import StochasticWeightAveraging, pl
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import give_up


@contextlib.contextmanager
def averaging_parts(trainer: pl.Trainer, module: nn.Module, deployment: Deployment) -> Iterator[None]:
    """Within this context averages of weights are divided between processes as the weights are, and saved whole."""
    with contextlib.ExitStack() as undo:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging):
                for name in ("update_parameters", "transfer_weights"):
                    undo.enter_context(replaced(callback, name, _on_parts(getattr(callback, name), module)))
                undo.enter_context(replaced(callback, "state_dict", _whole(callback, deployment)))
                if (average := callback._average_model) is not None:
                    undo.enter_context(replaced(average, "to", partial(_move, average)))
                deployment.holdings.copies.append(partial(getattr, callback, "_average_model"))
            elif isinstance(callback, checks.weight_averaging()):
                _average_parts(undo, callback, module, deployment)
        yield


def _average_parts(undo: contextlib.ExitStack, callback: Any, module: nn.Module, deployment: Deployment) -> None:
    """Let a callback's average give up the parameters that the module gives up; parameters on meta stay there.

    Args:
        undo: undoes the changes.
        callback: callback that keeps an average besides the weights.
        module: module that is divided.
        deployment: deployment of the module on processes.
    """
    average = callback._average_model
    if average is None:  # not in training
        return
    if on_meta(module):
        raise ConfigurationError(
            f"{type(callback).__name__} copies the weights before training, but those of {type(module).__name__} "
            "are on the meta device until then; build it with contents, or remove the callback"
        )
    deployment.holdings.copies.append(lambda: average.module)

    def on_parts(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            _Part(average.module, module)
            return function(*args, **kwargs)

        return run

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        _Part(average.module, module)
        own = {name: buffer for name, buffer in average.named_buffers() if not name.startswith("module.")}
        return own | {f"module.{name}": value for name, value in deployment.holdings.state_dict(average.module).items()}

    for name in ("_swap_models", "_copy_average_to_current"):
        undo.enter_context(replaced(callback, name, on_parts(getattr(callback, name))))
    undo.enter_context(replaced(average, "update_parameters", on_parts(average.update_parameters)))
    undo.enter_context(replaced(average, "state_dict", state_dict))


class _Part:
    """The part of a module, or of a copy of it, that this process holds.

    Args:
        whole: the module or the copy.
        module: the module that was divided.
    """

    def __init__(self, whole: nn.Module, module: nn.Module) -> None:
        if whole is not module:  # a copy need not hold more than the module
            give_up(whole, [name for name, parameter in module.named_parameters() if parameter.is_meta])
        self._whole = whole

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that have contents here."""
        return (parameter for parameter in self._whole.parameters() if not parameter.is_meta)


def _on_parts(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(one: nn.Module, other: nn.Module, *args: Any) -> Any:
        return function(_Part(one, module), _Part(other, module), *args)

    return run


def _move(average: nn.Module, device: torch.device | str) -> nn.Module:
    """Move what this process holds of an average, which may begin in an epoch in which it is divided already."""
    return average._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _whole(callback: StochasticWeightAveraging, deployment: Deployment) -> Callable[[], dict[str, Any]]:
    state_dict = callback.state_dict

    def run() -> dict[str, Any]:
        state = state_dict()
        if callback._average_model is not None:
            state["average_model_state"] = deployment.holdings.state_dict(callback._average_model)
        return state

    return run

"""Stochastic weight averaging on several processes: each averages the weights that it holds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_avgpipe.division import Division
from lightning_avgpipe.replaced import replaced
from lightning_avgpipe.runtime.ownership import give_up

__all__ = ["averaging_parts"]


@contextlib.contextmanager
def averaging_parts(trainer: pl.Trainer, module: nn.Module, division: Division) -> Iterator[None]:
    """Within this context averages of weights are divided as the weights are, and saved whole."""
    with contextlib.ExitStack() as undo:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging):
                for name in ("update_parameters", "transfer_weights"):
                    undo.enter_context(replaced(callback, name, _on_parts(getattr(callback, name), module)))
                undo.enter_context(replaced(callback, "state_dict", _whole(callback, division)))
        yield


class _Part:
    """What this process holds of a module, or of a copy of it.

    Args:
        whole: whose parameters.
        module: that was divided.
    """

    def __init__(self, whole: nn.Module, module: nn.Module) -> None:
        if whole is not module:  # a copy need not hold more
            give_up(whole, [name for name, parameter in module.named_parameters() if parameter.is_meta])
        self._whole = whole

    def parameters(self) -> Iterator[nn.Parameter]:
        """With contents here."""
        return (parameter for parameter in self._whole.parameters() if not parameter.is_meta)


def _on_parts(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(one: nn.Module, other: nn.Module, *args: Any) -> Any:
        return function(_Part(one, module), _Part(other, module), *args)

    return run


def _whole(callback: StochasticWeightAveraging, division: Division) -> Callable[[], dict[str, Any]]:
    state_dict = callback.state_dict

    def run() -> dict[str, Any]:
        state = state_dict()
        if callback._average_model is not None:
            state["average_model_state"] = division.collected(callback._average_model)
        return state

    return run

"""Prediction: the weights after further updates, extrapolated from the state of the optimizer.

::

    predicted = W - lr * ahead * Delta          Delta: of the optimizer's state after its last step; before any, 0

    SGD, RMSprop    momentum buffer
    Adam            m^ / (sqrt(v^) + eps), with eps outside of the root, as in torch
    AdamW           the same: decoupled weight decay is left out

For an optimizer whose state has no direction, or none that is known here, the last increment of the weights serves:
``Delta = (W_before - W) / lr``. It includes everything, also weight decay, and costs a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, RMSprop

from lightning_avgpipe.errors import ConfigurationError

_State = Mapping[str, Any]


def _momentum(state: _State, group: _State) -> Tensor | None:
    return state.get("momentum_buffer")


def _adam(state: _State, group: _State) -> Tensor:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    steps = float(state["step"])
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    root = (second / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    return state["exp_avg"] / (1 - beta1**steps) / root


# A class of optimizers, the hyper-parameter that must not be zero, and the direction from the state of a parameter.
_DIRECTIONS: Sequence[tuple[type[Optimizer], str | None, Callable[[_State, _State], Tensor | None]]] = (
    (Adam, None, _adam),  # AdamW is a subclass
    (SGD, "momentum", _momentum),
    (RMSprop, "momentum", _momentum),
)


def check_predictable(optimizer: Optimizer) -> None:
    """Check that the state of an optimizer has the direction of its next steps.

    Raises:
        ConfigurationError: it has none, or the optimizer is not known.
    """
    for kind, wanted, _ in _DIRECTIONS:
        if isinstance(optimizer, kind):
            if wanted is None or all(group[wanted] for group in optimizer.param_groups):
                return
            raise ConfigurationError(
                f"{type(optimizer).__name__} with {wanted}=0 does not remember where it goes, so the weights that its "
                f"next steps will make cannot be predicted from its state; give it {wanted}, or predict from the last "
                'increment: PipeOptim(delta="increment")'
            )
    known = ", ".join(kind.__name__ for kind, _, _ in _DIRECTIONS)
    raise ConfigurationError(
        f"the weights that the next steps of {type(optimizer).__name__} will make cannot be predicted from its state, "
        f'only those of {known} and their subclasses; use one of these, or PipeOptim(delta="increment")'
    )


# An optimizer, and one of its parameter groups.
Source = tuple[Optimizer, dict[str, Any]]


def sources(optimizers: Iterable[Optimizer]) -> dict[int, Source]:
    """Return the optimizer and the parameter group of each parameter, by the ``id`` of the parameter."""
    return {
        id(p): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def direction(source: Source, parameter: Tensor) -> Tensor | None:
    """Return Delta of a parameter, in the parameter's shape; None before the first step, which means 0.

    Args:
        source: optimizer, for which :func:`check_predictable` passes, and group of the parameter.
        parameter: parameter that the optimizer trains.
    """
    optimizer, group = source
    state = optimizer.state.get(parameter)
    if not state:
        return None
    return next(rule for kind, _, rule in _DIRECTIONS if isinstance(optimizer, kind))(state, group)


@torch.no_grad()
def predicted(source: Source, parameter: Tensor, ahead: int, before: Tensor | None = None) -> Tensor:
    """Return the weights after ``ahead`` further updates, in new memory.

    Args:
        source: optimizer and group of the parameter.
        parameter: current weights.
        ahead: number of updates, at least 0.
        before: weights before the last update, to extrapolate by the increment; None: by the optimizer's state.
    """
    if before is not None:  # lr * Delta, whatever the learning rate was
        return torch.lerp(before, parameter, 1.0 + ahead)
    delta = direction(source, parameter)
    if delta is None or not ahead:
        return parameter.clone()
    return parameter - float(source[1]["lr"]) * ahead * delta

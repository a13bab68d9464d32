"""Clones of an optimizer: the same class and hyper-parameters, other parameters, a state of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_HOOKS = ("_hooks",)  # endings of the names of an optimizer's hooks


def clone_optimizer(optimizer: Optimizer, own: Mapping[int, Tensor]) -> Optimizer:
    """Return an optimizer like another one, with a copy of its state, for other parameters.

    ``copy.deepcopy`` alone would lose attributes that some classes add, and would copy the objects that hooks are bound
    to.

    Args:
        optimizer: optimizer of model 0. A scheduler may have patched its ``step``; that of the clone is not patched.
        own: parameter that takes the place of each of its parameters, by ``id``; parameters that are missing are
            shared.
    """
    memo: dict[int, Any] = {id(p): own.get(id(p), p) for p in parameters_in(optimizer)}
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # patched by a scheduler, which counts the original's steps
        vars(made)[name] = copy.copy(value) if name.endswith(_HOOKS) else copy.deepcopy(value, memo)
    return made


def follow(made: Optimizer, optimizer: Optimizer, own: Mapping[int, Tensor]) -> None:
    """Give a clone the optimizer's current parameter groups: hyper-parameters and new parameters."""
    made.param_groups[:] = [
        {**group, "params": [own.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]


def parameters_in(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer within a trainer's wrapper, or the optimizer itself if it is not wrapped."""
    return getattr(optimizer, "_optimizer", optimizer)

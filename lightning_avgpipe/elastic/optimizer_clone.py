"""Clones of an optimizer: the same class and hyper-parameters, other parameters, a state of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_HOOKS = ("_hooks",)  # how the names of an optimizer's hooks end


def clone_optimizer(optimizer: Optimizer, own: Mapping[int, Tensor]) -> Optimizer:
    """An optimizer like another one, with a copy of its state, for other parameters.

    ``copy.deepcopy`` alone would lose the attributes of classes that add some, and copy what hooks belong to.

    Args:
        optimizer: of replica 0. Its ``step`` may be patched by a scheduler; the clone's is not.
        own: id of its parameter -> the parameter that takes its place; others are shared.
    """
    memo: dict[int, Any] = {id(p): own.get(id(p), p) for p in parameters_in(optimizer)}
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # of a scheduler, which counts the other one's steps
        vars(made)[name] = copy.copy(value) if name.endswith(_HOOKS) else copy.deepcopy(value, memo)
    return made


def follow(made: Optimizer, optimizer: Optimizer, own: Mapping[int, Tensor]) -> None:
    """Give a clone the parameter groups of the optimizer as they are now: hyper-parameters, and new parameters."""
    made.param_groups[:] = [
        {**group, "params": [own.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]


def parameters_in(optimizer: Optimizer) -> list[Tensor]:
    """Its parameters, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, where a trainer's wrapper around it may be given."""
    return getattr(optimizer, "_optimizer", optimizer)

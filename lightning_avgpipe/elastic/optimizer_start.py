"""Optimizers that begin alike in all groups: with the state that group 0's optimizers of pipeline 0 have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.optimizer_clone import parameters_in

States = Mapping[int, Mapping[str, Any]]  # of an optimizer, by the position of a parameter among its parameters


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def states_of_group_0(optimizers: Sequence[Optimizer], replica_group: ReplicaGroup) -> list[States]:
    """Copies of the states that group 0's optimizers have, one for each optimizer. All its processes call it.

    Args:
        optimizers: of the same parameters in all groups; what states they have may differ.
        replica_group: processes in other groups.
    """
    described = replica_group.members.broadcast([_describe(optimizer) for optimizer in optimizers])
    states: list[States] = []
    for optimizer, entries in zip(optimizers, described, strict=True):
        parameters = parameters_in(optimizer)
        states.append(
            {i: _filled(optimizer, parameters[i], entry, replica_group.number) for i, entry in entries.items()}
        )
    tensors = [v for state in states for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]
    for on_host in (True, False):  # which do not fit into one message
        replica_group.copy([tensor for tensor in tensors if tensor.is_cpu == on_host])
    return states


def load_states(optimizer: Optimizer, states: States) -> None:
    """Give an optimizer copies of these states in the place of what it has."""
    parameters = parameters_in(optimizer)
    optimizer.state.clear()
    for i, entry in states.items():
        optimizer.state[parameters[i]] = copy.deepcopy(dict(entry))


def _describe(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    states = ((i, optimizer.state.get(p)) for i, p in enumerate(parameters_in(optimizer)))
    return {i: {key: _described(value) for key, value in state.items()} for i, state in states if state}


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Described(tuple(value.shape), value.dtype, value.is_cpu)
    return value


def _filled(optimizer: Optimizer, parameter: Tensor, entry: Mapping[str, Any], group: int) -> dict[str, Any]:
    """Here the tensors of group 0, elsewhere room for them."""
    own: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {
        key: (own[key].detach().clone() if group == 0 else _empty(value, parameter))
        if isinstance(value, _Described)
        else value
        for key, value in entry.items()
    }


def _empty(described: _Described, parameter: Tensor) -> Tensor:
    device = torch.device("cpu") if described.on_host else parameter.device
    return torch.empty(described.shape, dtype=described.dtype, device=device)

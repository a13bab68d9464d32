"""The start of optimizers: in all groups they begin with the state of group 0's optimizers of pipeline 0."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizer_clone import parameters_in
from lightning_avgpipe.comm.collectives import ReplicaGroup

States = Mapping[int, Mapping[str, Any]]  # of an optimizer, by the position of a parameter among its parameters


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def states_of_group_0(optimizers: Sequence[Optimizer], replica_group: ReplicaGroup) -> list[States]:
    """Return copies of the states of group 0's optimizers, one for each optimizer. All processes of the group call it.

    Args:
        optimizers: optimizers of the same parameters in all groups; their states may differ.
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
    for on_host in (True, False):  # one message cannot have tensors of both
        replica_group.copy([tensor for tensor in tensors if tensor.is_cpu == on_host])
    return states


def load_states(optimizer: Optimizer, states: States) -> None:
    """Replace the states of an optimizer by copies of these."""
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
    """Return the tensors of a state in group 0, and memory for them in other groups."""
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

"""Checkpoints: the state of all stages, as one process would have it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.elastic.ensemble import Ensemble
from lightning_avgpipe.elastic.optimizer_clone import parameters_in
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.relocation import gather, holders


def gathers(cluster: Cluster) -> bool:
    """Whether rank 0 of this group gets whole what its processes have divided, to write it.

    That of the first group writes. If it may leave in the midst of that, others must have the same.
    """
    return cluster.survives or cluster.group_number == 0


def full_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """On rank 0 the state dict of the whole module; elsewhere the module's own, with what it lacks on meta."""
    state = module.state_dict()
    owners = {name: (owner[name],) for name, v in state.items() if isinstance(v, Tensor) and name in owner}
    return gather(cluster.group, state, owners)


def own_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """The part of the module's state dict that this process answers for; what has no owner is rank 0's."""
    return {name: value for name, value in module.state_dict().items() if owner.get(name, 0) == cluster.rank}


def scattered_owners(module: nn.Module, cluster: Cluster) -> dict[str, int]:
    """The owners of a module that was divided before, of which every process kept its part.

    Raises:
        ConfigurationError: no process has contents for a parameter yet.
    """
    held = holders(cluster.group, [name for name, p in module.named_parameters() if not p.is_meta])
    canonical = {id(p): name for name, p in module.named_parameters()}
    owner = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if canonical[id(parameter)] not in held:
            raise ConfigurationError(
                f"'{name}' is on the meta device on all ranks, so there is nothing to save; run a batch first"
            )
        owner[name] = held[canonical[id(parameter)]][0]
    return owner


def full_optimizer_state(optimizer: Optimizer, processes: Collectives) -> dict[str, Any]:
    """On rank 0 an ordinary optimizer state: the union of the stages' states; elsewhere one's own.

    Every process builds its optimizer over all parameters, so a parameter has the same number everywhere, the number
    that it has in one process.
    """
    state = optimizer.state_dict()
    own = {str(number): entry for number, entry in state["state"].items()}
    whole = gather(processes, own, holders(processes, own))
    state["state"] = {number: whole[str(number)] for number in sorted(map(int, whole))}
    return state


def named_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """This process's optimizer state with the names of parameters for their numbers.

    Optimizers load it as they load one with numbers, and names are what distributed checkpoints are keyed by.
    """
    state = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = {n: names.get(id(p), str(n)) for n, p in zip(numbers, parameters_in(optimizer), strict=True)}
    return {
        "state": {name_of[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def full_ensemble_state(ensemble: Ensemble, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """On rank 0 all that parallel models have of their own; nothing that others could not read without this package.

    The models of all groups follow each other, so it does not matter how many groups there are. Pipeline 0's optimizer
    state is missing, since it is that of the checkpoint.
    """
    state: dict[str, Any] = {"steps": ensemble.averager.steps, "active": ensemble.averager.active, "models": []}
    with ensemble.showing_reference(False):
        for n in range(ensemble.models.size):
            tensors = ensemble.tensors(n)
            state["models"].append(gather(cluster.group, tensors, {name: (owner[name],) for name in tensors}))
        state["optimizers"] = [
            [full_optimizer_state(optimizer, cluster.group) for optimizer in ensemble.optimizers.of(n)]
            for n in range(ensemble.models.size)
            if ensemble.models.first + n
        ]
        if ensemble.averager.outer is not None:
            state["outer_names"] = list(ensemble.models.reference)
            state["outer_optimizer"] = full_optimizer_state(ensemble.averager.outer, cluster.group)
    if cluster.stage_map.num_groups > 1 and cluster.rank == 0:
        state = _joined(state, cluster)
    return state


def _joined(state: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """On rank 0 of all processes the states of all groups, of which those of a team have the same."""
    rest = {"models", "optimizers", "active"}
    brought = {name: pytree.tree_map_only(Tensor, lambda t: t.cpu(), state[name]) for name in rest}
    groups = cluster.leaders.gather_objects(brought)[:: cluster.stage_map.replicas]
    models = [model for group in groups for model in group["models"]]
    optimizers = [states for group in groups for states in group["optimizers"]]
    # the first group may have left since it was asked for less: the first state is that of the checkpoint
    optimizers = optimizers[max(0, len(optimizers) - len(models) + 1) :]
    active = sum(group["active"] for group in groups)
    return {**state, "models": models, "optimizers": optimizers, "active": active}


def load_ensemble_state(ensemble: Ensemble, state: Mapping[str, Any]) -> None:
    """What :func:`full_ensemble_state` has saved, as far as this process holds it; there are as many models."""
    first, size = ensemble.models.first, ensemble.models.size
    ensemble.averager.load_progress(state["steps"], min(size, max(0, state["active"] - first)))
    for n, tensors in enumerate(state["models"][first : first + size]):
        ensemble.load(n, tensors)
    for number in range(max(first, 1), first + size):
        own = ensemble.optimizers.of(number - first)
        for optimizer, saved in zip(own, state["optimizers"][number - 1], strict=True):
            optimizer.state.clear()
            load_present_state(optimizer, saved["state"])
    if ensemble.averager.outer is not None and "outer_optimizer" in state:
        saved, position = state["outer_optimizer"], {name: i for i, name in enumerate(ensemble.models.reference)}
        numbers = {old: position[name] for old, name in enumerate(state["outer_names"]) if name in position}
        load_present_state(ensemble.averager.outer, {numbers[old]: entry for old, entry in saved["state"].items()})


def load_present_state(optimizer: Optimizer, states: Mapping[int, Any]) -> None:
    """Load the states of the parameters that have contents here, in the midst of a step.

    ``Optimizer.load_state_dict`` would replace the parameter groups too, which a running step refers to.

    Args:
        states: number of the parameter -> its state.
    """
    parameters = parameters_in(optimizer)
    for number, state in states.items():
        parameter = parameters[number]
        if not parameter.is_meta:
            optimizer.state[parameter] = {name: _beside(parameter, name, value) for name, value in state.items()}


def _beside(parameter: Tensor, name: str, value: Any) -> Any:
    """A copy of a state's entry as ``Optimizer.load_state_dict`` would place it: the step counter stays where it is."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if name == "step":
        return value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Copy optimizer state to beside its parameter, except the step counter, which the optimizer placed itself.

    What is there already is copied too: after loading it may be a map of a file, which must not be kept.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device if value.shape == parameter.shape else value.device, copy=True)

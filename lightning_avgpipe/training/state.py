"""State: checkpoints of all stages, as one process would write them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.optimizers import parameters_in
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.relocation import gather, holders


def full_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """Return on rank 0 the state dict of the whole module; on other ranks their own, with other stages on meta."""
    state = module.state_dict()
    owners = {name: (owner[name],) for name, v in state.items() if isinstance(v, Tensor) and name in owner}
    _check_scales(module, owners)
    return gather(cluster.group, state, owners)


def _check_scales(module: nn.Module, names: Collection[str]) -> None:
    """Check that weights in 4 bits, whose scales are entries of their own, are not wanted from other processes."""
    for name, parameter in module.named_parameters():
        if name in names and parameter.is_meta and hasattr(parameter, "quant_state"):
            raise ConfigurationError(
                f"The state dict holds '{name}', weights in 4 bits that another process has, which are not gathered. "
                "Save what is trained: leave out of state_dict() of your LightningModule what does not require a "
                "gradient, and set self.strict_loading = False"
            )


def own_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """Return the part of the state dict for which this process answers; rank 0 answers for entries without owner."""
    return {name: value for name, value in module.state_dict().items() if owner.get(name, 0) == cluster.rank}


def scattered_owners(module: nn.Module, cluster: Cluster) -> dict[str, int]:
    """Return the owner of each parameter of a module that is divided already, such that every process has its own part.

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
    """Return on rank 0 an ordinary optimizer state, the union of the stages' states; on other ranks their own.

    Every process builds its optimizer over all parameters, so a parameter has the same number on all of them, the
    number that it has in one process.
    """
    state = optimizer.state_dict()
    own = {str(number): entry for number, entry in state["state"].items()}
    whole = gather(processes, own, holders(processes, own))
    state["state"] = {number: whole[str(number)] for number in sorted(map(int, whole))}
    return state


def named_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return this process's optimizer state, keyed by names of parameters instead of numbers.

    Optimizers load it as they load one with numbers, and distributed checkpoints are keyed by names.
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
    """Return on rank 0 the own state of all parallel models, in types that can be read without this package.

    The models of all groups follow each other, so a checkpoint does not depend on the number of groups. Pipeline 0's
    optimizer state is left out, since it is the checkpoint's.
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
    """Join the states of all groups, on rank 0 of all processes; groups of a team have the same state."""
    rest = {"models", "optimizers", "active"}
    brought = {name: pytree.tree_map_only(Tensor, lambda t: t.cpu(), state[name]) for name in rest}
    groups = cluster.leaders.gather_objects(brought)[:: cluster.stage_map.replicas]
    models = [model for group in groups for model in group["models"]]
    optimizers = [states for group in groups for states in group["optimizers"]]
    active = sum(group["active"] for group in groups)
    return {**state, "models": models, "optimizers": optimizers, "active": active}


def load_ensemble_state(ensemble: Ensemble, state: Mapping[str, Any]) -> None:
    """Load a state of :func:`full_ensemble_state` with as many models, as far as this process holds them."""
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
    """Load the states of the parameters that have contents here, possibly during a step.

    ``Optimizer.load_state_dict`` would also replace the parameter groups, to which a running step refers.

    Args:
        optimizer: optimizer over all parameters.
        states: state of each parameter, by its number.
    """
    parameters = parameters_in(optimizer)
    for number, state in states.items():
        parameter = parameters[number]
        if not parameter.is_meta:
            optimizer.state[parameter] = {name: _beside(parameter, name, value) for name, value in state.items()}


def _beside(parameter: Tensor, name: str, value: Any) -> Any:
    """Copy a state's entry to where ``Optimizer.load_state_dict`` would put it; the step counter keeps its device."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if name == "step":
        return value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Copy optimizer state to the device of its parameter, except the step counter, which the optimizer placed itself.

    State on the device is copied as well: after loading it may be mapped from a file, and such memory must not be kept.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device if value.shape == parameter.shape else value.device, copy=True)

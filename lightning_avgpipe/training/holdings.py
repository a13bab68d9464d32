"""Holdings: each process's part of a module's parameters, buffers and optimizer states."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.optimizers import parameters_in, unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.training.stepping import OptimizerShards
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import is_overridden
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.tensors import digest, strided_parts
from lightning_avgpipe.weights.initialisation import Origin, on_meta
from lightning_avgpipe.weights.on_demand import OnDemandGather
from lightning_avgpipe.weights.ownership import Owners, nothing_to_save, on_host, owner_by_name, owners_of
from lightning_avgpipe.weights.relocation import (
    ModuleTensors,
    MovableData,
    OptimizerStates,
    Relocation,
    gather,
    holders,
    relocate,
)


class Holdings:
    """The distribution of a module's tensors and states over processes, which plans change.

    Args:
        module: module; whole on every process, or with parameters on meta, so that no process has all of it.
        cluster: cluster with open channels.
        optimizers: returns the current optimizers of the module.
        origin: source of weights that no process has; None if the module is whole.
        shards: division of optimizer states among replicas; None: each replica keeps all.

    Attributes:
        owner_of: rank of the first owner of each parameter and buffer, which answers for it (its values count), by
            every name; empty before the first plan.
        copies: functions that return a copy of the module (averages of weights) that is divided like it, or None.
        gather: gatherer of parameters that other processes hold.
        shards: as given.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None,
        shards: OptimizerShards | None,
    ) -> None:
        self._module = module
        self._cluster = cluster
        self._optimizers = optimizers
        self.shards = shards
        self._owners: Owners = {}  # current owners of all parameters and buffers
        self._divided = False  # whether processes have given up parameters of other stages
        self._scattered = False  # whether a parameter had no contents on some process before the first plan
        self._unloaded: Sequence[Mapping[str, Any]] = ()  # optimizer states to load when parameters have contents
        self.owner_of: dict[str, int] = {}
        self.copies: list[Callable[[], nn.Module | None]] = []
        self.gather = OnDemandGather(module, cluster, origin)

    def state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """Return the state dict of the module or of a copy; on rank 0 with all stages. Every process calls it."""
        is_own, module = module is None, module or self._module
        if is_own and self._cluster.group_number and not is_overridden("on_save_checkpoint", module):
            return module.state_dict()  # only group 0 writes it, and no hook reads it
        if is_own and not self.owner_of:
            return self._to_begin_with()
        if self._cluster.group.world_size == 1 or not self.owner_of:
            return module.state_dict()
        self._take_in()
        return full_state_dict(module, self._cluster, self.owner_of)

    def _to_begin_with(self) -> dict[str, Any]:
        """Return, before the first plan, the state dict with the weights with which training will begin."""
        module, cluster = self._module, self._cluster
        if not cluster.group.count(on_meta(module)):
            return module.state_dict()
        parameters = dict(module.named_parameters())
        held = holders(cluster.group, [name for name, parameter in parameters.items() if not parameter.is_meta])
        state = full_state_dict(module, cluster, owner_by_name(module, held))
        if cluster.rank == 0:
            absent = {id(parameter): name for name, parameter in parameters.items() if name not in held}
            _check_scales(module, [name for name in absent.values() if name in state])
            found = {name: contents.cpu() for name, contents in self.gather.contents(absent.values())}
            every = module.named_parameters(remove_duplicate=False)
            state.update((name, found[absent[id(p)]]) for name, p in every if id(p) in absent and name in state)
        return state

    def _take_in(self) -> None:
        """Register the buffers that steps have registered in other processes. Every process calls it.

        Raises:
            ConfigurationError: a parameter or buffer that was divided among the processes is no longer in the module.
        """
        named = (self._module.named_parameters, self._module.named_buffers)
        gone = self._owners.keys() - {name for listing in named for name, _ in listing(remove_duplicate=False)}
        if gone and self._cluster.world.world_size > 1:
            raise ConfigurationError(
                f"{listed(sorted(map(repr, gone)))} of the module existed when its stages were made, but no longer "
                "does: a hook has replaced a submodule, or has pruned or parametrized it. With several processes, do "
                "this before training and continue from a checkpoint, or use one process (devices=1)"
            )
        self._owners = {name: ranks for name, ranks in self._owners.items() if name not in gone}
        own = {
            name: (buffer.shape, buffer.dtype, name in self._module.state_dict())
            for name, buffer in self._module.named_buffers() if name not in self._owners and not buffer.is_meta
        }  # fmt: skip
        for rank, found in enumerate(self._cluster.group.exchange_objects(own)):
            for name, (shape, dtype, is_saved) in found.items():
                path, _, leaf = name.rpartition(".")
                module = self._module.get_submodule(path)
                if module._buffers.get(leaf) is None:
                    empty = torch.zeros(shape, dtype=dtype, device=self._cluster.device)
                    module.register_buffer(leaf, empty, persistent=is_saved)
                self._owners = {name: (rank,), **self._owners}
                self.owner_of.setdefault(name, rank)

    @torch.no_grad()
    def share(self, changed: Collection[str]) -> None:
        """Copy what steps have registered or changed to every process, from the processes that answer for it.

        Every process calls it. All buffers are copied, but only weights that every process holds.

        Args:
            changed: full names of the parameters and buffers that steps change.
        """
        if self._cluster.group.world_size == 1:
            return
        self._take_in()
        buffers = [name for name, _ in self._module.named_buffers()]
        self._owners = {**self._owners, **{name: (self.owner_of[name],) for name in buffers if name in changed}}
        self._relocate({**self._owners, **dict.fromkeys(buffers, self._everybody)}, self._tensors())
        weights = {
            name: p for name, p in self._module.named_parameters()
            if name in changed and self._owners[name] == self._everybody
        }  # fmt: skip
        owners = {name: (self.owner_of[name],) for name in weights}
        self._copy(weights, owners, dict.fromkeys(weights, self._everybody))

    def own_state_dict(self) -> dict[str, Any]:
        """Return the part of the module's state dict for which this process answers. Every process calls it."""
        if not self.owner_of:
            state = self.state_dict()
            return {} if self._cluster.rank else state
        return own_state_dict(self._module, self._cluster, self.owner_of)

    def is_owned_elsewhere(self, name: str) -> bool:
        """Return whether another process answers for a parameter or buffer."""
        return self.owner_of.get(name, self._cluster.rank) != self._cluster.rank

    def place(self, plan: Plan, final: bool, others: Sequence[MovableData] = ()) -> None:
        """Move this process's stages to its device and, if the plan is final, give up other stages.

        Every process calls it.

        Args:
            plan: plan, which says which stages use which parameters and buffers.
            final: whether training will use the plan.
            others: data to move in addition to the module and the states of its optimizers.
        """
        device, rank = self._cluster.device, self._cluster.rank
        if not self._owners:
            self._find()
        planned = owners_of(self._module, plan.stages_of, self._cluster.stage_map.ranks, self._cluster.group.world_size)
        if not self._divided:
            self._take_those_of_rank_zero(planned)
        self._divided = self._divided or final
        if final:
            states = OptimizerStates(self._optimizers(), lambda: dict(self._module.named_parameters()))
            self._relocate(planned, [*self._tensors(), states, *others])
        else:
            kept = {name: tuple(dict.fromkeys((*self._owners[name], *planned[name]))) for name in planned}
            self._relocate(kept, [ModuleTensors(self._module)])
        mine = [name for name, _ in self._module.named_parameters() if rank in planned[name]]
        self.gather.fill(mine)
        for name in mine:
            parameter = self._module.get_parameter(name)
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
        for buffer in self._module.buffers():
            buffer.data = buffer.data.to(device)
        self.owner_of = owner_by_name(self._module, planned)
        if final:
            self._load_optimizers()
        for optimizer in self._optimizers():
            move_state(optimizer, device)

    @contextlib.contextmanager
    def whole_on_rank_zero(self, most: float = math.inf, device: torch.device | None = None) -> Iterator[None]:
        """Give rank 0 all weights within this context, if it had them before the first plan.

        Args:
            most: limit, in bytes of weights; if there are more, nothing moves.
            device: device for weights of other processes; None: the host.
        """
        lent: dict[str, tuple[int, ...]] = {}
        if not self._scattered and sum(p.nbytes for p in self._module.parameters()) <= most:
            lent = {name: (*ranks, 0) for name, ranks in self._owners.items()}
        tensors = ModuleTensors(self._module)
        place = device or torch.device("cpu")
        relocate(Relocation(self._owners, lent), self._cluster.group, [tensors], place)
        try:
            yield
        finally:
            tensors.drop([name for name in lent if self._cluster.rank not in self._owners[name]])

    @contextlib.contextmanager
    def shared(
        self, others: Sequence[MovableData] = (), other_tensors: Callable[[], Iterable[Tensor]] = tuple
    ) -> Iterator[torch.device]:
        """Give every process all weights within this context, on the host, unless the module began on meta.

        Every process calls it. As in ddp, each has its own copy. Of a tensor that is written, the owners' copies are
        kept if an owner has written it, and else the copy of the first process that has.

        Args:
            others: data that every process gets within this context in addition to the module's tensors.
            other_tensors: returns the tensors of these data.
        Returns:
            A context that yields the device of the weights.
        """
        if self._scattered or not self._owners:
            yield self._cluster.device
            return
        self._take_in()
        group, rank = self._cluster.group, self._cluster.rank
        everybody = dict.fromkeys(self._owners, self._everybody)
        kinds = [*self._tensors(), *others]
        relocate(Relocation(self._owners, everybody), group, kinds, torch.device("cpu"))
        before = _bits(kinds, everybody)
        modules = [self._module, *self._copies()]
        with on_host((*other_tensors(), *(t for module in modules for t in (*module.parameters(), *module.buffers())))):
            yield torch.device("cpu")
        self._take_in()
        kinds = [*self._tensors(), *others]  # made again: parameters may be other objects now
        after = _bits(kinds, self._owners)
        writers = holders(group, [name for name, bits in after.items() if bits != before.get(name)])
        taken = {n for n, ranks in writers.items() if not {*ranks} & {*self._owners[n]}}
        held = {n: writers[n][:1] if n in taken else ranks for n, ranks in self._owners.items()}
        for kind in reversed(kinds):
            kind.drop([name for name, ranks in held.items() if rank not in ranks])
        relocate(Relocation(held, self._owners), group, kinds, self._cluster.device)

    @torch.no_grad()
    def equalise_start(self, copied: Collection[str]) -> None:
        """Make the parameters and buffers of a name equal in all processes that hold it. Every process calls it.

        Without a seed, each process has drawn its own initial weights. Parameters that several stages use, and buffers,
        are copied from their first holder; then all tensors are copied from the first group.

        Args:
            copied: names of parameters that several stages use.
        """
        buffers = {name: buffer for name, buffer in self._module.named_buffers() if not buffer.is_meta}
        named: dict[str, Tensor] = {**dict(self._module.named_parameters()), **buffers}
        shared = {name: self._owners[name] for name in (*copied, *buffers)}
        self._copy(named, {name: ranks[:1] for name, ranks in shared.items()}, shared)
        tensors = (*(p.detach() for p in self._module.parameters() if not p.is_meta), *self._module.buffers())
        for others in (self._cluster.averaging_group, self._cluster.replicas):
            if others is not None:
                others.copy([part for tensor in tensors for part in strided_parts(tensor)])

    @torch.no_grad()
    def _take_those_of_rank_zero(self, planned: Owners) -> None:
        """Copy parameters that every process has from rank 0, as ddp does.

        Without a seed, each process has drawn its own. Parameters that are already equal everywhere are not sent.

        Args:
            planned: future owners.
        """
        named = {name: p for name, p in self._module.named_parameters() if self._owners[name] == self._everybody}
        sums = self._cluster.group.exchange_objects({name: int(digest(p)) for name, p in named.items()})
        other = {name: planned[name] for name in named if len({theirs[name] for theirs in sums}) > 1}
        self._copy(named, dict.fromkeys(other, (0,)), other)

    def _copy(self, named: Mapping[str, Tensor], old: Owners, new: Owners) -> None:
        """Copy contents from the old owners of each name into the tensors of the new ones."""
        arrived = Relocation(old, new).carry_out(self._cluster.group, lambda name: named[name].detach())
        for name, arrival in arrived.items():
            named[name].copy_(arrival.on(named[name].device))

    def restore(self) -> None:
        """Move the whole module and its copies back to every process, unless it began on meta. Every process calls it.

        A module that began on meta is too large for that: each process keeps its own stages, on the host, and all
        buffers.
        """
        self._take_in()
        names = [name for name, _ in self._module.named_buffers()] if self._scattered else list(self._owners)
        whole = {**self._owners, **dict.fromkeys(names, self._everybody)}
        self._relocate(whole, self._tensors(), torch.device("cpu"))

    @property
    def _everybody(self) -> tuple[int, ...]:
        """The ranks of all processes of the group."""
        return tuple(range(self._cluster.group.world_size))

    def _tensors(self) -> list[MovableData]:
        return [ModuleTensors(module) for module in (self._module, *self._copies())]

    def _copies(self) -> list[nn.Module]:
        return [copy for other in self.copies if (copy := other()) is not None]

    def load_later(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load optimizer states once their parameters have contents.

        Args:
            states: state of each optimizer, of the whole module; they may be mapped from a file.
        """
        self._unloaded = states

    def to_load(self, optimizer: Optimizer) -> Mapping[str, Any] | None:
        """Return the state that :meth:`load_later` keeps for an optimizer; None if there is none."""
        waiting = zip(self._optimizers(), self._unloaded, strict=False)
        return next((state for other, state in waiting if unwrapped(other) is unwrapped(optimizer)), None)

    def load_if_placed(self) -> None:
        """Load the states that :meth:`load_later` keeps, if a final plan has placed the parameters."""
        if self._divided:
            self._load_optimizers()

    def _load_optimizers(self) -> None:
        for optimizer, state in zip(self._optimizers(), self._unloaded, strict=False):
            load_present_state(optimizer, state)
        self._unloaded = ()
        if self.shards is not None:
            self.shards.assign(self._optimizers())

    def _find(self) -> None:
        """Find the owners before the first plan: of buffers all processes, of parameters those that have contents."""
        held = {name for name, parameter in self._module.named_parameters() if not parameter.is_meta}
        found, everybody = holders(self._cluster.group, held), self._everybody
        self._owners = {name: found.get(name, ()) for name, _ in self._module.named_parameters()}
        self._scattered = any(ranks != everybody for ranks in self._owners.values())
        self._owners |= {name: everybody for name, _ in self._module.named_buffers()}

    def _relocate(self, owners: Owners, kinds: Sequence[MovableData], device: torch.device | None = None) -> None:
        """Move the data of each name to its new owners, on a device (default: the cluster's)."""
        relocate(Relocation(self._owners, owners), self._cluster.group, kinds, device or self._cluster.device)
        self._owners = owners


def _bits(kinds: Sequence[MovableData], names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return digests of all tensors that this process has under each name."""
    found = {name: tree.tensors([kind.held(name) for kind in kinds]) for name in names}
    return {name: tuple(int(digest(t)) for t in tensors if not t.is_meta) for name, tensors in found.items()}


# -- checkpoints of all stages, as one process would write them --------------------------------------------------------


def full_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """Return the state dict of the whole module on rank 0; on other ranks their own, with other stages on meta."""
    state = module.state_dict()
    owners = {name: (owner[name],) for name, v in state.items() if isinstance(v, Tensor) and name in owner}
    _check_scales(module, owners)
    return gather(cluster.group, state, owners)


def _check_scales(module: nn.Module, names: Collection[str]) -> None:
    """Check that no 4-bit weights of other processes must be gathered: their scales are separate entries.

    Raises:
        ConfigurationError: there are such weights.
    """
    for name, parameter in module.named_parameters():
        if name in names and parameter.is_meta and hasattr(parameter, "quant_state"):
            raise ConfigurationError(
                f"The state dict contains '{name}': 4-bit weights of another process, which cannot be gathered. Save "
                "only what is trained: leave what does not require a gradient out of state_dict() of your "
                "LightningModule, and set self.strict_loading = False"
            )


def own_state_dict(module: nn.Module, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """Return the part of the state dict for which this process answers; rank 0 answers for entries without an owner."""
    return {name: value for name, value in module.state_dict().items() if owner.get(name, 0) == cluster.rank}


def scattered_owners(module: nn.Module, cluster: Cluster) -> dict[str, int]:
    """Return the owner of each parameter of a module that was divided before: every process has only its own part.

    Raises:
        ConfigurationError: no process has contents for a parameter yet.
    """
    held = holders(cluster.group, [name for name, p in module.named_parameters() if not p.is_meta])
    for name, _ in module.named_parameters():
        if name not in held:
            raise nothing_to_save(name)
    return owner_by_name(module, held)


def full_optimizer_state(optimizer: Optimizer, processes: Collectives) -> dict[str, Any]:
    """Return an ordinary optimizer state on rank 0, the union of the stages' states; on other ranks their own.

    Every process builds its optimizer over all parameters, so a parameter has the same number on all of them as it has
    in a single process.
    """
    state = optimizer.state_dict()
    own = {str(number): entry for number, entry in _own_entries(optimizer, state).items()}
    whole, rest = gather(processes, own, holders(processes, own)), _of_no_parameter(state["state"])
    numbers = sorted({*map(int, whole), *(state["state"].keys() - rest.keys())})
    state["state"] = {**{number: whole.get(str(number), {}) for number in numbers}, **rest}
    return state


def _of_no_parameter(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an optimizer keeps in addition to the states of its parameters, whose keys are numbers."""
    return {key: value for key, value in states.items() if not isinstance(key, int)}


def _own_entries(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the states of the parameters that this process has, by their numbers.

    Empty entries are left out: an optimizer makes one when it only looks up the state of another stage's parameter.
    """
    states = state["state"]
    out = {number for number, p in enumerate(parameters_in(optimizer)) if p.is_meta} | _of_no_parameter(states).keys()
    return {number: entry for number, entry in states.items() if number not in out and entry}


def named_optimizer_state(
    optimizer: Optimizer, module: nn.Module, entries: Mapping[int, Any] | None = None
) -> dict[str, Any]:
    """Return this process's optimizer state, keyed by names of parameters instead of numbers.

    Optimizers load it like one with numbers, and distributed checkpoints are keyed by names.

    Args:
        optimizer: optimizer over all parameters.
        module: module that names them.
        entries: states of parameters by their number; None: those of the parameters that this process has.
    """
    state = optimizer.state_dict()
    if entries is None:
        entries = {**_own_entries(optimizer, state), **_of_no_parameter(state["state"])}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = {n: names.get(id(p), str(n)) for n, p in zip(numbers, parameters_in(optimizer), strict=True)}
    return {
        "state": {name_of.get(number, number): entry for number, entry in entries.items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def full_ensemble_state(ensemble: Ensemble, cluster: Cluster, owner: Mapping[str, int]) -> dict[str, Any]:
    """Return the state of each parallel model on rank 0, in types that can be read without this package.

    The models of all groups are in one list, so a checkpoint does not depend on the number of groups. The optimizer
    state of pipeline 0 is left out, since the checkpoint itself has it.
    """
    state: dict[str, Any] = {"models": []}
    with ensemble.showing_reference(False):
        state |= ensemble.averager.state_dict()
        owners = {name: (owner[name],) for late in state["late"] for name in late["names"]}
        parts = [ensemble.models.sums, *(model.sent for model in ensemble.models.each)]
        state["sums"], *state["sent"] = [
            gather(cluster.group, {n: part.get(n) for n in owners}, owners) for part in parts
        ]
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
    """Join the states of all teams, on rank 0 of all processes; all groups of a team have the same state."""
    rest = {"models", "optimizers", "active", "sent"}
    brought = {name: tree.map_tensors(Tensor.cpu, state[name]) for name in rest}
    groups = cluster.leaders.gather_objects(brought)[:: cluster.stage_map.replicas]
    models = [model for group in groups for model in group["models"]]
    optimizers = [states for group in groups for states in group["optimizers"]]
    active = [sum(numbers) for numbers in zip(*(group["active"] for group in groups), strict=True)]
    sent = [tensors for group in groups for tensors in group["sent"]]
    return {**state, "models": models, "optimizers": optimizers, "active": active, "sent": sent}


def load_ensemble_state(ensemble: Ensemble, state: Mapping[str, Any]) -> None:
    """Load this process's part of a state of :func:`full_ensemble_state` that has the same number of models."""
    first, size = ensemble.models.first, ensemble.models.size
    for n, tensors in enumerate(state["models"][first : first + size]):
        ensemble.load(n, tensors)
        ensemble.models.each[n].sent.update(_held(ensemble, state["sent"][first + n]))
    ensemble.models.sums.update(_held(ensemble, state["sums"]))
    for number in range(max(first, 1), first + size):
        own = ensemble.optimizers.of(number - first)
        for optimizer, saved, counted in zip(
            own, state["optimizers"][number - 1], ensemble.optimizers.names_set_by_steps, strict=True
        ):
            optimizer.state.clear()
            load_present_state(optimizer, saved)
            for group, was in zip(optimizer.param_groups, saved["param_groups"], strict=False):
                group.update({name: copy.deepcopy(was[name]) for name in counted if name in was})
    if ensemble.averager.outer is not None and "outer_optimizer" in state:
        saved, position = state["outer_optimizer"], {name: i for i, name in enumerate(ensemble.models.reference)}
        numbers = {old: position[name] for old, name in enumerate(state["outer_names"]) if name in position}
        entries = {numbers.get(old, old): entry for old, entry in saved["state"].items()}
        load_present_state(ensemble.averager.outer, {**saved, "state": entries})
    own_active = [min(size, max(0, active - first)) for active in state["active"]]
    ensemble.averager.load_state_dict({**state, "active": own_active})


def _held(ensemble: Ensemble, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of saved tensors of the parameters that this process has, on their devices."""
    own = ensemble.models.parameters(0)
    return {name: tensor.to(own[name].device, copy=True) for name, tensor in saved.items() if name in own}


def load_present_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the states of the parameters that have contents in this process, possibly while the optimizer steps.

    ``Optimizer.load_state_dict`` would also replace the parameter groups, which a running step uses, so the entries are
    copied here instead. If a class overrides that method, another object of the class, which shares all attributes with
    the optimizer, loads them with it. If an optimizer wraps another one, with which it shares states, entries are
    copied in any case.

    Args:
        optimizer: optimizer over all parameters.
        saved: its state dict, in which ``state`` has the state of each parameter by its number.
    """
    parameters, numbers = parameters_in(optimizer), itertools.count()
    rest = _of_no_parameter(saved["state"])
    here = saved["state"].keys() - rest.keys()
    present = {number: saved["state"][number] for number in sorted(here) if not parameters[number].is_meta}
    optimizer.state.update(copy.deepcopy(rest))
    wraps = any(isinstance(unwrapped(value), Optimizer) for value in vars(optimizer).values())
    if wraps or type(optimizer).load_state_dict is Optimizer.load_state_dict:
        moving = with_moving_counters(optimizer)
        for number, entry in present.items():
            parameter, moves = parameters[number], id(parameters[number]) in moving
            copied = {name: _copied_for(parameter, name, value, moves) for name, value in entry.items()}
            optimizer.state[parameter] = copied
        return
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]
    reader = object.__new__(type(optimizer))
    vars(reader).update(vars(optimizer))
    reader.load_state_dict({**saved, "state": present, "param_groups": groups})
    for parameter in (parameters[number] for number in present):  # cloned: the saved state may be mapped from a file
        optimizer.state[parameter] = tree.map_tensors(Tensor.clone, reader.state.pop(parameter))


def with_moving_counters(optimizer: Optimizer) -> set[int]:
    """Return the ``id`` of the parameters whose step counters are on their device, for kernels that count there."""
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    return {id(parameter) for group in groups for parameter in group["params"]}


def is_counter(parameter: Tensor, name: str, value: Tensor) -> bool:
    """Return whether a tensor in an entry of a parameter's state counts steps, and so may be kept on the host."""
    return name == "step" or value.dim() == 0 < parameter.dim()


def _copied_for(parameter: Tensor, name: str, value: Any, moves: bool) -> Any:
    """Copy an entry of a state to the device and type that ``Optimizer.load_state_dict`` would give it."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if name == "step":
        return value.to(parameter.device, torch.float32, copy=True) if moves else value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Copy optimizer states to a device, except counters that the optimizer keeps on the host.

    States that are on the device already are copied as well: after loading, their memory may be mapped from a file.
    """
    moving = with_moving_counters(optimizer)
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            optimizer.state[parameter] = copy.deepcopy(state)
            continue
        for name, value in state.items():
            if isinstance(value, Tensor):
                stays = id(parameter) not in moving and is_counter(parameter, name, value)
                state[name] = value.to(value.device if stays else device, copy=True)

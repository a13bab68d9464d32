"""Holdings: what each process has of a module's parameters, buffers and optimizer states."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.training.optimizer_shards import OptimizerShards
from lightning_avgpipe.training.state import full_state_dict, gathers, load_present_state, move_state, own_state_dict
from lightning_avgpipe.utils.tensors import strided_parts
from lightning_avgpipe.weights.belongings import Belongings, ModuleTensors, OptimizerStates, relocate
from lightning_avgpipe.weights.initialisation import Origin
from lightning_avgpipe.weights.on_demand import OnDemandGather
from lightning_avgpipe.weights.ownership import Owners, answering, owners_of
from lightning_avgpipe.weights.relocation import Relocation, holders


class Holdings:
    """Moves what belongs to a module to where plans want it, and remembers who has what.

    Args:
        module: whole on every process, or with parameters on meta that are never brought together.
        cluster: with open channels.
        optimizers: those that step the module, as of when it is called.
        origin: of the contents that no process has; None if the module is whole.
        shards: which replica keeps the states of which parameters; None: each keeps all.

    Attributes:
        answers: parameter or buffer, by every name it has -> the rank that answers for it; empty before the first plan.
        copies: return copies of the module that are divided as it is (averages of weights), or None.
        gather: brings single contents to where they are needed.
        shards: as given.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None,
        shards: OptimizerShards | None = None,
    ) -> None:
        self._module = module
        self._cluster = cluster
        self._optimizers = optimizers
        self.shards = shards
        self._owners: Owners = {}  # of what this process and others hold now
        self._scattered = False  # some parameters have no contents on some process before the first plan
        self._unloaded: Sequence[Mapping[str, Any]] = ()  # states for optimizers whose parameters have no contents yet
        self.answers: dict[str, int] = {}
        self.copies: list[Callable[[], nn.Module | None]] = []
        self.gather = OnDemandGather(module, cluster, origin)

    def state_dict(self, copy: nn.Module | None = None) -> dict[str, Any]:
        """That of the module, or of a copy that is divided as it is: whole on rank 0. Every process calls it."""
        module = copy or self._module
        if self._cluster.group.world_size == 1 or not self.answers or (copy is None and not gathers(self._cluster)):
            return module.state_dict()
        return full_state_dict(module, self._cluster, self.answers)

    def own_state_dict(self) -> dict[str, Any]:
        """The part of the module's that this process answers for."""
        return own_state_dict(self._module, self._cluster, self.answers)

    def answered_elsewhere(self, name: str) -> bool:
        """Whether another process answers for it."""
        return self.answers.get(name, self._cluster.rank) != self._cluster.rank

    def place(self, plan: Plan, final: bool, others: Sequence[Belongings] = ()) -> None:
        """Bring the own stages to the device; if the plan is final, give the others' up. Every process calls it.

        Args:
            plan: says which stages use what.
            others: what moves with the module and its optimizers.
        """
        device, rank = self._cluster.device, self._cluster.rank
        if not self._owners:
            self._find()
        planned = owners_of(self._module, plan.stages_of, self._cluster.stage_map.ranks, self._cluster.group.world_size)
        kinds: list[Belongings] = [ModuleTensors(self._module)]
        if final:
            kinds += [OptimizerStates(self._optimizers(), lambda: dict(self._module.named_parameters())), *others]
            kinds += [ModuleTensors(copy) for other in self.copies if (copy := other()) is not None]
            self._relocate(planned, kinds)
        else:
            kept = {name: tuple(dict.fromkeys((*self._owners[name], *planned[name]))) for name in planned}
            self._relocate(kept, kinds)
        mine = [name for name, _ in self._module.named_parameters() if rank in planned[name]]
        self.gather.fill(mine)
        for name in mine:
            parameter = self._module.get_parameter(name)
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
        for buffer in self._module.buffers():
            buffer.data = buffer.data.to(device)
        self.answers = answering(self._module, planned)
        if final:
            self._load_optimizers()
        if final and self.shards is not None:
            self.shards.assign(self._optimizers())
        for optimizer in self._optimizers():
            move_state(optimizer, device)

    @contextlib.contextmanager
    def whole_on_rank_zero(self, most: float = math.inf) -> Iterator[None]:
        """Within this context rank 0 has all weights, if it had them before the first plan: to time units.

        Args:
            most: bytes of weights; where they are more, nothing moves.
        """
        lent: dict[str, tuple[int, ...]] = {}
        if not self._scattered and sum(p.nbytes for p in self._module.parameters()) <= most:
            lent = {name: (*ranks, 0) for name, ranks in self._owners.items()}
        tensors = ModuleTensors(self._module)
        relocate(Relocation(self._owners, lent), self._cluster.group, [tensors], torch.device("cpu"))
        try:
            yield
        finally:
            tensors.drop([name for name in lent if self._cluster.rank not in self._owners[name]])

    @torch.no_grad()
    def begin_alike(self, copied: Collection[str]) -> None:
        """What several processes have begins as the first of them has it. Every process calls it.

        Without a seed each has drawn weights of its own. Groups begin with those of the first.

        Args:
            copied: parameters that several stages use.
        """
        buffers = {name: buffer for name, buffer in self._module.named_buffers() if not buffer.is_meta}
        named: dict[str, Tensor] = {**dict(self._module.named_parameters()), **buffers}
        shared = {name: self._owners[name] for name in (*copied, *buffers)}
        relocation = Relocation({name: ranks[:1] for name, ranks in shared.items()}, shared)
        for name, arrival in relocation.carry_out(self._cluster.group, lambda name: named[name].detach()).items():
            named[name].copy_(arrival.on(self._cluster.device))
        tensors = (*(p.detach() for p in self._module.parameters() if not p.is_meta), *self._module.buffers())
        for others in (self._cluster.replica_group, self._cluster.replicas):
            if others is not None:
                others.copy([part for tensor in tensors for part in strided_parts(tensor)])

    def restore(self) -> None:
        """Every process holds the whole module again, unless it began on meta. Every process calls it.

        What began on meta is too large for that: each process keeps its own stages, on the host, and all buffers.
        """
        everybody = tuple(range(self._cluster.group.world_size))
        names = [name for name, _ in self._module.named_buffers()] if self._scattered else list(self._owners)
        whole = {**self._owners, **dict.fromkeys(names, everybody)}
        self._relocate(whole, [ModuleTensors(self._module)], torch.device("cpu"))

    def load_later(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load optimizer states when the parameters are there that they belong to.

        Args:
            states: one per optimizer, of the whole module; they may be mapped from a file.
        """
        self._unloaded = states

    def _load_optimizers(self) -> None:
        for optimizer, state in zip(self._optimizers(), self._unloaded, strict=False):
            load_present_state(optimizer, state["state"])
        self._unloaded = ()

    def _find(self) -> None:
        """Before the first plan: every process has everything but for parameters on meta, and those it knows of."""
        held = {name for name, parameter in self._module.named_parameters() if not parameter.is_meta}
        found, everybody = holders(self._cluster.group, held), tuple(range(self._cluster.group.world_size))
        self._owners = {name: found.get(name, ()) for name, _ in self._module.named_parameters()}
        self._scattered = any(ranks != everybody for ranks in self._owners.values())
        self._owners |= {name: everybody for name, _ in self._module.named_buffers()}

    def _relocate(self, owners: Owners, kinds: Sequence[Belongings], device: torch.device | None = None) -> None:
        """Let everything be where these owners say, as far as anybody has it; on the cluster's device, or another."""
        relocate(Relocation(self._owners, owners), self._cluster.group, kinds, device or self._cluster.device)
        self._owners = owners

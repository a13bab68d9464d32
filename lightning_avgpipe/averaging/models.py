"""Models: each parallel model's own tensors on this process, and their reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.replica import Placement, Replica, alike, leaf_like
from lightning_avgpipe.averaging.shared_buffers import SharedBuffers, deviation, has_mean
from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS


class Models:
    """The tensors of the parallel models; the module itself is model 0.

    Args:
        placement: placement that puts one of the models into the module.
        replica_group: processes that hold the parallel models of other groups; None if there are none.

    Attributes:
        placement: as given.
        replicas: own tensors of each model.
        reference: tensors, by name, of all parameters that any process trains; those of other processes are on meta.
        shared: buffers of the reference over groups; None if there is one group.
        shown: what the module has in the place of model 0 while it shows the reference; None if it does not.
    """

    def __init__(self, placement: Placement, replica_group: ReplicaGroup | None) -> None:
        self.placement = placement
        self._replica_group = replica_group
        self.replicas: list[Replica] = [placement.own]
        self.reference: dict[str, Tensor] = {}
        self.shown: Replica | None = None
        self.shared = None if replica_group is None else SharedBuffers(placement.own.buffers, replica_group)

    @property
    def size(self) -> int:
        """The number N of models of this group."""
        return len(self.replicas)

    @property
    def total(self) -> int:
        """The number of models of all groups."""
        return self.size * (1 if self._replica_group is None else self._replica_group.count)

    @property
    def first(self) -> int:
        """The number of this group's model 0 among the models of all groups."""
        return 0 if self._replica_group is None else self.size * self._replica_group.number

    @property
    def mine(self) -> list[str]:
        """The names of trained parameters on this process, in the same order on processes with the same stages."""
        return [name for name in self.reference if name in self.placement.own.parameters]

    def tensors(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return the tensors of these parameters for each model, and those of the reference."""
        models = [[replica.parameters[name].detach() for name in self.mine] for replica in self.replicas]
        return models, [self.reference[name] for name in self.mine]

    def parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Return the trained parameters of model n on this process, in the same order for the same stages."""
        return {name: self.replicas[number].parameters[name] for name in self.mine}

    def buffers(self, number: int, names: Collection[str]) -> dict[str, Tensor]:
        """Return the buffers of model n that have these names, and as ``written i`` other tensors that steps write.

        Pipeline 0's model must be in the module, and the reference not shown.
        """
        self.placement.read_back()
        replica = self.replicas[number]
        found = {name: buffer for name, buffer in replica.buffers.items() if name in names}
        memory = [tensor.detach() for tensor in self.placement.written] if number == 0 else replica.memory
        return found | {f"written {i}": tensor for i, tensor in enumerate(memory)}

    def foreign_tensors(self, number: int, buffers: Collection[str]) -> dict[str, list[Tensor]]:
        """Return the tensors of the other models by name, while a parallel model is in the module.

        Args:
            number: number n of that model.
            buffers: names of buffers to include; the models may share other buffers.
        """
        self.placement.read_back()
        others = [replica for replica in self.replicas if replica.number != number]
        own = self.placement.own
        found: dict[str, list[Tensor]] = {name: [r.parameters[name] for r in others] for name in own.parameters}
        found |= {name: [r.buffers[name] for r in others] for name in buffers if name in own.buffers}
        return found

    def _mean_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the reference: means where a mean exists, else those of pipeline 0.

        With several groups these are the buffers of the last averaging.
        """
        if self.shared is not None:
            return {name: alike(buffer, buffer.clone()) for name, buffer in self.shared.buffers.items()}
        self.placement.read_back()
        found = dict(self.placement.own.buffers)
        for name, first in found.items():
            others = [replica.buffers[name] for replica in self.replicas[1:]]
            if has_mean(first) and all(b.shape == first.shape for b in others):
                wide = first.detach().to(torch.promote_types(first.dtype, torch.float32))
                total = sum((deviation(b, wide) for b in others), torch.zeros_like(wide))
                found[name] = alike(first, (wide + total / self.size).to(first.dtype))
        return found

    def train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each model its own copy of parameters that begin to train. The module's tensors must be in place."""
        here = [name for name, parameter in parameters.items() if not parameter.is_meta]
        self.placement.drop(parameters)
        self.placement.add(here)
        own = self.placement.own.parameters
        for name, parameter in parameters.items():
            data = parameter.detach()
            self.reference[name] = data.clone() if name in own else torch.empty_like(data, device="meta")
        for replica in self.replicas[1:]:
            for name in here:
                replica.parameters[name] = self.leaf(name)
                replica.buffers.pop(name, None)

    def resize(self, size: int) -> None:
        """Drop models, or add models that start from the reference, up to ``size``. The reference must not be shown."""
        del self.replicas[size:]
        buffers = self._mean_buffers() if self.size < size else {}
        while self.size < size:
            replica = Replica(self.size)
            replica.buffers = {name: alike(buffer, buffer.clone()) for name, buffer in buffers.items()}
            replica.memory = [tensor.detach().clone() for tensor in self.placement.written]
            for name in self.mine:
                replica.parameters[name] = self.leaf(name)
            self.replicas.append(replica)

    def show(self, reference: bool) -> None:
        """Put the reference into the place of model 0 in the module, or model 0 again."""
        own, self.shown = self.placement.own, None
        if reference:
            self.shown = Replica(0)
            self.shown.parameters, self.shown.memory = own.parameters, own.memory
            self.shown.buffers = self._mean_buffers()
        self.placement.put(self.shown or own)
        for name, parameter in own.parameters.items():
            centre = self.reference[name]
            parameter.data, centre.data = centre.data, parameter.data

    def leaf(self, name: str) -> nn.Parameter:
        """Return a new leaf for a model, with the contents of the reference and the hooks of the module's parameter."""
        leaf, own = leaf_like(self.reference[name]), self.placement.own.parameters[name]
        leaf.requires_grad_(own.requires_grad)
        for hooks in GRADIENT_HOOKS:  # a hook acts on the gradient of every model
            if getattr(own, hooks, None):
                setattr(leaf, hooks, getattr(own, hooks))
        return leaf

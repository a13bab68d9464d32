"""The parallel models' own parameters and buffers, of which the module shows those of one model at a time.

::

    module.layer._parameters["weight"]   <-  replica 0: the module's own Parameter objects
                                         <-  replica 1: leaves of its own
    module.layer._buffers["mean"]        <-  one for each replica

Parameters without gradient that a step changes itself (a momentum encoder) are like buffers: each model has its own,
and the reference has their mean. Other frozen parameters are shared. Tensors in attributes, lists and objects that a
step writes into get other memory for each model, but stay the same objects; the reference shows those of model 0. All
else in a module is shared by the models (states of metrics), or kept by each stage (numbers and lists that a step
changes).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from lightning_avgpipe.weights.slots import Slot, slots_for


class Replica:
    """One parallel model's own tensors.

    Attributes:
        number: number n of the model, from 0.
        parameters: parameters that take the place of the module's, by name.
        buffers: buffers, and frozen parameters that a step changes, that take the place of the module's, by name.
        memory: memory of other tensors that a step writes into.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory: list[Tensor] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def clear_gradients(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None


class Placement:
    """The placement of parallel models in the module, one at a time.

    Args:
        module: module as the user made it; its own tensors are in place.
        names: names of the parameters that each model has of its own.
        observers: modules that only read values (metrics), whose buffers belong to no model.
        changing: names of frozen parameters that a step changes.
        written: other tensors that a step writes into.

    Attributes:
        written: as given.
        own: model 0: the module's own parameters and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Collection[str],
        observers: Collection[nn.Module] = (),
        changing: Collection[str] = (),
        written: Sequence[Tensor] = (),
    ) -> None:
        self._module = module
        self.written = written
        watched = {id(buffer) for observer in observers for buffer in observer.buffers()}
        buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in watched}
        buffers |= {name: p for name, p in module.named_parameters() if name in changing and not p.requires_grad}
        self.own = Replica(0)
        self._placed = self.own
        self._parameter_slots: dict[str, list[Slot]] = {}
        places = slots_for(module, buffers.values())
        self._buffer_slots = {name: places[id(buffer)] for name, buffer in buffers.items()}
        self.own.buffers = buffers
        self.own.memory = [tensor.detach() for tensor in written]
        self.add(names)

    def add(self, names: Collection[str]) -> None:
        """Let models have these parameters of their own as well. The module's own tensors must be in place."""
        parameters = dict(self._module.named_parameters())
        by_id = slots_for(self._module, [parameters[name] for name in names])
        for name in names:
            self._parameter_slots[name] = by_id[id(parameters[name])]
            self.own.parameters[name] = parameters[name]

    def remove(self, name: str) -> None:
        """Remove a parameter, if models have it of their own. The module's own tensors must be in place."""
        self._parameter_slots.pop(name, None)
        self.own.parameters.pop(name, None)

    def drop(self, names: Collection[str]) -> None:
        """Remove parameters that begin to train from the buffers. The module's own tensors must be in place."""
        for name in names:
            self.own.buffers.pop(name, None)
            self._buffer_slots.pop(name, None)

    def put(self, replica: Replica) -> None:
        """Put a model into the module, unless it is there."""
        if replica is self._placed:
            return
        placed = self._placed
        for name, slots in self._buffer_slots.items():
            placed.buffers[name] = slots[0].get()  # user code may have assigned another tensor
            for slot in slots:
                slot.set(replica.buffers[name])
        for name, slots in self._parameter_slots.items():
            parameter = replica.parameters[name]
            for slot in slots:
                slot.set(parameter)
        for i, tensor in enumerate(self.written if replica.memory is not placed.memory else ()):
            # exchange the memory and not the contents: tensors saved for a backward must not change
            placed.memory[i] = tensor.detach()
            tensor.data = replica.memory[i]
        self._placed = replica

    def read_back(self) -> None:
        """Note buffers that user code has assigned anew."""
        for name, slots in self._buffer_slots.items():
            self._placed.buffers[name] = slots[0].get()


def alike(tensor: Tensor, contents: Tensor) -> Tensor:
    """Return contents as a frozen parameter or as a buffer, whichever the tensor is."""
    return nn.Parameter(contents.detach(), requires_grad=False) if isinstance(tensor, nn.Parameter) else contents


def leaf_like(parameter: Tensor) -> nn.Parameter:
    """Return a new leaf with a copy of the contents."""
    return nn.Parameter(parameter.detach().clone(memory_format=torch.preserve_format), parameter.requires_grad)

"""The tensors of the parallel models on this process, and of their reference. The module shows one model at a time.

::

    module.layer._parameters["weight"]   <-  model 0: the module's own Parameter objects
                                         <-  model 1: leaves of its own
    module.layer._buffers["mean"]        <-  one for each model

Parameters without gradient that a step itself changes (a momentum encoder) are like buffers: each model has its own,
and the reference has their mean. Other frozen parameters are shared. Tensors in attributes, lists and objects into
which a step writes stay the same objects, but each model has its own memory for them; the reference uses that of model
0. Everything else in a module is shared by the models (states of metrics), or kept by each stage (numbers and lists
that a step changes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.averaging_step import wide
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.tensors import is_strided
from lightning_avgpipe.utils.torch_compat import share_gradient_hooks
from lightning_avgpipe.weights.ownership import fill, vacate
from lightning_avgpipe.weights.slots import Slot, slots_for


class ParallelModel:
    """The tensors that one parallel model does not share with others.

    Attributes:
        number: number n of the model, from 0.
        parameters: parameters that replace the module's, by name.
        buffers: buffers, and frozen parameters that a step changes, that replace the module's, by name.
        memory: memory of other tensors into which a step writes.
        sent: parameters, by name, as they were when a late averaging that has not ended was started.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: dict[str, Tensor] = {}
        self.memory: list[Tensor] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def clear_gradients(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None


class Models:
    """The tensors of the parallel models; the module itself is model 0.

    Args:
        module: module as the user made it; its own tensors are in place.
        observers: modules that only read values (metrics), whose buffers belong to no model.
        changing: names of tensors that a step changes; used for frozen parameters.
        written: other tensors into which a step writes.
        averaging_group: processes of all groups that hold the same stages; None if there is one group.

    Attributes:
        each: the models of this group.
        own: model 0, with the module's own parameters and buffers.
        reference: tensors, by name, of all parameters that any process trains; those of other processes are on meta.
        sums: sums of late averagings that have not ended, by name of the parameter.
        shared: buffers of the reference, averaged over groups; None if there is one group.
        placed: model that the module has now, which may be ``shown``.
        shown: what the module has in place of model 0 while it shows the reference; None if it does not.
    """

    def __init__(
        self,
        module: nn.Module,
        observers: Collection[nn.Module] = (),
        changing: Collection[str] = (),
        written: Sequence[Tensor] = (),
        averaging_group: TensorCollectives | None = None,
    ) -> None:
        self._module = module
        self._written = written
        self._averaging_group = averaging_group
        watched = {id(buffer) for observer in observers for buffer in observer.buffers()}
        buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in watched}
        buffers |= {name: p for name, p in module.named_parameters() if name in changing and not p.requires_grad}
        places = slots_for(module, buffers.values())
        self._buffer_slots = {name: places[id(buffer)] for name, buffer in buffers.items()}
        self._parameter_slots: dict[str, list[Slot]] = {}
        self.own = self.placed = ParallelModel(0)
        self.own.buffers = buffers
        self.own.memory = [tensor.detach() for tensor in written]
        self.each = [self.own]
        self.reference: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.shown: ParallelModel | None = None
        self.shared = None if averaging_group is None else SharedBuffers(buffers, averaging_group)

    @property
    def size(self) -> int:
        """The number N of models of this group."""
        return len(self.each)

    @property
    def total(self) -> int:
        """The number of models of all groups."""
        return self.size * (1 if self._averaging_group is None else self._averaging_group.count)

    @property
    def first(self) -> int:
        """The number of this group's model 0 among the models of all groups."""
        return 0 if self._averaging_group is None else self.size * self._averaging_group.group_number

    @property
    def mine(self) -> list[str]:
        """The names of trained parameters on this process, in the same order on processes with the same stages."""
        return [name for name in self.reference if name in self.own.parameters]

    @property
    def other_tensors(self) -> list[Tensor]:
        """The parameters and buffers of models 1..N-1, and those of the reference."""
        tensors = [*self.reference.values(), *({} if self.shared is None else self.shared.buffers).values()]
        for model in self.each[1:]:
            tensors += [*model.parameters.values(), *model.buffers.values()]
        return tensors

    def tensors(self, names: Collection[str] | None = None) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return the tensors of each model, and those of the reference, for some or all trained parameters here."""
        names = self.mine if names is None else names
        models = [[model.parameters[name].detach() for name in names] for model in self.each]
        return models, [self.reference[name] for name in names]

    def parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Return the trained parameters of model n on this process, in the same order for the same stages."""
        return {name: self.each[number].parameters[name] for name in self.mine}

    def buffers(self, number: int, names: Collection[str]) -> dict[str, Tensor]:
        """Return the buffers of model n with these names, and, as ``written i``, other tensors that steps write.

        Pipeline 0's model must be in the module, and the reference not shown.
        """
        self.read_back()
        model = self.each[number]
        found = {name: buffer for name, buffer in model.buffers.items() if name in names}
        memory = [tensor.detach() for tensor in self._written] if number == 0 else model.memory
        return found | {f"written {i}": tensor for i, tensor in enumerate(memory)}

    def foreign_tensors(self, number: int, buffers: Collection[str]) -> dict[str, list[Tensor]]:
        """Return the tensors of the other models by name, while a parallel model is in the module.

        Args:
            number: number n of that model.
            buffers: names of buffers to include.
        """
        self.read_back()
        others = [model for model in self.each if model.number != number]
        found: dict[str, list[Tensor]] = {n: [other.parameters[n] for other in others] for n in self.own.parameters}
        found |= {n: [other.buffers[n] for other in others] for n in buffers if n in self.own.buffers}
        return found

    def _mean_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the reference: means where a mean exists, else those of pipeline 0.

        With several groups these are the buffers of the last averaging.
        """
        if self.shared is not None:
            return {name: _alike(buffer, buffer.clone()) for name, buffer in self.shared.buffers.items()}
        self.read_back()
        found = dict(self.own.buffers)
        for name, first in found.items():
            others = [model.buffers[name] for model in self.each[1:]]
            if _has_mean(first) and all(b.shape == first.shape for b in others):
                (centre,) = wide([first.detach()])
                total = sum((_deviation(b, centre) for b in others), torch.zeros_like(centre))
                found[name] = _alike(first, (centre + total / self.size).to(first.dtype))
        return found

    # -- which models there are, and of which tensors ------------------------------------------------------------------

    def train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each model its own copy of newly trained parameters. The module's own tensors must be in place."""
        for name in parameters:
            self.own.buffers.pop(name, None)
            self._buffer_slots.pop(name, None)
        here = [name for name, parameter in parameters.items() if not parameter.is_meta]
        self._add(here)
        for name, parameter in parameters.items():
            data = parameter.detach()
            there = name in self.own.parameters
            self.reference[name] = data.clone() if there else torch.empty_like(data, device="meta")
        for model in self.each[1:]:
            for name in here:
                model.parameters[name] = self._leaf(name)
                model.buffers.pop(name, None)

    def _add(self, names: Collection[str]) -> None:
        """Register parameters of which each model has its own. The module's own tensors must be in place."""
        parameters = dict(self._module.named_parameters())
        slots = slots_for(self._module, [parameters[name] for name in names])
        for name in names:
            self._parameter_slots[name] = slots[id(parameters[name])]
            self.own.parameters[name] = parameters[name]

    def _leaf(self, name: str) -> nn.Parameter:
        """Return a new leaf for a model, with the contents of the reference and the hooks of the module's parameter."""
        own = self.own.parameters[name]
        contents = self.reference[name].detach().clone(memory_format=torch.preserve_format)
        leaf = nn.Parameter(contents, own.requires_grad)
        share_gradient_hooks(own, leaf)  # a hook acts on the gradient of every model
        return leaf

    def resize(self, size: int) -> None:
        """Drop models, or add models that start from the reference, so that there are ``size`` of them.

        The reference must not be shown.
        """
        del self.each[size:]
        buffers = self._mean_buffers() if self.size < size else {}
        while self.size < size:
            model = ParallelModel(self.size)
            model.buffers = {name: _alike(buffer, buffer.clone()) for name, buffer in buffers.items()}
            model.memory = [tensor.detach().clone() for tensor in self._written]
            model.parameters = {name: self._leaf(name) for name in self.mine}
            self.each.append(model)

    # -- which of them the module shows --------------------------------------------------------------------------------

    def put(self, model: ParallelModel) -> None:
        """Put a model's tensors into the module, unless they are there."""
        if model is self.placed:
            return
        placed = self.placed
        for name, slots in self._buffer_slots.items():
            placed.buffers[name] = slots[0].get()  # user code may have assigned another tensor
            for slot in slots:
                slot.set(model.buffers[name])
        for name, slots in self._parameter_slots.items():
            for slot in slots:
                slot.set(model.parameters[name])
        for i, tensor in enumerate(self._written if model.memory is not placed.memory else ()):
            # exchange the memory and not the contents: tensors saved for a backward must not change
            placed.memory[i] = tensor.detach()
            tensor.data = model.memory[i]
        self.placed = model

    def read_back(self) -> None:
        """Take over buffers that user code has replaced by other tensors in the module."""
        for name, slots in self._buffer_slots.items():
            self.placed.buffers[name] = slots[0].get()

    def show(self, reference: bool) -> None:
        """Put the reference into the module in place of model 0, or model 0 back."""
        own, self.shown = self.own, None
        if reference:
            self.shown = ParallelModel(0)
            self.shown.parameters, self.shown.memory = own.parameters, own.memory
            self.shown.buffers = self._mean_buffers()
        self.put(self.shown or own)
        for name, parameter in own.parameters.items():
            centre = self.reference[name]
            parameter.data, centre.data = centre.data, parameter.data


class ModelTensors:
    """The tensors of models 1..N-1, the reference, and its buffers over groups, for moves between processes.

    Args:
        models: parallel models; the module shows model 0.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._others, self._reference = models.each[1:], models.reference
        self._shared = {} if models.shared is None else models.shared.buffers

    def held(self, name: str) -> dict[str, Any]:
        """Return the tensors of a name; those of the models with their gradients."""
        self._models.read_back()
        found = [model.parameters.get(name, model.buffers.get(name)) for model in self._others]
        return {
            "models": [None if t is None else (t.detach(), t.grad) for t in found],
            "reference": self._reference.get(name),
            "late": [part.get(name) for part in self._late()],
            "shared": self._shared.get(name),
        }

    @torch.no_grad()
    def put(self, name: str, item: Mapping[str, Any]) -> None:
        """Store the tensors of a name from another process. The module's own tensor must be here already."""
        self._models.read_back()
        for part, tensor in zip(self._late(), item["late"], strict=True):
            part.update({} if tensor is None else {name: tensor})
        if name in self._reference:
            fill(self._reference[name], item["reference"])
            self._models._add([name])
        for model, held in zip(self._others, item["models"], strict=True):
            if name in self._reference:
                model.parameters[name] = self._models._leaf(name)
                model.parameters[name].data, model.parameters[name].grad = held
            elif name in model.buffers:
                model.buffers[name] = _alike(model.buffers[name], held[0])
        if name in self._shared:
            self._shared[name] = _alike(self._shared[name], item["shared"])

    def drop(self, names: Collection[str]) -> None:
        """Give up the parameters of these names."""
        for name in names:
            for part in self._late():
                part.pop(name, None)
            if name in self._reference:
                vacate(self._reference[name])
                self._models._parameter_slots.pop(name, None)
                self._models.own.parameters.pop(name, None)
            for model in self._others:
                model.parameters.pop(name, None)
                if isinstance(model.buffers.get(name), nn.Parameter):
                    vacate(model.buffers[name])

    def _late(self) -> list[dict[str, Tensor]]:
        return [self._models.sums, *(model.sent for model in self._models.each)]


class SharedBuffers:
    """The buffers of the reference at the last averaging, if the parallel models are in several groups.

    One group averages its buffers when the reference is shown. A single process may show it, so several groups average
    buffers when they average parameters, in which all of them take part.

    Args:
        buffers: buffers of the module, equal in all groups at the beginning.
        averaging_group: processes of all groups that hold the same stages.

    Attributes:
        buffers: buffers by name: the mean of floating-point and complex buffers, and of others those of group 0's
            pipeline 0; sparse ones are those of this group.
    """

    def __init__(self, buffers: Mapping[str, Tensor], averaging_group: TensorCollectives) -> None:
        self.buffers = {name: _alike(buffer, buffer.detach().clone()) for name, buffer in buffers.items()}
        self._averaging_group = averaging_group

    @torch.no_grad()
    def begin(self, models: Sequence[Mapping[str, Tensor]]) -> Callable[[], None]:
        """Start to average the buffers over the models of all groups. All processes of the averaging group call it.

        Args:
            models: buffers of each model of this group.

        Returns:
            A function that waits for the mean and stores it.

        Raises:
            ConfigurationError: a buffer has changed its shape, which may differ between groups.
        """
        sparse = [name for name, centre in self.buffers.items() if not is_strided(centre)]
        self.buffers |= {name: models[0][name].detach().clone() for name in sparse if not models[0][name].is_meta}
        here = {n: centre for n, centre in self.buffers.items() if n not in sparse and not centre.is_meta}
        sums = {name: self._sum(name, centre, models) for name, centre in here.items()}
        arrive = self._averaging_group.begin_sum([sums[name] for name, centre in here.items() if _has_mean(centre)])
        choose = self._averaging_group.begin_choice([s for name, s in sums.items() if not _has_mean(here[name])])

        @torch.no_grad()
        def end() -> None:
            arrive()
            choose()
            count = len(models) * self._averaging_group.present
            for name, centre in here.items():
                change = sums[name]
                if _has_mean(centre):
                    change = torch.where(change == 0, centre, centre + change / count)
                self.buffers[name] = _alike(centre, change.to(centre.dtype))

        return end

    def _sum(self, name: str, centre: Tensor, models: Sequence[Mapping[str, Tensor]]) -> Tensor:
        for model in models:
            if model[name].shape != centre.shape:
                raise ConfigurationError(
                    f"buffer '{name}' had the shape {tuple(centre.shape)} and has {tuple(model[name].shape)} now, but "
                    "groups of processes average buffers, which needs equal shapes; use one group (num_stages as many "
                    "as devices), or a buffer of a fixed shape"
                )
        if not _has_mean(centre):
            return models[0][name].to(torch.int64, copy=True)
        return sum((_deviation(model[name], centre) for model in models), torch.zeros_like(*wide([centre])))


def _deviation(tensor: Tensor, centre: Tensor) -> Tensor:
    """Return tensor - centre in at least single precision; 0 where they are equal, even where both are infinite."""
    tensor, centre = wide((tensor.detach(), centre.detach()))
    return torch.where(tensor == centre, torch.zeros_like(centre), tensor - centre)


def _has_mean(buffer: Tensor) -> bool:
    """Return whether models average a buffer."""
    return is_strided(buffer) and (buffer.is_floating_point() or buffer.is_complex())


def _alike(tensor: Tensor, contents: Tensor) -> Tensor:
    """Return contents as a frozen parameter if the tensor is a parameter, and else as they are, for a buffer."""
    return nn.Parameter(contents.detach(), requires_grad=False) if isinstance(tensor, nn.Parameter) else contents

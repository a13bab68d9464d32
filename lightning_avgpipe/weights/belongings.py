"""Belongings: what a process holds under the name of a parameter or buffer, and what moves with that name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.weights.ownership import fill, give_up
from lightning_avgpipe.weights.relocation import Relocation


class Belongings(Protocol):
    """One kind of data that processes hold by the name of a parameter or buffer."""

    def held(self, name: str) -> Any:
        """Return what this process holds under a name: any tree of tensors and picklable leaves."""

    def put(self, name: str, item: Any) -> None:
        """Store what another process held under a name."""

    def drop(self, names: Collection[str]) -> None:
        """Give up what this process holds under names that only other processes keep."""


def relocate(relocation: Relocation, processes: Collectives, kinds: Sequence[Belongings], device: torch.device) -> None:
    """Carry out a relocation: send and receive, give up what leaves, and store what has come. All processes call it.

    Args:
        relocation: relocation of names.
        processes: processes whose ranks the owners are.
        kinds: all data that moves with a name, in the order in which it is stored; the same on all processes.
        device: device of received tensors that were on a device at the sender.
    """
    arrived = relocation.carry_out(processes, lambda name: [kind.held(name) for kind in kinds])
    leaving = relocation.leaving(processes.rank)
    for kind in reversed(kinds) if leaving else ():
        kind.drop(leaving)
    for name in list(arrived):
        for kind, item in zip(kinds, arrived.pop(name).on(device), strict=True):
            kind.put(name, item)


class ModuleTensors:
    """The parameters and buffers of a module, with gradients.

    Args:
        module: module, or a copy of it that is divided in the same way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())

    def held(self, name: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Contents, gradient, and the scales of weights in 4 bits; a sparse gradient, soon cleared, stays behind."""
        tensor = self._parameters[name] if name in self._parameters else self._module.get_buffer(name)
        gradient = None if tensor.grad is None or tensor.grad.is_sparse else tensor.grad
        scales = getattr(tensor, "quant_state", None)
        return tensor.data, gradient, None if scales is None else scales.as_dict(packed=True)

    @torch.no_grad()
    def put(self, name: str, item: tuple[Tensor, Tensor | None, dict[str, Tensor] | None]) -> None:
        """Fill a parameter that has no contents, or overwrite a buffer."""
        contents, gradient, scales = item
        if name in self._parameters:
            fill(self._parameters[name], contents)
            self._parameters[name].grad = gradient
            if scales is not None:
                from bitsandbytes.functional import QuantState

                quantized: Any = self._parameters[name]
                quantized.quant_state = QuantState.from_dict(scales, contents.device)
            return
        buffer = self._module.get_buffer(name)
        if buffer.shape == contents.shape and buffer.dtype == contents.dtype:
            buffer.copy_(contents)
        else:  # the sender's buffer has another shape or type
            path, _, leaf = name.rpartition(".")
            self._module.get_submodule(path)._buffers[leaf] = contents

    def drop(self, names: Collection[str]) -> None:
        """Move parameters to meta. Buffers stay: they are small, and stale ones do no harm."""
        give_up(self._module, [name for name in names if name in self._parameters])


class OptimizerStates:
    """The optimizer states of parameters.

    Args:
        optimizers: optimizers over all parameters, on every process.
        parameters: returns the current parameters by name; states of others do not move.
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = parameters

    def held(self, name: str) -> list[dict[str, Any] | None]:
        """Return the state of a parameter in each optimizer; None where there is none."""
        parameter = self._parameters().get(name)
        return [
            dict(optimizer.state[parameter]) if parameter is not None and parameter in optimizer.state else None
            for optimizer in self._optimizers
        ]

    def put(self, name: str, item: Sequence[dict[str, Any] | None]) -> None:
        """Store the states that another process had."""
        parameter = self._parameters().get(name)
        for optimizer, state in zip(self._optimizers, item, strict=True):
            if state is not None and parameter is not None:
                optimizer.state[parameter] = state

    def drop(self, names: Collection[str]) -> None:
        """Delete the states of parameters that leave."""
        parameters = self._parameters()
        for optimizer in self._optimizers:
            for name in names:
                if name in parameters:
                    optimizer.state.pop(parameters[name], None)

"""Belongings: what a process holds under the name of a parameter or buffer, and what moves with it."""

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
    """One kind of what is held by name."""

    def held(self, name: str) -> Any:
        """What is here under a name: any tree of tensors and picklable leaves."""

    def put(self, name: str, item: Any) -> None:
        """Take over what another process held, and has given up or keeps as well."""

    def drop(self, names: Collection[str]) -> None:
        """Give up what only other processes hold from now on."""


def relocate(relocation: Relocation, processes: Collectives, kinds: Sequence[Belongings], device: torch.device) -> None:
    """Carry out a relocation: send and receive, give up what leaves, and put what has come. All processes call it.

    Args:
        relocation: of names.
        processes: whose ranks the owners are.
        kinds: all that moves with a name, in the order in which it is put; the same on all processes.
        device: where it lives here.
    """
    arrived = relocation.carry_out(processes, lambda name: [kind.held(name) for kind in kinds])
    leaving = relocation.leaving(processes.rank)
    for kind in reversed(kinds) if leaving else ():
        kind.drop(leaving)
    for name in list(arrived):
        for kind, item in zip(kinds, arrived.pop(name).on(device), strict=True):
            kind.put(name, item)


class ModuleTensors:
    """Parameters and buffers, with gradients.

    Args:
        module: that has them, or a copy of it that is divided as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())

    def held(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Contents and gradient; a sparse gradient stays behind, since it is nothing once it is cleared."""
        tensor = self._parameters[name] if name in self._parameters else self._module.get_buffer(name)
        gradient = None if tensor.grad is None or tensor.grad.is_sparse else tensor.grad
        return tensor.detach(), gradient

    @torch.no_grad()
    def put(self, name: str, item: tuple[Tensor, Tensor | None]) -> None:
        """Fill a parameter that has no contents, or overwrite a buffer."""
        contents, gradient = item
        if name in self._parameters:
            fill(self._parameters[name], contents)
            self._parameters[name].grad = gradient
            return
        buffer = self._module.get_buffer(name)
        if buffer.shape == contents.shape and buffer.dtype == contents.dtype:
            buffer.copy_(contents)
        else:  # where it has changed its shape
            path, _, leaf = name.rpartition(".")
            self._module.get_submodule(path)._buffers[leaf] = contents

    def drop(self, names: Collection[str]) -> None:
        """Parameters go to meta. Buffers stay: they are small, and what nobody reads does no harm."""
        give_up(self._module, [name for name in names if name in self._parameters])


class OptimizerStates:
    """States of parameters.

    Args:
        optimizers: over all parameters, on every process.
        parameters: name -> parameter, as of when it is called; states of others do not move.
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = parameters

    def held(self, name: str) -> list[dict[str, Any] | None]:
        """For each optimizer what it keeps; None if it keeps nothing."""
        parameter = self._parameters().get(name)
        return [
            dict(optimizer.state[parameter]) if parameter is not None and parameter in optimizer.state else None
            for optimizer in self._optimizers
        ]

    def put(self, name: str, item: Sequence[dict[str, Any] | None]) -> None:
        """Take over what others kept."""
        parameter = self._parameters().get(name)
        for optimizer, state in zip(self._optimizers, item, strict=True):
            if state is not None and parameter is not None:
                optimizer.state[parameter] = state

    def drop(self, names: Collection[str]) -> None:
        """Forget the states of parameters that leave."""
        parameters = self._parameters()
        for optimizer in self._optimizers:
            for name in names:
                if name in parameters:
                    optimizer.state.pop(parameters[name], None)

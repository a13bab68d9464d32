"""Named state: parameters and buffers while a step is followed, and what has changed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.changes import Changes
from lightning_avgpipe.capture.visit import visiting
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import address, untraced

# Full name, tensor, and what is needed to see whether it changes.
Before = list[tuple[str, Tensor, Tensor]]


def trained_parameters(module: nn.Module) -> frozenset[str]:
    """Full names of the parameters that require a gradient; of one with several names all of them."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)


class NamedState:
    """The parameters and buffers of a module.

    Args:
        module: whose state.
        owned: ``id -> full name`` of tensors whose use is a node.
        batch: tensors that the step takes, which it may change.
        device: on which the step computes; None: where its parameters are.

    Attributes:
        buffers: by full name, as they were in the beginning.
        changes: notes what operations write into, while it is entered.
        rewritten: names of what was written into, or got other memory.
    """

    def __init__(
        self, module: nn.Module, owned: Mapping[int, str], batch: Sequence[Tensor], device: torch.device | None
    ) -> None:
        self.buffers = dict(module.named_buffers())
        self.changes = Changes(module, batch)
        self.rewritten: set[str] = set()
        self._module = module
        self._device = device
        self._parameters = {name for name, _ in module.named_parameters()}
        self._owned = owned
        self._names = {id(b): name for name, b in self.buffers.items()}

    def name_of(self, tensor: Tensor) -> str | None:
        """Full name of a parameter or a buffer; None for any other tensor."""
        name = self._owned.get(id(tensor))
        return self._names.get(id(tensor)) if name is None else name

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether it was one in the beginning."""
        return id(tensor) in self._names

    def buffer(self, name: str) -> Tensor | None:
        """The buffer of this name, as it is now."""
        path, _, leaf = name.rpartition(".")
        return self._module.get_submodule(path)._buffers.get(leaf)

    def of(self, path: str) -> Before:
        """The state of a submodule, as far as it is its own."""
        module = self._module.get_submodule(path)
        with untraced():  # nothing is lent for it
            state = [(self._owned[id(p)], p, p.detach()) for p in module.parameters() if id(p) in self._owned]
        return state + [(f"{path}.{name}", b, b.detach().clone()) for name, b in module.named_buffers()]

    def visiting(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Within this context these tensors are on the device, which is no change."""
        return self.changes.visiting(visiting(tensors, self._device), [(self.name_of(t) or "", t) for t in tensors])

    def foreign(self, module: nn.Module) -> list[Tensor]:
        """What a submodule has in the place of parameters."""
        return [p for p in module.parameters() if id(p) not in self._owned]

    def of_tensors(self, tensors: Mapping[str, Tensor]) -> Before:
        """The state of these tensors, by full name."""
        return [(n, t, t.detach() if n in self._parameters else t.detach().clone()) for n, t in tensors.items()]

    def changed(self, state: Before) -> list[str]:
        """Names of what has changed since: written into, or in another way."""
        moved = {name for name, p, before in state if name in self._parameters and address(p) != address(before)}
        self.changes.keep((name, before) for name, _, before in state if name in moved)
        self.rewritten |= self.changes.written | moved
        # Compared by value: batch normalisation changes its statistics and does not say so. Some are made by the step.
        buffers = ((name, b, self.buffer(name), before) for name, b, before in state if name not in self._parameters)
        other = {name for name, b, now, before in buffers if now is not b or not same_contents(b, before)}
        found = self.changes.written | moved | other
        order = dict.fromkeys(name for name, _, _ in state)
        return [*(name for name in order if name in found), *sorted(found - order.keys())]

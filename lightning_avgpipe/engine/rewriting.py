"""Rewriting: tensors that forwards write into while backwards of earlier micro-batches still need what was there.

One process finishes each backward before the next forward. In a pipeline several forwards come first::

    one process     F0: w changes   B0 uses w        F1: w changes   B1 uses w
    a stage         F0: w changes   F1: w changes    B0 uses w as of F0: a copy

So what autograd saves of such a tensor is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.saved_hooks import SavedHooks
from lightning_avgpipe.utils.torch_compat import address


def places(module: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Where a module registers these parameters and buffers: what is there may change."""
    found = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        found.append((owner._parameters if leaf in owner._parameters else owner._buffers, leaf))  # type: ignore[arg-type]
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Rewritten:
    """The tensors that a stage writes into.

    Attributes:
        places: of them, in the registers of modules.
    """

    places: Sequence[tuple[dict[str, Any], str]]

    @classmethod
    def of(cls, program: StageProgram, module: nn.Module) -> Rewritten:
        """Those of a stage."""
        names = dict.fromkeys(name for node in program.nodes for name in node.states if name in program.graph.rewritten)
        return cls(places(module, list(names)))

    def parameters(self) -> list[nn.Parameter]:
        """Those of them that are parameters."""
        held = (register[name] for register, name in self.places)
        return [tensor for tensor in held if isinstance(tensor, nn.Parameter)]

    def saved(self, trains: bool) -> AbstractContextManager[Any]:
        """Within this context autograd saves copies of them."""
        if not self.places or not trains:
            return nullcontext()
        return SavedHooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        # looked up each time, since a step may give a parameter other memory
        mine = {address(register[name]) for register, name in self.places if register[name] is not None}
        if address(tensor) not in mine:
            return tensor
        with torch.no_grad():
            return tensor.detach().clone()

"""Copy tensors that forwards change in place, since backwards of earlier micro-batches need the old contents.

One process finishes each backward before the next forward. In a pipeline several forwards come first::

    one process     F0: w changes   B0 uses w        F1: w changes   B1 uses w
    a stage         F0: w changes   F1: w changes    B0 uses w as of F0: a copy

So autograd saves copies of such tensors. A tensor that did not change when the step was captured is not copied; a
backward that finds it changed raises an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.torch_compat import SavedHooks, address, version_of

_MODIFIED = re.compile(r"modified by an inplace operation.*?Tensor \[([\d, ]*)\]\].*? is at version (\d+)", re.DOTALL)


def places(module: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Return the register and name of each of these parameters and buffers; the tensor there may be replaced."""
    found = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        found.append((owner._parameters if leaf in owner._parameters else owner._buffers, leaf))  # type: ignore[arg-type]
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Rewritten:
    """The parameters and buffers that a stage changes in place.

    Attributes:
        places: register and name of each of them.
    """

    places: Sequence[tuple[dict[str, Any], str]]

    @classmethod
    def of(cls, program: StageProgram, module: nn.Module) -> Rewritten:
        """Return the tensors that a stage changes in place."""
        names = dict.fromkeys(name for node in program.nodes for name in node.states if name in program.graph.rewritten)
        return cls(places(module, list(names)))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters among them."""
        held = (register[name] for register, name in self.places)
        return [tensor for tensor in held if isinstance(tensor, nn.Parameter)]

    def saved(self, trains: bool) -> AbstractContextManager[Any]:
        """Let autograd save copies of these tensors within this context."""
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


@contextmanager
def explained(program: StageProgram, module: nn.Module) -> Iterator[None]:
    """Run a backward of a stage within this context, and explain its error about a buffer that was changed in place.

    Raises:
        StepChangedError: the backward needs contents of a buffer that a later micro-batch has overwritten.
    """
    try:
        yield
    except RuntimeError as error:
        names = _named(error, program, module)
        if not names:
            raise
        raise StepChangedError(
            f"{program.graph.step} changes the buffer '{names[0]}' in place, which it did not do when it was captured, "
            f"and a backward needs what was there in an earlier micro-batch (stage {program.stage}). Compute with a "
            "clone() of the buffer, or write into it with every micro-batch (by nothing, if need be), so that copies "
            f"are kept. ({str(error).partition(' Hint')[0]})"
        ) from None  # the original error says no more


def _named(error: RuntimeError, program: StageProgram, module: nn.Module) -> list[str]:
    """Return the buffers that an error of autograd may mean, which describes the changed tensor without its name."""
    found = _MODIFIED.search(str(error))
    if found is None:
        return []
    buffers = module.named_buffers()
    alike = [name for name, b in buffers if f"{version_of(b)} {list(b.shape)}" == f"{found[2]} [{found[1]}]"]
    return [name for name in alike if name not in program.graph.rewritten]

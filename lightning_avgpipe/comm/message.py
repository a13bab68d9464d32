"""What crosses a boundary, or goes to another process for another reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.tensors import INSTEAD_OF_NESTED, Sparseness, strided_parts


@dataclass(frozen=True)
class Message:
    """Values of one micro-batch on their way to the next stage, or their gradients on the way back.

    Attributes:
        micro_batch: i; channels are FIFO, so this only checks the order.
        tensors: values in the order of the program, or one gradient for each value that asked for one; a gradient
            is None if the value did not matter.
        requires_grad: for values, which of them ask for a gradient.
        entries: for values, what the nodes before the cut returned: fewer if the step has ended before. For gradients
            whether the step has skipped the micro-batch: there is no loss.
        abandoned: whether the sender has given up the iteration, and has nothing to send.
        forward_only: for values, how many stages, from the first, run forwards only, as the sender knows.
        segments: in how many pieces, at least, large tensors travel, so that whoever passes them on need not wait.
    """

    micro_batch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    entries: Any = ()
    abandoned: bool = False
    forward_only: int = 0
    segments: int = 1

    def copied(self) -> Message:
        """The same in memory of its own."""
        return replace(self, tensors=tuple(None if tensor is None else tensor.clone() for tensor in self.tensors))


class _Strided:
    """Marks the place of a strided tensor among the other leaves; that of a sparse one has its sparseness."""


def pack(item: Any) -> Message:
    """A message with any tree of tensors and picklable leaves.

    Raises:
        AvgPipeError: a tensor is nested.
    """
    leaves, spec = tree.flatten(item)
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                raise AvgPipeError(f"a nested tensor cannot go to another process; {INSTEAD_OF_NESTED}")
            tensors += strided_parts(leaf.detach())
            rest.append(Sparseness.of(leaf) or _Strided)
        else:
            rest.append(leaf)
    return Message(0, tuple(tensors), (), [rest, spec])


def unpack(message: Message) -> Any:
    """The tree that was packed."""
    rest, spec = message.entries
    tensors: Iterator[Any] = iter(message.tensors)
    leaves: list[Any] = []
    for leaf in rest:
        if leaf is _Strided:
            leaves.append(next(tensors))
        elif isinstance(leaf, Sparseness):
            leaves.append(leaf.tensor(list(islice(tensors, leaf.num_parts))))
        else:
            leaves.append(leaf)
    return tree.unflatten(leaves, spec)

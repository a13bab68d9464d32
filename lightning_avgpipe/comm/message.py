"""Messages: what crosses a boundary between stages, or goes to another process for another reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.tensors import INSTEAD_OF_NESTED, Sparseness, strided_parts


@dataclass(frozen=True)
class Message:
    """Values of one micro-batch on their way to the next stage, or their gradients on the way back.

    Attributes:
        micro_batch: i; channels are FIFO, so this only checks the order.
        tensors: values in the order of the program, or one gradient for each value that requires one; None for a value
            on which the loss does not depend.
        requires_grad: for values, which of them require a gradient.
        entries: for values, what the nodes before the cut returned: fewer if the step has ended before. For gradients
            whether the step has skipped the micro-batch: there is no loss.
        abandoned: whether the sender has given up the iteration, and has nothing to send.
        forward_only: for values, how many stages, from the first, run forwards only, as the sender knows.
        attested: for values, what the step asked of the nodes before the cut.
        segments: in how many pieces, at least, large tensors travel, so that whoever passes them on need not wait.
        decoded: of a compressed message, the type that each tensor is decoded to, or None: it is as it was. Scales come
            after these tensors.
    """

    micro_batch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    entries: Any = ()
    abandoned: bool = False
    forward_only: int = 0
    attested: tuple[Any, ...] = ()
    segments: int = 1
    decoded: tuple[torch.dtype | None, ...] = ()

    def copied(self) -> Message:
        """Return a copy of the message with tensors in memory of their own."""
        return replace(self, tensors=tuple(None if tensor is None else tensor.clone() for tensor in self.tensors))


class _Strided:
    """A marker in the place of a strided tensor among the leaves; a sparse tensor leaves its sparseness there."""


def pack(item: Any) -> Message:
    """Return a message with any tree of tensors and picklable leaves.

    Raises:
        AvgPipeError: the tree has a nested tensor.
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
    """Return the tree that :func:`pack` put into a message."""
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

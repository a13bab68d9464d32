"""What crosses a boundary, or goes to another process for another reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_avgpipe.utils import tree


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


class _Tensor:
    """Marks the place of a tensor among the other leaves."""


def pack(item: Any) -> Message:
    """A message with any tree of tensors and picklable leaves."""
    leaves, spec = tree.flatten(item)
    tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
    rest = [_Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Message(0, tensors, (), [rest, spec])


def unpack(message: Message) -> Any:
    """The tree that was packed."""
    rest, spec = message.entries
    tensors = iter(message.tensors)
    return tree.unflatten([next(tensors) if leaf is _Tensor else leaf for leaf in rest], spec)

"""What crosses a boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Message"]


@dataclass(frozen=True)
class Message:
    """Values of one micro-batch on their way to the next stage, or their gradients on the way back.

    Attributes:
        micro_batch: i; channels are FIFO, so this only checks the order.
        tensors: values in the order of the program, or one gradient for each value that asked for one; a gradient
            is None if the value did not matter.
        requires_grad: for values, which of them ask for a gradient.
        entries: for values, what the nodes before the cut returned.
    """

    micro_batch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    entries: Any = ()

"""Operations of units, counted."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_avgpipe.utils import tree


class Flops(FlopCounterMode):
    """Counts the operations of a unit as a whole.

    Torch's own per-module counts need gradient hooks, which fail where a parameter is the argument of a module and
    gradients are off, as in a parametrization under ``torch.inference_mode``.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]


class _NoModules(contextlib.nullcontext[None]):
    parents = frozenset({"Global"})

    def __exit__(self, *exc_info: object) -> None:
        """Torch passes no arguments."""


def recurrent_flops(unit: nn.Module, result: Any) -> float:
    """Fused recurrent kernels are not counted by torch: two operations per weight and time step."""
    weights = sum(p.numel() for m in unit.modules() if isinstance(m, nn.RNNBase) for p in m.parameters())
    outputs = tree.tensors(result)
    rows = outputs[0].numel() // max(outputs[0].shape[-1], 1) if weights and outputs and outputs[0].ndim else 0
    return 2.0 * weights * rows

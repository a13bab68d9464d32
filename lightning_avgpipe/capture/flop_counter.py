"""Count the floating-point operations of units."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lightning_avgpipe.utils import tree

_ATEN = torch.ops.aten
_ATTENTION_ON_CPU = _ATEN._scaled_dot_product_flash_attention_for_cpu
# Operations without matrix products. Torch would decompose them to look for some.
_WITHOUT_PRODUCTS = (
    _ATEN.native_batch_norm, _ATEN.cudnn_batch_norm, _ATEN._batch_norm_with_update, _ATEN.native_layer_norm,
    _ATEN.native_group_norm,
)  # fmt: skip


class Flops(FlopCounterMode):
    """A counter for the operations of a unit as a whole.

    Torch's own per-module counts need gradient hooks, which fail where a parameter is the argument of a module and
    gradients are off, as in a parametrization under ``torch.inference_mode``.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_others())
        self.mod_tracker = _NoModules()  # type: ignore[assignment]

    @property
    def total(self) -> float:
        """The number of operations so far."""
        return float(self.get_total_flops())


class _NoModules(contextlib.nullcontext[None]):
    """A tracker of modules that tracks none."""

    parents = frozenset({"Global"})

    def __exit__(self, *exc_info: object) -> None:
        """Also accept a call without arguments, which is how torch calls this method."""


def _others() -> dict[Any, Callable[..., int]]:
    """Return counters that torch lacks: of attention on a CPU, and of bitsandbytes' 4-bit product if it is imported."""
    product = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)

    def count(left: Sequence[int], packed: Sequence[int], shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(left) * shape[0]

    names = [op for packet in _WITHOUT_PRODUCTS for op in (packet, *(getattr(packet, o) for o in packet.overloads()))]
    counters: dict[Any, Callable[..., int]] = dict.fromkeys(names, lambda *_, **__: 0)
    counters[_ATTENTION_ON_CPU] = lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    return counters if product is None else {**counters, product: count}


def recurrent_flops(unit: nn.Module, result: Any) -> float:
    """Return two operations per weight and time step for fused recurrent kernels, which torch does not count."""
    weights = sum(p.numel() for m in unit.modules() if isinstance(m, nn.RNNBase) for p in m.parameters())
    outputs = tree.tensors(result)
    rows = outputs[0].numel() // max(outputs[0].shape[-1], 1) if weights and outputs and outputs[0].ndim else 0
    return 2.0 * weights * rows

"""Cast the weight of a linear layer to autocast's dtype once per iteration instead of once per micro-batch.

::

    autocast     W -> bf16 W -> F0      W -> bf16 W -> F1      each stash keeps a copy of its own
    here         W -> bf16 W -> F0, F1

The cast is a node of autograd's graph that saves nothing. So one backward per micro-batch may run through it, and each
passes its gradient on to the weight as usual. Within a forward only the first use of a weight gets the kept cast. Two
uses of one cast would be summed in the lower precision, whereas autocast, whose cache Lightning turns off, casts at
each use, so that gradients are summed in the weight's precision. Thereby gradients are equal bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.utils.torch_compat import is_transforming, version_of


class _Cast(NamedTuple):
    """A cast weight, and the weight's memory and version at the time."""

    weight: Tensor
    memory: tuple[int, int]
    low: Tensor


class Casts:
    """The cast weights of one stage in an iteration."""

    def __init__(self) -> None:
        self._kept: dict[int, _Cast] = {}
        self._used: set[int] = set()  # weights that the running forward has used

    @contextlib.contextmanager
    def reused(self) -> Iterator[None]:
        """Run a forward that is followed by a backward within this context, with linear layers that reuse casts."""
        self._used.clear()
        as_written = nn.Linear.forward

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            kind = x.device.type
            casts = torch.is_autocast_enabled(kind) and not torch.is_autocast_cache_enabled()
            if not casts or not torch.is_grad_enabled() or is_transforming():
                return as_written(module, x)
            dtype = torch.get_autocast_dtype(kind)
            return F.linear(x, *(None if t is None else self._cast(t, dtype) for t in (module.weight, module.bias)))

        nn.Linear.forward = forward  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Linear.forward = as_written  # type: ignore[method-assign]

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        single = type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.requires_grad
        if not single or id(weight) in self._used:
            return weight  # autocast casts it
        self._used.add(id(weight))
        memory = (weight.data_ptr(), version_of(weight))
        kept = self._kept.get(id(weight))
        if kept is None or kept.memory != memory or kept.low.dtype is not dtype:
            kept = self._kept[id(weight)] = _Cast(weight, memory, weight.to(dtype))
        return kept.low

    def clear(self) -> None:
        """Forget all casts, since the weights will change."""
        self._kept.clear()

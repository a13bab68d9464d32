"""Reductions by their names, as ``self.log(reduce_fx=...)`` and ``torch.distributed`` accept them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OTHER_NAMES = {"avg": "mean", "amax": "max", "amin": "min", "prod": "product"}
_OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
_REDUCE = {
    "mean": lambda stacked: (stacked if stacked.is_floating_point() else stacked.to(torch.get_default_dtype())).mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "product": lambda stacked: stacked.prod(0),
}


def reduction_name(reduction: Any) -> str:
    """Return the name of a reduction: "mean", "sum", "min", "max", "product", or the own name of any other one.

    Args:
        reduction: a name in any case, a function such as ``torch.max`` or ``sum``, or a ``torch.distributed.ReduceOp``.
            None is a sum, as for torch.distributed.
    """
    if reduction is None:
        return "sum"
    known = (operation.lower() for operation in _OPERATIONS if reduction == getattr(dist.ReduceOp, operation))
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", None) or next(known, "")
    return _OTHER_NAMES.get(name.lower(), name.lower())


def reduced(stacked: Tensor, name: str) -> Tensor | None:
    """Reduce a tensor over its first dimension; None if there is no reduction of this name."""
    return _REDUCE[name](stacked) if name in _REDUCE else None

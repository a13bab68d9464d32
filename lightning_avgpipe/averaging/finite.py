"""Nonfinite gradients: whether a model has infinite or NaN gradients, and which ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def may_have_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a scalar tensor on the device: 0 if surely no tensor has an infinite or NaN element, 1 if one may have.

    It reads each tensor once, takes about as long as clipping, and does not wait for the device. Squares of very large
    numbers are infinite too, so a result of 1 must be confirmed by :func:`has_nonfinite`.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        dense = _dense(tensor)
        by_type.setdefault((dense.dtype, dense.device), []).append(dense)
    found = torch.zeros((), device=device)
    for alike in by_type.values():
        norms = torch.stack(torch._foreach_norm(alike, 2))  # a nonfinite element makes the norm nonfinite
        found = torch.maximum(found, (~torch.isfinite(norms)).any().to(device, found.dtype))
    return found


def has_nonfinite(tensors: Iterable[Tensor]) -> bool:
    """Return whether a tensor has an infinite or NaN element."""
    return not all(bool(torch.isfinite(_dense(tensor)).all()) for tensor in tensors)


def first_nonfinite(named: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has an infinite or NaN element; None if there is none."""
    return next((name for name, tensor in named.items() if has_nonfinite([tensor])), None)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor

"""Gradients that are no numbers: whether a model has some, and which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def may_have_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether one may be infinite or no number somewhere: 0 for surely not, in a tensor of no dimensions on a device.

    It reads each tensor once, takes about as long as clipping, and does not wait for the device. Squares of very large
    numbers are infinite too, so :func:`has_nonfinite` has the last word.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        dense = _dense(tensor)
        by_type.setdefault((dense.dtype, dense.device), []).append(dense)
    found = torch.zeros((), device=device)
    for alike in by_type.values():
        norms = torch.stack(torch._foreach_norm(alike, 2))  # of a tensor with something else: that
        found = torch.maximum(found, (~torch.isfinite(norms)).any().to(device, found.dtype))
    return found


def has_nonfinite(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is infinite or no number somewhere."""
    return not all(bool(torch.isfinite(_dense(tensor)).all()) for tensor in tensors)


def first_nonfinite(named: Mapping[str, Tensor]) -> str | None:
    """The name of the first that is infinite or no number somewhere."""
    return next((name for name, tensor in named.items() if has_nonfinite([tensor])), None)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor

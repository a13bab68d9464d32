"""Follow a step without its arithmetic: large results are zeros, which take neither time nor memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.tensors import is_strided
from lightning_avgpipe.utils.torch_compat import is_mutable

_LARGE_BYTES = 1024**2  # smaller results are computed, since they may decide what the step does


def zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return zeros of the shape, dtype and strides of a tensor.

    On a host they take no memory until they are written to, unlike those of ``torch.zeros``.
    """
    if not port_of(device).is_host or not tensor.numel():
        return torch.zeros_like(tensor, device=device, requires_grad=False)
    count = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.from_numpy(np.zeros(count * tensor.element_size(), np.uint8)).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride())


class LargeResultsAreZero(TorchDispatchMode):
    """A context in which operations with large results are not executed; their results are zeros.

    Views, in-place operations, and operations whose results have a length that depends on numbers, are still executed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree.tensors((args, kwargs))
        if not given or not _computes(func) or any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        on_meta = tree.map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        try:
            shown = func(*on_meta[0], **{**on_meta[1], **({"device": "meta"} if "device" in kwargs else {})})
        except (RuntimeError, NotImplementedError):  # what it returns depends on numbers
            return func(*args, **kwargs)
        results = tree.tensors(shown)
        if not all(map(is_strided, results)) or not any(result.nbytes >= _LARGE_BYTES for result in results):
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or given[0].device)
        return tree.map_tensors(lambda result: zeros_like(result, device), shown)


def _computes(func: Any) -> bool:
    """Return whether an operation makes new tensors."""
    schema = getattr(func, "_schema", None)
    if schema is None or is_mutable(func) or func is torch.ops.aten._unsafe_view.default:
        return False
    return all(result.alias_info is None for result in schema.returns)

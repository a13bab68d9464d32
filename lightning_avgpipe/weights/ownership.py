"""Parameters that a process does not own: given up, so that their memory is free, and taken back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["give_up", "take_back", "to_host"]


def give_up(module: nn.Module, names: Iterable[str]) -> None:
    """Move parameters to the meta device. They stay the same objects, so optimizers keep knowing them."""
    parameters = dict(module.named_parameters())
    chosen = [parameters[name] for name in names if not parameters[name].is_meta]
    if chosen:
        gc.collect()  # a graph that waits for the collector would hold on to the parameters
    for parameter in chosen:
        parameter.grad = None
        _replace(parameter, torch.empty_like(parameter, device="meta"))
    if chosen:
        _return_freed()


def take_back(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill parameters that were given up."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if parameters[name].is_meta:
            _replace(parameters[name], tensor)


def to_host(module: nn.Module) -> None:
    """Move what has contents to the host, and leave the rest."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.cpu()
            parameter.grad = None if parameter.grad is None else parameter.grad.cpu()
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.cpu()


def _replace(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Give a parameter other contents, on whatever device.

    ``torch.utils.swap_tensors`` does the same and more: it exchanges the Python attributes too, which must stay here,
    and therefore refuses parameters with weak references to them, which recurrent layers keep.
    """
    new = nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


def _return_freed() -> None:
    """Give what is free on the heap back to the system: glibc keeps pages below others that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # other C libraries have none
        trim(0)

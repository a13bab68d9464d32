"""Ownership: which processes hold a parameter or buffer; what a process does not own is given up, and taken back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Full name -> the ranks that hold it; the first answers for it.
Owners = Mapping[str, tuple[int, ...]]

# So many bytes may wait until Python collects garbage by itself: to look for it takes a quarter of a second where much
# has been imported, as long as many steps of a model that is so small.
FEW_BYTES = 16 * 1024**2


def owners_of(
    module: nn.Module, stages_of: Mapping[str, Sequence[int]], hosts: Callable[[int], Sequence[int]], world_size: int
) -> dict[str, tuple[int, ...]]:
    """Who is to hold each parameter, and to have the newest contents of each buffer.

    Args:
        stages_of: parameter or changed buffer -> its stages, of which the first answers for it. What is missing is used
            by no stage, or changed by none: all processes have it.
        hosts: stage -> the processes that host it.
        world_size: number of processes.
    """
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    everybody = tuple(range(world_size))
    ranks = {name: [rank for stage in stages_of.get(name, ()) for rank in hosts(stage)] for name in names}
    return {name: tuple(dict.fromkeys(ranks[name])) or everybody for name in names}


def answering(module: nn.Module, owners: Owners) -> dict[str, int]:
    """The rank that answers for each parameter and buffer, by every name it has."""
    canonical = {id(p): name for name, p in module.named_parameters()}
    canonical |= {id(b): name for name, b in module.named_buffers()}
    everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: owners[canonical[id(tensor)]][0] for name, tensor in everything}


def give_up(module: nn.Module, names: Iterable[str]) -> None:
    """Move parameters to the meta device. They stay the same objects, so optimizers keep knowing them."""
    parameters = dict(module.named_parameters())
    chosen = [parameters[name] for name in names if not parameters[name].is_meta]
    much = sum(parameter.nbytes for parameter in chosen) > FEW_BYTES
    if much:
        gc.collect()  # a graph that waits for the collector would hold on to the parameters
    for parameter in chosen:
        parameter.grad = None
        vacate(parameter)
    if much:
        _return_freed()


def take_back(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill parameters that were given up."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        fill(parameters[name], tensor)


def fill(parameter: Tensor, contents: Tensor) -> None:
    """Give a parameter, or any tensor that stays the same object, contents if it has none."""
    if parameter.is_meta:
        _replace(parameter, contents)


def vacate(tensor: Tensor) -> None:
    """Take the contents from a tensor that stays the same object."""
    _replace(tensor, torch.empty_like(tensor, device="meta"))


def to_host(module: nn.Module) -> None:
    """Move what has contents to the host, and leave the rest."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.cpu()
            parameter.grad = None if parameter.grad is None else parameter.grad.cpu()
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.cpu()


def _replace(parameter: Tensor, tensor: Tensor) -> None:
    """Give a parameter other contents, on whatever device.

    ``torch.utils.swap_tensors`` does the same and more: it exchanges the Python attributes too, which must stay here,
    and therefore refuses parameters with weak references to them, which recurrent layers keep.
    """
    new = tensor.detach().requires_grad_(parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


def _return_freed() -> None:
    """Give what is free on the heap back to the system: glibc keeps pages below others that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # other C libraries have none
        trim(0)

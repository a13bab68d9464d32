"""To run a step without leaving a trace: random state, buffers and attributes are put back."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["random_state", "untouched"]

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_CONTAINERS = (list, dict, set, deque)


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Put the generators of torch (all devices), NumPy and Python back as they were."""
    state = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Run a step of ``module`` in this context and nothing of it remains.

    Buffers, attributes of all submodules (counters, cached masks, lists of outputs, metric states) and random state
    are restored, in place where they are tensors or containers. Parameters are not: a step does not change them.
    """
    saved = [(m, _save(m)) for m in module.modules()]
    with random_state():
        try:
            yield
        finally:
            for m, state in saved:
                _restore(m, state)


def _save(module: nn.Module) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    attributes = {name: (held, _copy(held)) for name, held in vars(module).items() if name not in _REGISTRIES}
    buffers = {name: (held, _copy(held)) for name, held in module._buffers.items()}
    return attributes, buffers


def _restore(module: nn.Module, state: tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]) -> None:
    attributes, buffers = state
    for name in [name for name in vars(module) if name not in _REGISTRIES and name not in attributes]:
        del vars(module)[name]
    for name, (held, copy) in attributes.items():
        vars(module)[name] = _put_back(held, copy)
    for name, (held, copy) in buffers.items():
        module._buffers[name] = _put_back(held, copy)


def _copy(held: Any, inside: frozenset[int] = frozenset()) -> Any:
    """What to put back: a tensor's contents; a container's items, and what these hold in turn."""
    if isinstance(held, Tensor):
        return None if isinstance(held, nn.Parameter) else held.detach().clone()
    if not isinstance(held, _CONTAINERS) or id(held) in inside:
        return None
    inside |= {id(held)}
    below = [(item, _copy(item, inside)) for item in (held.values() if isinstance(held, dict) else held)]
    return held.copy(), [(item, copy) for item, copy in below if copy is not None]


def _put_back(held: Any, copy: Any) -> Any:
    if copy is None:
        return held
    if isinstance(held, Tensor):
        with torch.no_grad():
            if not held.is_meta and not torch.equal(held, copy):
                held.detach().copy_(copy)
        return held
    items, below = copy
    if not _same_items(held, items):
        held.clear()
        held.extend(items) if isinstance(held, (list, deque)) else held.update(items)
    for item, copy_of_item in below:
        _put_back(item, copy_of_item)
    return held


def _same_items(held: Any, copy: Any) -> bool:
    if len(held) != len(copy):
        return False
    if isinstance(held, dict):
        return all(a is b and held[a] is copy[b] for a, b in zip(held, copy, strict=True))
    return all(a is b for a, b in zip(held, copy, strict=True))

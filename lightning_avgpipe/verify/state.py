"""The state of a module besides parameters and buffers, by name: numbers, texts, tensors and arrays in attributes."""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from lightning_avgpipe.state.objects import BASE_MODULE_ATTRIBUTES, num_items
from lightning_avgpipe.utils.lightning import LIGHTNING, pl
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.placeholder import Absent

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, np.generic)
_LIBRARIES = ("torch", "torchmetrics", "builtins")
_TOOLS = (*LIGHTNING, "lightning_avgpipe", "logging", "threading", "_thread", "weakref")  # their objects hold no state
_NO_DATA = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, nn.Module, Dataset,
    DataLoader, Sampler,
)  # fmt: skip
_DEPTH = 6
_ENTERED = object()  # in place of a value: the entry itself is not compared, only the entries in it, if any
_Entry = tuple[str, Any, tuple[int, str] | None]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the values in attributes of all submodules, by name and not copied; ``...`` if they cannot be compared."""
    registered = frozenset(id(t) for t in (*module.parameters(), *module.buffers()))
    return {name: value for name, value, _ in _all(module, registered) if value is not _ENTERED}


def state_of(thing: object, name: str) -> dict[str, Any]:
    """Return the values in an object by name, in the form of :func:`attributes`."""
    return {full: value for full, value, _ in _entries(name, thing, frozenset(), _DEPTH) if value is not _ENTERED}


def aliases(module: nn.Module) -> list[list[str]]:
    """Return the names of each value that has several, since several modules hold its object (a configuration)."""
    places: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, _, place in _all(module, frozenset()):
        if place is not None:
            places[place].append(name)
    return [names for names in places.values() if len(names) > 1]


def _all(module: nn.Module, registered: frozenset[int]) -> Iterator[_Entry]:
    for path, m in module.named_modules():
        for name, value in _own(m):
            yield from _entries(joined(path, name), value, registered, _DEPTH)


def _own(module: nn.Module) -> Iterable[tuple[str, Any]]:
    if isinstance(module, Metric):  # the rest are caches
        return [(name, vars(module).get(name)) for name in (*module._defaults, "_update_count")]
    library = _OF_LIGHTNING if isinstance(module, pl.LightningModule) else BASE_MODULE_ATTRIBUTES
    return [(name, value) for name, value in vars(module).items() if name not in library or name == "training"]


def _entries(
    name: str, value: Any, passed: frozenset[int], depth: int, place: tuple[int, str] | None = None
) -> Iterator[_Entry]:
    """Yield the entry of this name, and the entries in it: full name, value, and (id of an object, place in it).

    Args:
        name: full name.
        value: value with this name.
        passed: ids of the enclosing objects, which are not entered again.
        depth: number of levels to go down.
        place: the object that holds the value, and the place in it; None: a module holds it.
    """
    if isinstance(value, Absent):
        yield name, ..., place
    elif isinstance(value, Tensor):
        yield name, _ENTERED if id(value) in passed else value.detach(), place
    elif isinstance(value, (*_LEAVES, np.ndarray)):
        yield name, value if _can_be_compared(value) else ..., place
    elif id(value) in passed or isinstance(value, _NO_DATA) or _library(value) in _TOOLS:
        yield name, _ENTERED, place
    elif (below := _below(value) if depth else None) is None:
        yield name, ..., place
    else:
        yield name, _ENTERED, place
        if (size := num_items(value)) is not None:
            yield f"len({name})", size, (id(value), "its length")
        for inner, entry in below:
            yield from _entries(name + inner, entry, passed | {id(value)}, depth - 1, (id(value), inner))


def _can_be_compared(value: Any) -> bool:
    """Return whether ``==`` gives a bool, for arrays an array of bools; arrays of objects may give anything."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "O"
    try:
        bool(value == value)
    except Exception:  # a subclass of a number may compare as its author likes, and raise any error
        return False
    return True


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _below(value: Any) -> Iterator[tuple[str, Any]] | None:
    if isinstance(value, dict):
        return ((f"[{key!r}]", entry) for key, entry in value.items() if isinstance(key, (*_LEAVES, tuple)))
    if isinstance(value, (list, tuple, deque)):
        return ((f"[{i}]", entry) for i, entry in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return ((f" has {entry!r}", True) for entry in value if isinstance(entry, _LEAVES))
    if hasattr(value, "__dict__") and _library(value) not in _LIBRARIES:
        return ((f".{key}", entry) for key, entry in vars(value).items())
    return None

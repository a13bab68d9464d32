"""The state of a module besides parameters and buffers, by name: numbers, texts, tensors and arrays in attributes."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from lightning_avgpipe.utils.lightning import LIGHTNING, pl
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.object_state import OF_EVERY_MODULE
from lightning_avgpipe.utils.placeholder import Absent

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, np.generic)
_LIBRARIES = ("torch", "torchmetrics", "builtins")
_TOOLS = (*LIGHTNING, "lightning_avgpipe", "logging", "threading", "_thread", "weakref")  # what they hold is no state
_NO_DATA = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, nn.Module, Dataset,
    DataLoader, Sampler,
)  # fmt: skip
_DEPTH = 6


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return name -> value of what may change, not copied; ``...`` for placeholders and what cannot be compared."""
    found: dict[str, Any] = {}
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    for path, m in module.named_modules():
        for name, value in _own(m):
            _enter(joined(path, name), value, found, registered, _DEPTH)
    return found


def state_of(thing: object, name: str) -> dict[str, Any]:
    """Return name -> value of what is in an object, as :func:`attributes` does."""
    found: dict[str, Any] = {}
    _enter(name, thing, found, set(), _DEPTH)
    return found


def aliases(module: nn.Module) -> list[list[str]]:
    """Return groups of names for one entry of one object that several modules hold, such as a configuration.

    Only groups of several names are returned.
    """
    places: dict[tuple[int, str], list[str]] = {}
    for path, m in module.named_modules():
        for name, value in _own(m):
            _enter(joined(path, name), value, {}, set(), _DEPTH, places)
    return [names for names in places.values() if len(names) > 1]


def _own(module: nn.Module) -> Iterable[tuple[str, Any]]:
    if isinstance(module, Metric):  # the rest are caches
        return [(name, vars(module).get(name)) for name in (*module._defaults, "_update_count")]
    library = _OF_LIGHTNING if isinstance(module, pl.LightningModule) else OF_EVERY_MODULE
    return [(name, value) for name, value in vars(module).items() if name not in library or name == "training"]


def _enter(
    name: str,
    value: Any,
    found: dict[str, Any],
    passed: set[int],
    depth: int,
    places: dict[tuple[int, str], list[str]] | None = None,
) -> None:
    """Note the value that has this name, and the values in it.

    Args:
        name: full name.
        value: value with this name.
        found: dictionary that gets names -> values.
        passed: ids of the enclosing objects, which are not entered again.
        depth: number of levels to go down.
        places: dictionary that gets (id of an object, place in it) -> names.
    """
    if isinstance(value, Absent):
        found[name] = ...
        return
    if isinstance(value, Tensor):
        if id(value) not in passed:
            found[name] = value.detach()
        return
    if isinstance(value, (*_LEAVES, np.ndarray)):
        found[name] = value if _can_be_compared(value) else ...
        return
    if id(value) in passed or isinstance(value, _NO_DATA) or _library(value) in _TOOLS:
        return
    passed = passed | {id(value)}
    below = _below(value) if depth else None
    if below is None:
        found[name] = ...
        return
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        found[f"len({name})"] = len(value)
        if places is not None:
            places.setdefault((id(value), "its length"), []).append(f"len({name})")
    for place, entry in below:
        if places is not None:
            places.setdefault((id(value), place), []).append(name + place)
        _enter(name + place, entry, found, passed, depth - 1, places)


def _can_be_compared(value: Any) -> bool:
    """Return whether ``==`` gives a bool, for arrays element by element; arrays of objects may give anything."""
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

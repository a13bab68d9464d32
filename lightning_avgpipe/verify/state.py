"""What a module holds besides parameters and buffers, by name: numbers, texts, tensors, in containers and objects."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.object_state import OF_EVERY_MODULE
from lightning_avgpipe.utils.packages import LIGHTNING
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.verify.comparison import how_different

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
_LIBRARIES = (
    "torch", *LIGHTNING, "lightning_avgpipe", "torchmetrics", "builtins", "logging", "threading", "weakref",
)  # fmt: skip
_NO_DATA = (types.FunctionType, types.MethodType, types.ModuleType, type, nn.Module, Dataset, DataLoader, Sampler)
_DEPTH = 6


def attributes(module: nn.Module) -> dict[str, Any]:
    """Names of what may change -> what it is now; tensors as they are, not copied, and ``...`` for placeholders."""
    found: dict[str, Any] = {}
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    for path, m in module.named_modules():
        for name, value in _own(m):
            _enter(joined(path, name), value, found, registered, _DEPTH)
    return found


def aliases(module: nn.Module) -> list[list[str]]:
    """Names of one entry of one object, which several modules hold (a configuration); only where there are several."""
    places: dict[tuple[int, str], list[str]] = {}
    for path, m in module.named_modules():
        for name, value in _own(m):
            _enter(joined(path, name), value, {}, set(), _DEPTH, places)
    return [names for names in places.values() if len(names) > 1]


def clone(value: Any) -> Any:
    """A copy of one entry."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def put(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Let entries hold what others have found; only what is otherwise here, and is there already."""
    here = attributes(module)
    places: dict[tuple[int, str], list[str]] = {}
    holders: dict[int, Any] = {}
    for path, m in module.named_modules():
        for name, value in _own(m):
            full = joined(path, name)
            places.setdefault((id(m), f".{name}"), []).append(full)
            holders[id(m)] = m
            _enter(full, value, {}, set(), _DEPTH, places, holders)
    for (holder, place), names in places.items():
        for name in names:
            known = name in here and name in values and here[name] is not ... and values[name] is not ...
            if known and how_different(values[name], here[name]) is not None:
                _put(holders[holder], place, _like(here[name], values[name]))


def _like(one: Any, other: Any) -> Any:
    """A copy of the other, where the one is."""
    return other.to(one.device, copy=True) if isinstance(one, Tensor) and isinstance(other, Tensor) else other


def _put(holder: Any, place: str, value: Any) -> None:
    if place.startswith("."):
        vars(holder)[place[1:]] = value
    elif isinstance(holder, dict):
        key = next(key for key in holder if f"[{key!r}]" == place)
        holder[key] = value
    elif isinstance(holder, (list, deque)):
        holder[int(place[1:-1])] = value


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
    holders: dict[int, Any] | None = None,
) -> None:
    """Note what is at this name and below.

    Args:
        name: full.
        value: what is there.
        found: gets names -> values.
        passed: ids of the objects above, which are not entered again.
        depth: how far to go down.
        places: gets (id of an object, place in it) -> names.
        holders: gets ids -> objects.
    """
    if isinstance(value, Absent):
        found[name] = ...
        return
    if isinstance(value, Tensor):
        if id(value) not in passed:
            found[name] = value.detach()
        return
    if isinstance(value, _LEAVES):
        found[name] = value
        return
    if depth == 0 or id(value) in passed or isinstance(value, _NO_DATA):
        return
    passed = passed | {id(value)}
    below = _below(value)
    if below is None:
        return
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        found[f"len({name})"] = len(value)
    for place, entry in below:
        if places is not None:
            places.setdefault((id(value), place), []).append(name + place)
        if holders is not None:
            holders[id(value)] = value
        _enter(name + place, entry, found, passed, depth - 1, places, holders)


def _below(value: Any) -> Iterator[tuple[str, Any]] | None:
    if isinstance(value, dict):
        return ((f"[{key!r}]", entry) for key, entry in value.items() if isinstance(key, (*_LEAVES, tuple)))
    if isinstance(value, (list, tuple, deque)):
        return ((f"[{i}]", entry) for i, entry in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return ((f" has {entry!r}", True) for entry in value if isinstance(entry, _LEAVES))
    if hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _LIBRARIES:
        return ((f".{key}", entry) for key, entry in vars(value).items())
    return None

"""Define templates: an operation's arguments, with slots for the tensors that differ between micro-batches."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_avgpipe.utils.placeholder import Absent, TensorMeta

VALUES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(...)),
        *(torch.memory_format, torch.Size, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    )
)
SAME = (nn.Module, type, enum.Enum)  # objects that are the same for each micro-batch


class TensorSlot(NamedTuple):
    """A slot for a tensor, or for an object that is made anew."""

    number: int


class Register(NamedTuple):
    """A module's register and name of a parameter or buffer, which may be another object for another micro-batch."""

    held: dict[str, Any]
    name: str


class Items(NamedTuple):
    """A template of a list, tuple or slice."""

    kind: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]


class Fields(NamedTuple):
    """A template of a dict."""

    parts: tuple[tuple[Any, Any], ...]


class Fixed(NamedTuple):
    """A value that is the same for each micro-batch."""

    value: Any


def fill(template: Any, slots: Sequence[Any]) -> Any:
    """Return the argument that a template describes, with these tensors."""
    kind = type(template)
    if kind is TensorSlot:
        return slots[template[0]]
    if kind is Fixed:
        return template[0]
    if kind is Items:
        return template[0]([fill(part, slots) for part in template[1]])
    if kind is Register:
        return template[0][template[1]]
    return {name: fill(part, slots) for name, part in template[0]}


def slice_of(parts: list[Any]) -> slice:
    """Return a slice with this start, stop and step."""
    return slice(*parts)


def key_of(template: Any) -> Any:
    """Return a key that is equal for templates that describe the same argument."""
    kind = type(template)
    if kind is Fixed:
        value = template.value
        if isinstance(value, Absent):
            return TensorMeta.of(value)
        return (type(value), value) if type(value) in VALUES else id(value)
    if kind is Register:
        return id(template.held), template.name
    if kind is Items:
        return id(template.kind), *map(key_of, template.parts)
    if kind is Fields:
        return tuple((name, key_of(part)) for name, part in template.parts)
    return template


def slots_in(templates: Iterable[Any]) -> list[int]:
    """Return the slots in templates."""
    found: list[int] = []
    for template in templates:
        kind = type(template)
        if kind is TensorSlot:
            found.append(template.number)
        elif kind is Items:
            found += slots_in(template.parts)
        elif kind is Fields:
            found += slots_in(part for _, part in template.parts)
    return found

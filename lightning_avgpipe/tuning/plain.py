"""Exact conversion of frozen dataclasses to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

from lightning_avgpipe.errors import TuningError

T = TypeVar("T")


def to_json(value: Any, version: int) -> str:
    """Return a dataclass of numbers, strings, tuples and such dataclasses as JSON; floats keep every bit."""
    return json.dumps({"format": version, type(value).__name__: dataclasses.asdict(value)}, allow_nan=False)


def from_json(kind: type[T], text: str, version: int) -> T:
    """Make the dataclass that ``to_json`` wrote.

    Raises:
        TuningError: the text is of another class or version, or incomplete.
    """
    try:
        found = json.loads(text)
        if found["format"] != version:
            raise ValueError(f"it has format {found['format']!r}, this version reads {version}")
        return typing.cast(T, _read(kind, found[kind.__name__], kind.__name__))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TuningError(
            f"this is no {kind.__name__} that can be read: {type(error).__name__}: {error}; make it anew"
        ) from error


def _read(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name for field in dataclasses.fields(kind)}
        needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        if not needed <= data.keys() <= fields:  # fields with a default may have been added after the text was written
            raise ValueError(f"{where} has the entries {sorted(data)}, not {sorted(fields)}")
        return kind(**{name: _read(hints[name], found, f"{where}.{name}") for name, found in data.items()})  # type: ignore[operator]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_read(arguments[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if isinstance(kind, types.UnionType):  # the only unions are those with None
        return None if data is None else _read(arguments[0], data, where)
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise TypeError(f"{where} is {data!r}, not of type {kind.__name__}")
    return kind(data)

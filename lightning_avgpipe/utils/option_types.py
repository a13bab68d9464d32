"""Types of options for jsonargparse, with which a command line refuses wrong values while parsing."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from lightning_avgpipe.utils.durations import PATTERN

__all__ = ["Count", "Duration", "Natural", "TensorName"]


class Name(str):
    """The name of a tensor in a batch, for options that also accept the import path of a function."""

    __slots__ = ()


def _parse_name(text: object) -> Name:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no name")
    try:
        function = pkgutil.resolve_name(text) if "." in text else None
    except (ImportError, AttributeError, ValueError):
        return Name(text)
    if callable(function):
        raise ValueError(f"{text} is a function, not a name")
    return Name(text)


def _write_name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return str(value)


if TYPE_CHECKING:
    Count = int
    Natural = int
    Duration = str
    TensorName = str
else:
    TensorName = Name
    try:
        from jsonargparse.typing import NonNegativeInt as Natural
        from jsonargparse.typing import PositiveInt as Count
        from jsonargparse.typing import register_type, restricted_string_type

        Duration = restricted_string_type("Duration", PATTERN)
        register_type(Name, serializer=_write_name, deserializer=_parse_name)
    except ImportError:  # without jsonargparse there is no LightningCLI; values are checked again anyway
        Count = Natural = int
        Duration = str

"""Types of options for jsonargparse, with which a command line refuses wrong values while parsing."""

from __future__ import annotations

import pkgutil
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_avgpipe.utils.allowed import Allowed

__all__ = ["DURATION", "Count", "Duration", "Natural", "TensorName", "duration"]


_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LEAST, _MOST = timedelta(milliseconds=1), timedelta(days=365)
_NUMBER = r"\d+(?:\.\d+)?"
PATTERN = rf"^\s*(?:{_NUMBER}\s*(?:{'|'.join(_UNITS)})?|\d+:\d\d:\d\d)\s*$"


def duration(value: Any) -> Any:
    """Convert a number of seconds or a string that is a duration to a timedelta; return anything else unchanged."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST.total_seconds():
        return timedelta(seconds=value)
    if not isinstance(value, str) or not re.match(PATTERN, value):
        return value
    if ":" in value:
        hours, minutes, seconds = map(int, value.split(":"))
        return timedelta(hours=min(hours, 10**6), minutes=minutes, seconds=seconds)
    found = re.match(rf"\s*({_NUMBER})\s*(\w*)", value)
    assert found is not None
    seconds_in_all = float(found[1]) * _UNITS[found[2] or "s"]
    return timedelta(seconds=min(seconds_in_all, 2 * _MOST.total_seconds()))


def _is_duration(value: Any) -> bool:
    return isinstance(value, timedelta) and _LEAST <= value <= _MOST


DURATION = Allowed(
    "a timedelta, a number of seconds, or a string such as '90s', '5min', '2h' or '0:30:00', from 1 ms to 365 days",
    "'5min'",
    _is_duration,
)


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

"""Tables of the allowed values of options, from which help texts and errors are made; types of options."""

from __future__ import annotations

import functools
import inspect
import math
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import close_to

Class = TypeVar("Class", bound=type)
_SHOWN = 100  # most characters of a value in a message


@dataclass(frozen=True)
class Allowed:
    """The allowed values of an option.

    Attributes:
        what: description that follows "must be" in messages.
        example: an allowed value as code.
        accepts: function that returns whether a value is allowed; it is called with any object.
    """

    what: str
    example: str
    accepts: Callable[[Any], bool]


Table = Mapping[str, Allowed]


def whole(least: int, most: int, example: int, *words: str) -> Allowed:
    """Allow an integer from ``least`` to ``most``, or one of some words."""
    what = " or ".join([*map(repr, words), f"an integer from {least} to {most}"])

    def accepts(value: Any) -> bool:
        return _is_word(value, words) or (isinstance(value, int) and type(value) is not bool and least <= value <= most)

    return Allowed(what, str(example), accepts)


def number(above: float, most: float, example: float, *words: str, least: bool = False) -> Allowed:
    """Allow a number above ``above`` (or equal to it, if ``least``) up to ``most``, or one of some words."""
    bounds = f"from {above:g} to {most:g}" if least else f"above {above:g}, at most {most:g}"

    def accepts(value: Any) -> bool:
        if _is_word(value, words):
            return True
        fits = isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)
        return fits and (above <= value if least else above < value) and value <= most

    return Allowed(" or ".join([*map(repr, words), f"a number {bounds}"]), f"{example:g}", accepts)


def choice(*words: str) -> Allowed:
    """Allow one of some words."""
    return Allowed(f"one of {', '.join(map(repr, words))}", repr(words[0]), lambda v: _is_word(v, words))


def flag(*words: str) -> Allowed:
    """Allow True, False, or one of some words."""
    what = " or ".join([*map(repr, words), "True or False"])
    return Allowed(what, "True", lambda v: isinstance(v, bool) or _is_word(v, words))


def names(what: str, example: str) -> Allowed:
    """Allow a list of at least one name."""
    return Allowed(
        f"a list of {what}", example, lambda v: isinstance(v, (list, tuple)) and bool(v) and all(map(_is_name, v))
    )


def directory(*words: str) -> Allowed:
    """Allow the path of a directory, or one of some words, which do not count as paths."""
    what = " or ".join([*map(repr, words), "the path of a directory"])
    return Allowed(what, "'some/folder'", lambda v: _is_name(v) or isinstance(v, os.PathLike))


def instance(kind: type, example: str) -> Allowed:
    """Allow an instance of a class."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return Allowed(f"{article} {kind.__name__}", example, lambda value: isinstance(value, kind))


def either(first: Allowed, second: Allowed) -> Allowed:
    """Allow the values that at least one of two entries allows."""
    what = f"{first.what}, or {second.what}"
    return Allowed(what, second.example, lambda v: first.accepts(v) or second.accepts(v))


def optional(allowed: Allowed, without: str) -> Allowed:
    """Allow the values of an entry or None; ``without`` says what None means."""
    return Allowed(f"{allowed.what}, or None for {without}", allowed.example, lambda v: v is None or allowed.accepts(v))


def check(table: Table, given: Mapping[str, Any], owner: str = "") -> None:
    """Check that the values of options are allowed.

    Args:
        table: allowed values by option.
        given: values by option.
        owner: name of the class that has these options, for messages.
    Raises:
        ConfigurationError: a value is not allowed. The message names the first such option, its value, and the allowed
            values.
    """
    for name, value in given.items():
        if not table[name].accepts(value):
            a_list = isinstance(value, str) and table[name].accepts([value])
            then = f"use {name}={[value]!r}" if a_list else f"for example {name}={table[name].example}"
            raise ConfigurationError(
                f"{f'{owner}: ' if owner else ''}{name}={_shown(value)}: must be {table[name].what}; {then}"
            )


def has_options(table: Table, further: Mapping[str, str] | None = None, **parts: type) -> Callable[[Class], Class]:
    """Make a decorator of a class whose arguments are options.

    It adds the allowed values to the description of each argument in the class's docstring, and the error for an
    unknown keyword suggests the closest known ones.

    Args:
        table: allowed values by option.
        further: texts to add before the allowed values, by option.
        parts: option -> class of its values. For a keyword of such a class, the error says how to pass it to that.
    """

    def add(kind: Class) -> Class:
        text = inspect.cleandoc(kind.__doc__ or "")
        for name, allowed in table.items():
            said = f"{further[name]} " if further and name in further else ""
            line = f"        {said}Allowed: {allowed.what}; for example ``{name}={allowed.example}``."
            # behind the description of the argument and its continuation lines
            text = re.sub(rf"^    {name}:.*(?:\n        .*)*", lambda found: f"{found[0]}\n{line}", text, flags=re.M)  # noqa: B023
        constructor: Callable[..., None] = kind.__init__  # type: ignore[misc]
        known = list(inspect.signature(constructor).parameters)[1:]

        @functools.wraps(constructor)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - set(known):
                remedy = close_to(name, known, f"it has {', '.join(known)}")
                for option, part in parts.items():
                    if name in inspect.signature(part).parameters:
                        remedy = f"use {option}={part.__name__}({name}={_shown(kwargs[name])})"
                raise ConfigurationError(f"{kind.__name__} has no option {name!r}: {remedy}")
            constructor(self, *args, **kwargs)

        kind.__doc__ = text
        kind.__init__ = construct  # type: ignore[misc]
        return kind

    return add


def _is_word(value: Any, words: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in words


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # repr() of a user's class may raise; the message must still be about the option
        text = f"<{type(value).__name__} without repr(): {type(error).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -- durations: a number of seconds, or a string such as "5min" -------------------------------------------------------

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


# -- types of options for jsonargparse, which then refuses wrong values on the command line ---------------------------


class Name(str):
    """The name of a tensor in a batch, for options that also accept the import path of a function."""

    __slots__ = ()


def _parse_name(text: object) -> Name:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a name")
    try:
        function = pkgutil.resolve_name(text) if "." in text else None
    except (ImportError, AttributeError, ValueError):
        return Name(text)
    if callable(function):
        raise ValueError(f"{text} is a function, not a name")
    return Name(text)


def _write_name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
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

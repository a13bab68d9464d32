"""What options may be: one table that help texts and errors are made from."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_avgpipe.errors import ConfigurationError

Class = TypeVar("Class", bound=type)
_SHOWN = 100  # characters of a value


@dataclass(frozen=True)
class Allowed:
    """What an option may be.

    Attributes:
        what: in words, after "must be".
        example: as one would write it.
        accepts: whether it may be this value; called with anything.
    """

    what: str
    example: str
    accepts: Callable[[Any], bool]


Table = Mapping[str, Allowed]


def whole(least: int, most: int, example: int, *words: str) -> Allowed:
    """An integer within bounds, or one of some words."""
    what = " or ".join([*map(repr, words), f"an integer from {least} to {most}"])

    def accepts(value: Any) -> bool:
        return _is_word(value, words) or (isinstance(value, int) and type(value) is not bool and least <= value <= most)

    return Allowed(what, str(example), accepts)


def number(above: float, most: float, example: float, *words: str, least: bool = False) -> Allowed:
    """A number above a bound (or, if ``least``, from it on) up to another, or one of some words."""
    bounds = f"from {above:g} to {most:g}" if least else f"above {above:g}, at most {most:g}"

    def accepts(value: Any) -> bool:
        if _is_word(value, words):
            return True
        fits = isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)
        return fits and (above <= value if least else above < value) and value <= most

    return Allowed(" or ".join([*map(repr, words), f"a number {bounds}"]), f"{example:g}", accepts)


def choice(*words: str) -> Allowed:
    """One of some words."""
    return Allowed(f"one of {', '.join(map(repr, words))}", repr(words[0]), lambda v: _is_word(v, words))


def flag(*words: str) -> Allowed:
    """Yes or no, or one of some words."""
    what = " or ".join([*map(repr, words), "True or False"])
    return Allowed(what, "True", lambda v: isinstance(v, bool) or _is_word(v, words))


def names(what: str, example: str) -> Allowed:
    """A list of names, at least one."""
    return Allowed(
        f"a list of {what}", example, lambda v: isinstance(v, (list, tuple)) and bool(v) and all(map(_is_name, v))
    )


def directory(*words: str) -> Allowed:
    """A path, or one of some words, which are paths too."""
    what = " or ".join([*map(repr, words), "the path of a directory"])
    return Allowed(what, "'some/folder'", lambda v: _is_name(v) or isinstance(v, os.PathLike))


def either(first: Allowed, second: Allowed) -> Allowed:
    """One or the other."""
    what = f"{first.what}, or {second.what}"
    return Allowed(what, second.example, lambda v: first.accepts(v) or second.accepts(v))


def optional(allowed: Allowed, without: str) -> Allowed:
    """The same, or None, and what that means."""
    return Allowed(f"{allowed.what}, or None for {without}", allowed.example, lambda v: v is None or allowed.accepts(v))


def check(table: Table, given: Mapping[str, Any], of: str = "") -> None:
    """Check options.

    Args:
        of: what has these options, for messages.
    Raises:
        ConfigurationError: names the first that is not allowed, what was given, and what is allowed.
    """
    for name, value in given.items():
        if not table[name].accepts(value):
            a_list = isinstance(value, str) and table[name].accepts([value])
            then = f"use {name}={[value]!r}" if a_list else f"for example {name}={table[name].example}"
            raise ConfigurationError(
                f"{f'{of}: ' if of else ''}{name}={_shown(value)}: must be {table[name].what}; {then}"
            )


def documented(table: Table) -> Callable[[Class], Class]:
    """A decorator that says in the docstring of a class, in the help of each argument, what is allowed."""

    def add(kind: Class) -> Class:
        lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
        made: list[str] = []
        pending: str | None = None
        for line in [*lines, ""]:
            ends = not line.startswith("        ")
            if ends and pending is not None:
                made.append(f"        {pending}")
                pending = None
            made.append(line)
            name = line.strip().partition(":")[0]
            if line.startswith("    ") and ends and name in table:
                pending = f"Allowed: {table[name].what}; for example ``{name}={table[name].example}``."
        kind.__doc__ = "\n".join(made)
        return kind

    return add


def _is_word(value: Any, words: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in words


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # whatever somebody's repr() does, the error is about the option
        text = f"<{type(value).__name__} without repr(): {type(error).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

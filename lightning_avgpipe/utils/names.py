"""Full names of modules, parameters and attributes, such as ``blocks.0.norm.weight``, and text for messages.

The name of the root is empty.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from lightning_avgpipe.errors import ConfigurationError


def joined(path: str, leaf: str) -> str:
    """Return the full name of an attribute of the module at a path."""
    return f"{path}.{leaf}" if path else leaf


def around(name: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a name, the innermost first and the root last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def nearest(name: str, known: Collection[str]) -> str:
    """Return the name if it is known, otherwise the innermost known path that contains it; empty if there is none."""
    return next((path for path in (name, *around(name)) if path in known), "")


def is_within(name: str, path: str) -> bool:
    """Return whether a name is a path itself, or lies below it."""
    return name == path or name.startswith(f"{path}.")


def fitting(patterns: Sequence[str], known: Collection[str], option: str, owner: object) -> list[str]:
    """Return the known names that match patterns, in the order of the patterns, without names below another result.

    Args:
        patterns: names and patterns of names (``blocks.*``), as given by the user.
        known: known names, in the order in which matches of the same pattern are returned.
        option: option that has the patterns, for messages.
        owner: object that has the names, for messages.
    Raises:
        ConfigurationError: a pattern matches no name. The message suggests similar names.
    """
    found: list[str] = []
    for pattern in patterns:
        fit = [name for name in known if fnmatchcase(name, pattern)]
        if not fit:
            what = f"{option}: {pattern!r} fits nothing in {type(owner).__name__}"
            raise ConfigurationError(f"{what}; {close_to(pattern, known)}")
        found += fit
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{other}.") for other in found)]


def listed(names: Sequence[str], most: int = 3) -> str:
    """Format names for messages, such as ``a, b, c and 4 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def close_to(name: str, known: Collection[str], instead: str = "use a name of named_modules()") -> str:
    """Return advice about an unknown name: the closest known names, or ``instead`` if none is close."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else instead


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns, and a rule below the first line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

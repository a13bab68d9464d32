"""Full names of modules, parameters and attributes: ``blocks.0.norm.weight``; the root's path is empty."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase


def joined(path: str, leaf: str) -> str:
    """The full name of what a module at this path has."""
    return f"{path}.{leaf}" if path else leaf


def around(name: str) -> Iterator[str]:
    """The paths of the modules around a name, the innermost first, the root last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def nearest(name: str, known: Collection[str]) -> str:
    """The name itself if it is known, or the innermost path around it that is; empty if none is."""
    return next((path for path in (name, *around(name)) if path in known), "")


def is_within(name: str, path: str) -> bool:
    """Whether something has this very name, or lies below it."""
    return name == path or name.startswith(f"{path}.")


def fitting(patterns: Sequence[str], known: Iterable[str]) -> list[str]:
    """The outermost of the known names that fit a pattern, in the order of the patterns; what lies below goes along."""
    known = list(known)
    found = [name for pattern in patterns for name in known if fnmatchcase(name, pattern)]
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{other}.") for other in found)]


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def close_to(name: str, known: Collection[str]) -> str:
    """What to do about a name that is not known."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "use a name of named_modules()"

"""Checks that private names of other packages, which are listed in tables, exist as this package expects."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Private:
    """A name of another package that is private, or that this package replaces.

    Attributes:
        name: full name, as ``package.module.Class.attribute``.
        why: what it is used for, or what replaces it.
        takes: names of the arguments that this package passes or receives, in order; others must have defaults. None:
            it is not called, or has no signature.
        versions: versions of the package that have the name; "": all that this package works with.
    """

    name: str
    why: str
    takes: str | None = None
    versions: str = ""


def problem(entry: Private) -> str | None:
    """Return how a name differs from its entry; None if it does not."""
    try:
        found = _find(entry.name)
    except AttributeError:
        return "does not exist"
    if entry.takes is None:
        return None
    if not callable(found):
        return "is no function"
    wanted, given = entry.takes.split(), inspect.signature(found).parameters
    needed = {n for n, p in given.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if [n for n in given if n in wanted] == wanted and needed <= {"self", *wanted}:
        return None
    return f"takes ({', '.join(given)}) instead of ({', '.join(wanted)})"


def check(table: Iterable[Private], package: str, version: str) -> None:
    """Warn about names that differ from their entries, since code that needs them may fail or have no effect."""
    for entry in table:
        if SpecifierSet(entry.versions).contains(version, prereleases=True) and (found := problem(entry)) is not None:
            warnings.warn(
                f"{entry.name}, which lightning_avgpipe needs ({entry.why}), {found} in {package} {version}. Install a "
                "version that the package is tested with; with this one what needs it may go wrong",
                stacklevel=2,
            )


def _find(name: str) -> Any:
    """Return the object of a name; None for an attribute that only instances of a class have."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            if isinstance(found, type) and any(part in _assigned(base) for base in found.__mro__):
                return None
            if hasattr(found, "__path__") and importlib.util.find_spec(".".join(parts[: i + 1])) is not None:
                importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)
    return found


def _assigned(kind: type) -> set[str]:
    """Return the attributes of instances that a class declares, or that its methods use."""
    methods = [inspect.unwrap(member) for member in vars(kind).values() if isinstance(member, FunctionType)]
    return set(vars(kind).get("__annotations__", ())).union(*(method.__code__.co_names for method in methods))

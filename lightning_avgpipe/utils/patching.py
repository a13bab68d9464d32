"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of one object within this context.

    Raises:
        AttributeError: the object has no such attribute, so that replacing it would have no effect.
    """
    getattr(owner, name)
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = replacement
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a replacement for functions that must not run."""

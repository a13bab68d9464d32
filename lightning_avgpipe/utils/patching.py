"""Patches: something else in the place of an attribute, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """An attribute of this one object is something else within the context.

    Raises:
        AttributeError: it has no such attribute, so nobody would look there.
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
    """In the place of what is not to be done."""

"""A cache of function results that does not keep the arguments alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def weakly_cached(function: Callable[[K], V]) -> Callable[[K], V]:
    """Decorate a function of one argument: cache its result for each object as long as the object lives.

    The result must not refer to the argument, which it would keep alive; a class may keep a whole model alive, through
    closures of its methods.
    """
    known: dict[int, tuple[weakref.ref[Any], V]] = {}

    def cached(argument: K) -> V:
        key = id(argument)
        found = known.get(key)
        if found is None:
            found = known[key] = weakref.ref(argument, lambda _: known.pop(key, None)), function(argument)
        return found[1]

    return cached

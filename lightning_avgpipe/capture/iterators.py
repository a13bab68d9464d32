"""Iterators that outlive a step: nobody can put back what a step has taken from one.

Following a step, measuring it, and each stage of a process would take items, and what is left would be other items on
each process. So no step that is divided may take any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.opaque import is_iterator

Key = tuple[str, str]  # path of a module and name of an attribute; or nothing, and the full name of a variable


class Iterators:
    """Those that attributes and variables lead to, as far as they have come.

    Args:
        attributes: of modules, by path and name, and variables.
    """

    def __init__(self, attributes: Mapping[Key, Any]) -> None:
        self._attributes = attributes
        self._objects = Objects(attributes.values(), opaque="iterators")

    def advanced(self) -> str:
        """The full name, as the user knows it, of what leads to one from which something was taken; empty: none."""
        leading = self._leading(one for one in self._objects.changed() if is_iterator(one))
        path, name = min(leading, key=lambda key: (key[1].startswith("_"), key), default=("", ""))
        return f"{path}.{name}" if path else name

    def leads(self) -> tuple[Key, ...]:
        """What leads to any."""
        return self._leading(self._objects.opaque)

    def _leading(self, found: Iterable[Any]) -> tuple[Key, ...]:
        ids = set(map(id, found))
        held = self._attributes.items() if ids else ()
        return tuple(key for key, one in held if Objects([one], opaque="iterators").reach(ids))

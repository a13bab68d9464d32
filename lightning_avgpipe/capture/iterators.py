"""Find iterators in attributes and variables from which a step takes items.

Such an iterator outlives the step, and nothing can put its items back. Following a step, measuring it, and each stage
would take items of their own, so that each process would see other items. A step that is divided must therefore take
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.opaque import is_iterator

Key = tuple[str, str]  # path of a module and name of an attribute; or "" and the full name of a variable


class Iterators:
    """The iterators that attributes and variables lead to, with their positions at the time of construction.

    Args:
        attributes: attributes of modules, by path and name, and variables.
    """

    def __init__(self, attributes: Mapping[Key, Any]) -> None:
        self._attributes = attributes
        self._objects = Objects(attributes.values(), opaque="iterators")

    def advanced(self) -> str:
        """Return the full name of what leads to an iterator that has advanced; "" if none has."""
        leading = self._leading(one for one in self._objects.changed() if is_iterator(one))
        path, name = min(leading, key=lambda key: (key[1].startswith("_"), key), default=("", ""))
        return f"{path}.{name}" if path else name

    def leads(self) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to any iterator."""
        return self._leading(self._objects.opaque)

    def _leading(self, found: Iterable[Any]) -> tuple[Key, ...]:
        ids = set(map(id, found))
        held = self._attributes.items() if ids else ()
        return tuple(key for key, one in held if Objects([one], opaque="iterators").reach(ids))

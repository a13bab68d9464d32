"""Held tensors: those that attributes of modules hold, and what comes of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_avgpipe.utils import tree

Key = tuple[str, str]  # path of a module, name of the attribute


class HeldTensors:
    """Follows tensors that attributes hold through the glue that makes other tensors of them.

    Attributes:
        uses: attribute -> the first node that takes what it held, or what comes of that.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[weakref.ref[Tensor], frozenset[Key]]] = {}
        self.uses: dict[Key, int] = {}

    def add(self, tensors: Iterable[Tensor], *keys: Key) -> None:
        """These attributes hold these tensors."""
        for tensor in tensors:
            self._holders[id(tensor)] = (weakref.ref(tensor), self._keys([tensor]).union(keys))

    def taken(self, tensors: Iterable[Tensor], node: int) -> None:
        """A node takes these tensors, which no node of this step has made."""
        for key in self._keys(tensors):
            self.uses.setdefault(key, node)

    def computed(self, tensors: Iterable[Tensor], result: Any, position: int) -> None:
        """Free glue before a node made this result of these tensors."""
        keys = self._keys(tensors)
        if not keys:
            return
        if all(isinstance(leaf, Tensor) for leaf in tree.flatten(result)[0]):
            self.add(tree.tensors(result), *keys)
            return
        for key in keys:  # numbers, on which anything may depend
            self.uses.setdefault(key, position - 1)

    def _keys(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        found: frozenset[Key] = frozenset()
        for tensor in tensors:
            holder = self._holders.get(id(tensor))
            if holder is not None and holder[0]() is tensor:
                found |= holder[1]
        return found

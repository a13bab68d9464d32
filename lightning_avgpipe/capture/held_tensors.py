"""Follow the tensors that attributes of modules hold, and the tensors that are computed from them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_avgpipe.utils import tree

Key = tuple[str, str]  # path of a module, name of the attribute


class HeldTensors:
    """A record of tensors in attributes, followed through glue that computes other tensors from them.

    Attributes:
        uses: attribute -> index of the first node that takes its tensor, or one that was computed from it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[weakref.ref[Tensor], frozenset[Key]]] = {}
        self.uses: dict[Key, int] = {}

    def add(self, tensors: Iterable[Tensor], *keys: Key) -> None:
        """Note that these attributes hold these tensors."""
        for tensor in tensors:
            self._holders[id(tensor)] = (weakref.ref(tensor), self._keys([tensor]).union(keys))

    def taken(self, tensors: Iterable[Tensor], node: int) -> None:
        """Note that a node takes these tensors, which no node of this step has made."""
        for key in self._keys(tensors):
            self.uses.setdefault(key, node)

    def computed(self, tensors: Iterable[Tensor], result: Any, position: int) -> None:
        """Note that free glue computed this result from these tensors, at a position before the next node."""
        keys = self._keys(tensors)
        if not keys:
            return
        if all(isinstance(leaf, Tensor) for leaf in tree.flatten(result)[0]):
            self.add(tree.tensors(result), *keys)
            return
        for key in keys:  # plain numbers are not followed, so they count as used here
            self.uses.setdefault(key, position - 1)

    def _keys(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        found: frozenset[Key] = frozenset()
        for tensor in tensors:
            holder = self._holders.get(id(tensor))
            if holder is not None and holder[0]() is tensor:
                found |= holder[1]
        return found

"""Remember which tensor objects hold the values of a graph while a step is followed."""

from __future__ import annotations

import weakref

from torch import Tensor


class KnownTensors:
    """A mapping from tensor objects to the indices of their values, which keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def learn(self, tensor: Tensor, value: int) -> None:
        """Remember that this tensor object holds a value."""
        self._known[id(tensor)] = (weakref.ref(tensor), value)

    def own_value_of(self, tensor: Tensor) -> int | None:
        """Return the value that this very object (not its base) holds; None if it holds none."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def value_of(self, tensor: Tensor) -> int | None:
        """Return the value that a tensor or its base holds; None if it holds none."""
        value = self.own_value_of(tensor)
        if value is None and tensor._base is not None:
            return self.own_value_of(tensor._base)
        return value

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether this very object (not its base) holds a value."""
        return self.own_value_of(tensor) is not None

    def alive(self) -> dict[int, Tensor]:
        """Return value -> the tensor object that holds it, for objects that still exist."""
        return {value: tensor for ref, value in self._known.values() if (tensor := ref()) is not None}

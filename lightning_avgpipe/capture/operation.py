"""Define the operations of a step that is followed, and remember which tensor objects hold the values of its graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.utils.objects import Objects


class Operation(NamedTuple):
    """A call of a unit, a glue function or a checkpointed region that the step has come to.

    Attributes:
        kind, name: as in :class:`~lightning_avgpipe.capture.graph.Node`.
        run: ``run(*args, **kwargs)`` executes it.
        tensors: tensors among its arguments.
        module: called module, if it is a call.
    """

    kind: str
    name: str
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    module: nn.Module | None = None

    def __str__(self) -> str:
        return {"call": f"unit '{self.name}'", "glue": f"{self.name}()", "region": "a checkpoint"}[self.kind]

    def matches(self, node: Node | None) -> bool:
        """Return whether the step executed this operation at a node when it was captured."""
        return node is not None and node.kind == self.kind and (node.name == self.name or self.kind == "region")

    def uses(self, owned: Mapping[int, str]) -> set[str]:
        """Return the name of the called unit, or the names of the parameters that the operation uses."""
        return {self.name} if self.kind == "call" else {owned[id(t)] for t in self.tensors if id(t) in owned}

    def with_objects(self, node: Node) -> tuple[list[Tensor], Objects | None]:
        """Return all tensors that a node takes, also those in objects that it may write into, and these objects."""
        if not node.writes_objects:
            return self.tensors, None
        modules = self.module.modules() if self.module is not None and node.exports else ()
        objects = Objects((self.args, self.kwargs), modules, generators=node.generators)
        return [*self.tensors, *objects.tensors], objects


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

"""Define an operation of a followed step: what capture, measurement and replay handle at a node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.state.snapshot import Snapshot

# Tensor methods by which a step sees or changes gradients.
HOOKING = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
_WRITES = re.compile(
    r"(?!requires_grad_)\w*[a-z0-9]_|__setitem__|data\.__set__|"
    r"__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


def writes(function: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return _WRITES.fullmatch(function) is not None


class Operation(NamedTuple):
    """A call of a unit, a glue function or a checkpointed region that the step has reached.

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

    def with_objects(self, node: Node) -> tuple[list[Tensor], Snapshot | None]:
        """Return all tensors that a node takes, also those in objects that it may write into; and these objects."""
        if not node.writes_objects:
            return self.tensors, None
        modules = self.module.modules() if self.module is not None and node.exports else ()
        objects = Snapshot((self.args, self.kwargs), modules, generators=node.generators)
        return [*self.tensors, *objects.tensors], objects

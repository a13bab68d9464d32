"""Define the operations of a step, how a stage executes them, and their outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.engine.compiling import Compiler
from lightning_avgpipe.engine.path import Entry
from lightning_avgpipe.engine.randomness import Draws
from lightning_avgpipe.state.parcel import Packer, Parcel
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import described
from lightning_avgpipe.utils.tensors import KnownTensors

Repeat = Callable[[Node, Callable[..., Any]], Callable[..., Any]]
Around = Callable[["Operation", Node], contextlib.AbstractContextManager[None]]


_NOTHING = contextlib.nullcontext()


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

    def opened(self, node: Node) -> tuple[list[Tensor], Snapshot | None]:
        """Return all tensors that a node takes, also those in objects that it may write into, and these objects."""
        if not node.opens:
            return self.tensors, None
        modules = self.module.modules() if self.module is not None and node.exports else ()
        objects = Snapshot((self.args, self.kwargs), modules, generators=node.generators)
        return [*self.tensors, *objects.tensors], objects


class OperationResult(NamedTuple):
    """The outcome of an operation.

    Attributes:
        result: result of the operation.
        tensors: all tensors that it returned.
        parcel: packed changes of the objects that it wrote into; None if it writes into none.
    """

    result: Any
    tensors: list[Tensor]
    parcel: Parcel | None = None

    @property
    def entry(self) -> Entry:
        """The description of the outcome for later stages."""
        return described(self.result) if self.parcel is None else self.parcel

    def is_as_captured(self, node: Node, taken: Sequence[Tensor], known: KnownTensors[int]) -> bool:
        """Return whether a node returned as many tensors as when captured, and its arguments in the same places."""
        if len(self.tensors) != len(node.outputs):
            return False
        for value, tensor in zip(node.outputs, self.tensors, strict=True):
            if value < 0:
                if tensor is not taken[-1 - value]:
                    return False
            elif value in node.inputs and known.own_value_of(tensor) != value:
                return False
        return True

    def apart(self, node: Node, taken: Sequence[Tensor]) -> OperationResult:
        """Return the outcome with views in place of arguments that the node returned instead of new tensors.

        The view gets the index of the new value; the argument keeps its own.
        """
        given = set(map(id, taken))
        if given.isdisjoint(map(id, self.tensors)):
            return self
        leaves, spec = tree.flatten(self.result)
        values = iter(node.outputs)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = next(values)
                if id(leaf) in given and value >= 0 and value not in node.inputs:
                    leaves[i] = leaf.view_as(leaf)
        return OperationResult(tree.unflatten(leaves, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)])


class Runner:
    """A runner of the operations in one stage's part of a step.

    Args:
        draws: random streams of the operations; None: nothing draws.
        repeat: wrap the function that executes a unit so that it keeps less for the backward.
        packer: packer of the module; None if no unit writes into objects.
        around: context within which each operation runs.
        compiler: compiler of units; None: they run uncompiled.

    Attributes:
        draws: as given.
    """

    def __init__(
        self,
        draws: Draws | None,
        repeat: Repeat | None,
        packer: Packer | None,
        around: Around | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.draws = draws
        self._repeat = repeat
        self._packer = packer
        self._around = around
        self._compiler = compiler

    def run(self, operation: Operation, node: Node, objects: Snapshot | None) -> OperationResult:
        """Execute an operation that stands at a node and may write into these objects."""
        with _NOTHING if self._around is None else self._around(operation, node):
            result = self._result(operation, node)
        if objects is not None and self._packer is not None:
            parcel, tensors = self._packer.pack(result, objects)
            return OperationResult(result, tensors, parcel)
        return OperationResult(result, [result] if type(result) is Tensor else tree.tensors(result))

    def _result(self, operation: Operation, node: Node) -> Any:
        run = operation.run
        if self.draws is not None and node.kind == "call":
            self.draws.begin_unit()
        compiled = self._compiler is not None and operation.module is not None
        if compiled:
            run = self._compiled(operation, node)
        if self._repeat is not None and node.kind == "call":
            run = self._repeat(node, run)
        if self.draws is None or node.kind == "glue" or compiled:
            return run(*operation.args, **operation.kwargs)
        # a region is code of the step itself, whose path is ""
        inside = "" if node.kind == "region" else node.name
        with self.draws.functions(inside, node.drawn):
            return run(*operation.args, **operation.kwargs)

    def _compiled(self, operation: Operation, node: Node) -> Callable[..., Any]:
        """Return a function that executes a compiled unit, all of whose draws come from one stream."""
        assert self._compiler is not None and operation.module is not None
        run = self._compiler.compiled(operation.name, operation.module, operation.run)
        if self.draws is None or not node.drawn:
            return run
        draws, seed = self.draws, self.draws.seed

        def seeded(*args: Any, **kwargs: Any) -> Any:
            draws.begin_stream(seed)
            return run(*args, **kwargs)

        return seeded

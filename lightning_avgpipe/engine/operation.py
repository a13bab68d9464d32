"""Execute the operations of a step on a stage, and tell later stages about their outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.known_tensors import KnownTensors
from lightning_avgpipe.capture.tracer import Operation
from lightning_avgpipe.engine.execution import Compiler
from lightning_avgpipe.engine.randomness import Draws
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer, Parcel
from lightning_avgpipe.utils.placeholder import Description, described

# Description of a node's result, with the objects that it wrote into if there are any.
Entry = Description | Parcel


class OffPathNode(NamedTuple):
    """A node that was not captured, and the description of its result."""

    node: Node
    entry: Entry


class Path(NamedTuple):
    """The nodes that earlier stages executed with a micro-batch, if these were not the captured ones.

    Attributes:
        entries: descriptions of the results of captured nodes, then steps.
        values: indices of the values that are sent.
        shared: indices of the values that share memory.
        ended: whether the step has returned None.
    """

    entries: tuple[Entry | OffPathNode, ...]
    values: tuple[int, ...]
    shared: frozenset[int]
    ended: bool = False


Repeat = Callable[[Node, Callable[..., Any]], Callable[..., Any]]
Around = Callable[[Operation, Node], contextlib.AbstractContextManager[None]]


_NOTHING = contextlib.nullcontext()


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

    def is_as_captured(self, node: Node, taken: Sequence[Tensor], known: KnownTensors) -> bool:
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

    def separated(self, node: Node, taken: Sequence[Tensor]) -> OperationResult:
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
        draws: random streams of the operations.
        repeat: wrap the function that executes a unit so that it keeps less for the backward.
        packer: packer of the module.
        around: context within which each operation runs; None: none.
        compiler: compiler of units; None: they run uncompiled.

    Attributes:
        draws: as given.
    """

    def __init__(
        self,
        draws: Draws,
        repeat: Repeat | None,
        packer: Packer,
        around: Around | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.draws = draws
        self._repeat = repeat
        self._packer = packer
        self._around = around
        self._compiler = compiler

    def run(self, operation: Operation, node: Node, objects: Objects | None) -> OperationResult:
        """Execute an operation that stands at a node and may write into these objects."""
        with _NOTHING if self._around is None else self._around(operation, node):
            result = self._result(operation, node)
        if objects is not None:
            parcel, tensors = self._packer.pack(result, objects)
            return OperationResult(result, tensors, parcel)
        return OperationResult(result, [result] if type(result) is Tensor else tree.tensors(result))

    def _result(self, operation: Operation, node: Node) -> Any:
        run, draws = operation.run, self.draws
        if node.kind == "call":
            draws.begin_unit()
        compiled = self._compiler is not None and operation.module is not None
        if compiled:
            run = self._compiled(operation, node)
        if self._repeat is not None and node.kind == "call":
            run = self._repeat(node, run)
        if node.kind == "glue" or compiled:
            return run(*operation.args, **operation.kwargs)
        # a region is code of the step itself, whose path is ""
        with draws.functions("" if node.kind == "region" else node.name, node.drawn):
            return run(*operation.args, **operation.kwargs)

    def _compiled(self, operation: Operation, node: Node) -> Callable[..., Any]:
        """Return a function that executes a compiled unit, all of whose draws come from one stream."""
        assert self._compiler is not None and operation.module is not None
        run = self._compiler.compiled(operation.name, operation.module, operation.run)
        if not node.drawn:
            return run
        draws, seed = self.draws, self.draws.seed

        def seeded(*args: Any, **kwargs: Any) -> Any:
            draws.begin_stream(seed)
            return run(*args, **kwargs)

        return seeded

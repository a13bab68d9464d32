"""Define one stage's part of a step and its outcome, and execute its operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.attestation import Request
from lightning_avgpipe.engine.execution import Compiler
from lightning_avgpipe.engine.late_effect_checks import LateEffectChecks
from lightning_avgpipe.engine.randomness import Drawing, Draws
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.parcel import Packer, Parcel
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Description, described
from lightning_avgpipe.utils.random_streams import RandomKey
from lightning_avgpipe.utils.tensors import KnownTensors

# Description of a node's result, with the objects that it wrote into if there are any.
ResultDescription = Description | Parcel


class OffPathNode(NamedTuple):
    """A node that was not captured, and the description of its result."""

    node: Node
    entry: ResultDescription


class Path(NamedTuple):
    """The nodes that earlier stages executed with a micro-batch, if these were not the captured ones.

    Attributes:
        descriptions: descriptions of the results of captured nodes, then the nodes that were not captured.
        values: indices of the values that are sent.
        shared: indices of the values that share memory.
        ended: whether the step has returned None.
    """

    descriptions: tuple[ResultDescription | OffPathNode, ...]
    values: tuple[int, ...]
    shared: frozenset[int]
    ended: bool = False


Repeat = Callable[[Node, Callable[..., Any]], Callable[..., Any]]
Around = Callable[[Operation, Node], contextlib.AbstractContextManager[None]]
Observe = Callable[[Callable[..., Any], Any, Any], Any]

Tapped = tuple[tuple[Tensor, ...], tuple[ResultDescription, ...]]


class Part(NamedTuple):
    """One stage's part of a step on one micro-batch.

    Attributes:
        program: program of the stage.
        run: executes the step function.
        args: arguments of the step, the micro-batch first.
        received: tensors for ``program.receives``, in its order, or for the values of a path.
        descriptions: descriptions of what the nodes of earlier stages returned, fewer if the step returned None on one
            of these stages; or the path that they took.
        key: key of this execution's random numbers.
        observe: calls ``self.log`` and metrics on the last stage; None: they are called directly.
        repeat: wraps the function that executes a unit, so that it keeps less for the backward; None: none is wrapped.
        tap: position after the start of the program at which values are copied; 0: none.
        requests: requests for the nodes of earlier stages, see :mod:`~lightning_avgpipe.engine.attestation`.
    """

    program: StageProgram
    run: Callable[..., Any]
    args: Sequence[Any]
    received: Sequence[Tensor] = ()
    descriptions: tuple[ResultDescription, ...] | Path = ()
    key: RandomKey = RandomKey(0)
    observe: Observe | None = None
    repeat: Repeat | None = None
    tap: int = 0
    requests: tuple[Request, ...] = ()


class Replayed(NamedTuple):
    """The outcome of one stage's part of a step on one micro-batch.

    Attributes:
        result: result of the step function; None unless this is the last stage.
        sent: tensors for the next stage, in the order of the program, or of a detour.
        descriptions: descriptions of what the nodes up to the end of this stage returned, or their path.
        tapped: copies of the values that are alive at the tapped position, and descriptions of what the nodes before it
            returned; None if the step did not come there.
        began_on_host: whether Python's or NumPy's generators have moved, although nothing drew from them when the step
            was captured.
        requests: requests for the nodes up to the end of this stage.
    """

    result: Any
    sent: tuple[Tensor, ...]
    descriptions: tuple[ResultDescription, ...] | Path
    tapped: Tapped | None = None
    began_on_host: bool = False
    requests: tuple[Request, ...] = ()


@dataclass(frozen=True)
class ReplayContext:
    """The data that all replays of a stage share.

    Attributes:
        units: ``id(module) -> path``.
        owned: ``id -> full name`` of parameters, and of buffers that glue changes.
        drawing: modules that draw random numbers.
        device: device of the stage.
        packer: packer of the module.
        compiler: compiler of units; None: they run uncompiled.
        late_effect_checks: check for effects that the captured step did not have.
    """

    units: Mapping[int, str]
    owned: Mapping[int, str]
    drawing: Drawing
    device: torch.device
    packer: Packer
    compiler: Compiler | None
    late_effect_checks: LateEffectChecks

    @property
    def compiled(self) -> bool:
        """Whether units run compiled code rather than the original; draws in compiled code cannot be watched."""
        return self.compiler is not None or not self.drawing.seen


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
    def entry(self) -> ResultDescription:
        """The description of the outcome for later stages."""
        return described(self.result) if self.parcel is None else self.parcel

    def is_as_captured(self, node: Node, taken: Sequence[Tensor], known: KnownTensors) -> bool:
        """Return whether a node returned as many tensors as when captured, and the same ones in the same places.

        Those are its arguments, and a tensor that it returned several times.
        """
        if len(self.tensors) != len(node.outputs):
            return False
        same: dict[int, Tensor] = {}
        for value, tensor in zip(node.outputs, self.tensors, strict=True):
            expected = taken[-1 - value] if value < 0 else same.setdefault(value, tensor)
            if tensor is not expected or (value in node.inputs and known.own_value_of(tensor) != value):
                return False
        return True

    def separated(self, node: Node, taken: Sequence[Tensor]) -> OperationResult:
        """Return the outcome with views where the node returned an argument, or a result twice, as a new value.

        The view gets the index of the new value. The argument, or the earlier result, keeps its own index.
        """
        known = dict.fromkeys(map(id, taken), -1)  # id of an argument or result -> value
        if known.keys().isdisjoint(map(id, self.tensors)) and len({*map(id, self.tensors)}) == len(self.tensors):
            return self
        leaves, spec = tree.flatten(self.result)
        values = iter(node.outputs)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = next(values)
                if known.setdefault(id(leaf), value) != value and value >= 0 and value not in node.inputs:
                    leaves[i] = leaf.view_as(leaf)
        return OperationResult(tree.unflatten(leaves, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)])


class Runner:
    """A runner of the operations in one stage's part of a step.

    Args:
        part: part of the step.
        context: data that all replays of the stage share.
        around: returns the context within which an operation runs; None: there is none.

    Attributes:
        draws: random streams of the operations.
        is_plain: whether units run as they are: neither compiled nor repeated for the backward.
    """

    def __init__(self, part: Part, context: ReplayContext, around: Around | None = None) -> None:
        self.draws = Draws(context.drawing, part.key, context.device)
        self._repeat = part.repeat
        self._packer = context.packer
        self._around = around
        self._compiler = context.compiler
        self.is_plain = part.repeat is None and context.compiler is None

    def run(self, operation: Operation, node: Node, objects: Snapshot | None) -> OperationResult:
        """Execute the operation of a node, which may write into these objects."""
        if self._around is None:
            result = self._result(operation, node)
        else:
            with self._around(operation, node):
                result = self._result(operation, node)
        if objects is not None:
            parcel, tensors = self._packer.pack(result, objects)
            return OperationResult(result, tensors, parcel)
        return OperationResult(result, [result] if type(result) is Tensor else tree.tensors(result))

    def _result(self, operation: Operation, node: Node) -> Any:
        run, draws = operation.run, self.draws
        if node.kind == "glue":
            return run(*operation.args, **operation.kwargs)
        if node.kind == "call":
            draws.begin_unit()
        compiled = self._compiler is not None and operation.module is not None
        if compiled:
            run = self._compiled(operation, node)
        if self._repeat is not None and node.kind == "call":
            run = self._repeat(node, run)
        if compiled:
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

"""Hold the tensors that stand for the values of a step on one stage, and answer calls of earlier stages' units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.part import Part, Path, ReplayContext, ResultDescription
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import ObjectState, set_state, state_of
from lightning_avgpipe.state.parcel import Parcel
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors, nodes_of


class StageValues:
    """The tensors that stand for the values of one micro-batch on a stage.

    Args:
        part: part of the step.
        context: data that all replays of the stage share.
        values: indices of the values of the received tensors.
        known: record of which tensor stands for which value.

    Attributes:
        device: device of the stage.
        stand_ins: tensors that stand for values of earlier stages.
    """

    def __init__(self, part: Part, context: ReplayContext, values: Sequence[int], known: KnownTensors[int]) -> None:
        self.device, self._packer = context.device, context.packer
        self._program = program = part.program
        self._received = dict(zip(values, part.received, strict=True))
        self._known = known
        self._wanted = frozenset(program.sends) | frozenset(program.graph.live(part.tap) if part.tap else ())
        self._made: dict[int, Tensor] = {}  # values to be sent, as far as they have been made here
        self.stand_ins: dict[int, Tensor] = {}  # for values of earlier stages
        self._written: list[tuple[Any, ObjectState, ObjectState]] = []  # object, and its states around a skipped unit

    def stand_in(self, value: int, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor for a value of an earlier stage, made by ``make`` if it was not received."""
        if value not in self.stand_ins:
            tensor = self._received.get(value)
            self.stand_ins[value] = make() if tensor is None else tensor
            self._known.learn(self.stand_ins[value], value)
        return self.stand_ins[value]

    def made(self, tensor: Tensor, value: int) -> None:
        """Note that a node of this stage has returned the tensor of a value, or written into it."""
        self._known.learn(tensor, value)
        if value in self._wanted:
            self._made[value] = tensor

    def is_made_here(self, value: int | None) -> bool:
        """Return whether a value is known, and not one of an earlier stage."""
        return value is not None and value not in self.stand_ins and value not in self._received

    def leads_to_received(self, tensors: Sequence[Tensor], besides: Sequence[Tensor]) -> bool:
        """Return whether a backward from these tensors would reach received values other than ``besides``."""
        ends = {t.grad_fn for t in self._received.values()} - {t.grad_fn for t in besides}
        return not ends.isdisjoint(nodes_of(tensors))

    def to_send(self, value: int) -> Tensor:
        """Return the tensor to send for a value; an empty one if the step ended before the value was made."""
        for tensors in (self._made, self.stand_ins, self._received):
            if value in tensors:
                return tensors[value]
        return torch.empty(0, device=self.device)

    def result(self, node: Node, entry: ResultDescription, tensors: list[Tensor], objects: Snapshot | None) -> Any:
        """Return the result of a node that is not executed here.

        Args:
            node: node of an earlier stage.
            entry: description of its result there.
            tensors: tensors that it takes here.
            objects: objects that it may write into.
        Raises:
            StepChangedError: the node was given other objects than on its own stage.
        """
        for target, value in node.written(tensors):
            if value not in self.stand_ins and target not in self._known:
                # A free tensor (say, torch.zeros) that an earlier stage wrote into.
                self.stand_ins[value] = target
                self._known.learn(target, value)
                if value in self._received:
                    target.copy_(self._received[value])
        if isinstance(entry, TensorMeta):
            return self._output(node, 0, entry, tensors)
        if isinstance(entry, Parcel):
            return self._open(node, entry, tensors, objects)
        (spec, leaves), number = entry, count()
        filled = [
            self._output(node, next(number), leaf, tensors) if isinstance(leaf, TensorMeta) else leaf.value
            for leaf in leaves
        ]
        return tree.unflatten(filled, spec.spec)

    def _output(self, node: Node, i: int, meta: TensorMeta, tensors: list[Tensor]) -> Tensor:
        """Return the tensor for the i-th output of a node that took these tensors."""
        value = node.outputs[i]
        if value < 0:
            return tensors[-1 - value]
        return self.stand_in(value, lambda: Absent(meta, self.device, node.name if node.kind == "call" else str(node)))

    def _open(self, node: Node, parcel: Parcel, tensors: list[Tensor], objects: Snapshot | None) -> Any:
        """Apply the unit's changes of objects to the objects of this stage."""
        assert objects is not None
        given = [self._output(node, i, meta, tensors) for i, meta in enumerate(parcel.tensors)]
        lasting = [objects.owners[i] for i in node.lasting if i < len(objects.owners)]
        before = list(map(state_of, lasting))
        try:
            result = self._packer.unpack(parcel, given, objects)
        except LookupError as error:
            raise StepChangedError(
                f"{node} was given other objects than when {self._program.graph.step} was captured (stage "
                f"{self._program.stage}): {error}. Pass the same objects for every batch"
            ) from error
        self._written += zip(lasting, before, map(state_of, lasting), strict=True)
        return result

    def restore(self) -> None:
        """Restore objects that outlive the step to the state in which this stage's own units left them."""
        for owner, before, after in reversed(self._written):
            if after.is_same(state_of(owner)) and not before.is_same(after):
                set_state(owner, before)


# -- answers: stand-ins for the results of earlier stages' units, reused where the step makes the same call again ------
#
#     first micro-batch     block0(x)    matched with a node, compared with the request on its own stage, answered
#     later ones            block0(x)    the same unit, value and modes: answered at once
#
# An answer is kept with everything that it depends on: the call, its modes, and what earlier stages sent about it. If
# any of this differs, the call is handled as the first one was.


def modes_of(module: nn.Module, aside: int = 0) -> tuple[Any, ...]:
    """Return the modes that stages compare for a call, besides its arguments.

    Args:
        module: the called module.
        aside: number of function modes that were on the stack when the module was called and are not now.
    """
    return (
        module.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch._C._len_torch_function_stack() + aside,
        torch._C._len_torch_dispatch_stack(),
    )


class Answer(NamedTuple):
    """The answer to one call.

    Attributes:
        module: called module.
        given: values of its arguments; None: they are not compared, as on a stage that is not the last one.
        modes: modes in which it was called.
        entry: description of its result.
        value: value that it returned.
        make: makes the tensor that stands for this value if it was not received.
        calls: paths of the called modules that may draw random numbers, the unit first.
    """

    module: nn.Module
    given: tuple[int, ...] | None
    modes: tuple[Any, ...]
    entry: TensorMeta
    value: int
    make: Callable[[], Tensor]
    calls: tuple[str, ...]


class AnswerCache:
    """The answers to the calls that come before a stage's part of the step."""

    def __init__(self, program: StageProgram, device: torch.device) -> None:
        self._program, self._device = program, device
        self._requests: Any = ()
        self._known: list[Answer | None] = [None] * program.start

    def begin(self, part: Part) -> Sequence[Answer | None]:
        """Return the answers by position of the node. If a part comes with other requests than before, forget them."""
        detour = isinstance(part.descriptions, Path) or len(part.descriptions) < part.program.start
        if detour or part.program is not self._program:
            return ()
        if part.requests != self._requests:
            self._known = [None] * part.program.start
        self._requests = part.requests
        return self._known

    def learn(self, operation: Operation, node: Node, entry: ResultDescription, known: KnownTensors[int]) -> None:
        """Keep the answer to a call that was matched with a node, if it can be reused.

        Args:
            operation: the call; the step's tracer, which handles it, is not on the stack of modes now.
            node: node of the call.
            entry: description of its result.
            known: tensors of the step, and their values.
        """
        module = operation.module
        if module is None or module._forward_hooks or not isinstance(entry, TensorMeta):
            return
        if node.writes or node.writes_objects or node.outputs[0] < 0:
            return
        given: tuple[int, ...] | None = None
        if self._program.is_last or node.name not in self._program.graph.resident:
            values = [known.own_value_of(one) for one in operation.args if isinstance(one, Tensor)]
            given = tuple(value for value in values if value is not None)
            if operation.kwargs or not 0 < len(given) == len(operation.args):
                return
        make, calls = Absent.maker(entry, self._device, node.name), (node.name, *node.drawn)
        self._known[node.index] = Answer(module, given, modes_of(module, aside=1), entry, node.outputs[0], make, calls)

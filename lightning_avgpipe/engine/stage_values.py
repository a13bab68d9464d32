"""Hold the tensors that stand for the values of a step on one stage: received, absent, and made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.engine.answers import Answer
from lightning_avgpipe.engine.part import Entry
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import ObjectState, put_state, state_of
from lightning_avgpipe.state.parcel import Packer, Parcel
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors


class StageValues:
    """The tensors for the values of one micro-batch.

    Args:
        program: program of this stage.
        received: value -> received tensor.
        known: record of which tensor stands for which value.
        device: device of this stage.
        packer: packer of the module.
        tap: position at which values are copied; 0: none.

    Attributes:
        device: as given.
        stand_ins: tensors that stand for values of earlier stages.
    """

    def __init__(
        self,
        program: StageProgram,
        received: Mapping[int, Tensor],
        known: KnownTensors[int],
        device: torch.device,
        packer: Packer,
        tap: int,
    ) -> None:
        self.device = device
        self._program = program
        self._received = received
        self._known = known
        self._packer = packer
        self._wanted = frozenset(program.sends) | frozenset(program.graph.live(tap) if tap else ())
        self._made: dict[int, Tensor] = {}  # values to be sent, as far as they have been made here
        self.stand_ins: dict[int, Tensor] = {}  # for values of earlier stages
        self._written: list[tuple[Any, ObjectState, ObjectState]] = []  # object, and its states around a skipped unit

    def answer(self, answer: Answer) -> Tensor:
        """Return the tensor for the value of an answer."""
        value = answer.value
        if value not in self.stand_ins:
            tensor = self._received.get(value)
            self.stand_ins[value] = answer.make() if tensor is None else tensor
            self._known.learn(self.stand_ins[value], value)
        return self.stand_ins[value]

    def made(self, tensor: Tensor, value: int) -> None:
        """Note that a node of this stage has returned a value, or written into it."""
        self._known.learn(tensor, value)
        if value in self._wanted:
            self._made[value] = tensor

    def is_made_here(self, value: int | None) -> bool:
        """Return whether a value is known, and not one of an earlier stage."""
        return value is not None and value not in self.stand_ins and value not in self._received

    def leads_to_received(self, tensors: Sequence[Tensor], besides: Sequence[Tensor]) -> bool:
        """Return whether autograd follows these tensors to received values, others than ``besides``."""
        asked = {t.grad_fn for t in besides}
        ends = {t.grad_fn for t in self._received.values() if t.grad_fn is not None} - asked
        seen, left = set[Any](), [t.grad_fn for t in tensors if t.grad_fn is not None]
        while left:
            node = left.pop()
            if node in ends:
                return True
            following = {node for node, _ in node.next_functions if node is not None} - seen
            seen |= following
            left += following
        return False

    def to_send(self, value: int) -> Tensor:
        """Return the tensor to send for a value; an empty one if the step ended before the value was made."""
        for tensors in (self._made, self.stand_ins, self._received):
            if value in tensors:
                return tensors[value]
        return torch.empty(0, device=self.device)

    def result(self, node: Node, entry: Entry, tensors: list[Tensor], objects: Snapshot | None) -> Any:
        """Return the result of a node that is not executed here.

        Args:
            node: node of an earlier stage.
            entry: description of its result there.
            tensors: tensors that it takes here.
            objects: objects that it may write into.
        Raises:
            StepChangedError: the node was given other objects than on its own stage.
        """
        for i, value, of_base in node.writes:
            target = tensors[i]._base if of_base else tensors[i]
            if target is not None and value not in self.stand_ins and target not in self._known:
                # A free tensor (say, torch.zeros) that an earlier stage wrote into.
                self.stand_ins[value] = target
                self._known.learn(target, value)
                if value in self._received:
                    target.copy_(self._received[value])
        if isinstance(entry, TensorMeta):
            return self._stand_in(node, 0, entry, tensors)
        if isinstance(entry, Parcel):
            return self._open(node, entry, tensors, objects)
        spec, leaves = entry
        filled, i = [], 0
        for leaf in leaves:
            if isinstance(leaf, TensorMeta):
                filled.append(self._stand_in(node, i, leaf, tensors))
                i += 1
            else:
                filled.append(leaf.value)
        return tree.unflatten(filled, spec.spec)

    def _stand_in(self, node: Node, i: int, meta: TensorMeta, tensors: list[Tensor]) -> Tensor:
        """Return the tensor for the i-th output of a node that took these tensors."""
        value = node.outputs[i]
        if value < 0:
            return tensors[-1 - value]
        if value not in self.stand_ins:
            tensor = self._received.get(value)
            name = node.name if node.kind == "call" else str(node)
            self.stand_ins[value] = Absent(meta, self.device, name) if tensor is None else tensor
            self._known.learn(self.stand_ins[value], value)
        return self.stand_ins[value]

    def _open(self, node: Node, parcel: Parcel, tensors: list[Tensor], objects: Snapshot | None) -> Any:
        """Apply the unit's changes of objects to the objects of this stage."""
        assert objects is not None
        given = [self._stand_in(node, i, meta, tensors) for i, meta in enumerate(parcel.tensors)]
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
                put_state(owner, before)

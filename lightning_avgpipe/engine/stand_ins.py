"""Provide stand-ins for the values of nodes that belong to earlier stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.engine.path import Entry
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import ObjectState, put_state, state_of
from lightning_avgpipe.state.parcel import Packer, Parcel
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors


class StandIns:
    """The tensors for values of earlier stages: received ones, and absent ones.

    Args:
        program: program of this stage.
        received: value -> received tensor.
        known: record of which tensor stands for which value.
        device: device of this stage.
        packer: packer of the module; None if no unit writes into objects.
    """

    def __init__(
        self,
        program: StageProgram,
        received: Mapping[int, Tensor],
        known: KnownTensors[int],
        device: torch.device,
        packer: Packer | None,
    ) -> None:
        self._program = program
        self._received = received
        self._known = known
        self._device = device
        self._packer = packer
        self._tensors: dict[int, Tensor] = {}
        self._written: list[tuple[Any, ObjectState, ObjectState]] = []  # object, and its states around a skipped unit

    def of(self, value: int) -> Tensor | None:
        """Return the tensor that stands for a value, or was received for it; None if there is none."""
        tensor = self._tensors.get(value)
        return self._received.get(value) if tensor is None else tensor

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
            if target is not None and value not in self._tensors and target not in self._known:
                # A free tensor (say, torch.zeros) that an earlier stage wrote into.
                self._tensors[value] = target
                self._known.learn(target, value)
                if value in self._received:
                    target.copy_(self._received[value])
        if isinstance(entry, TensorMeta):
            return self._tensor(node, 0, entry, tensors)
        if isinstance(entry, Parcel):
            return self._open(node, entry, tensors, objects)
        spec, leaves = entry
        filled, i = [], 0
        for leaf in leaves:
            if isinstance(leaf, TensorMeta):
                filled.append(self._tensor(node, i, leaf, tensors))
                i += 1
            else:
                filled.append(leaf.value)
        return tree.unflatten(filled, spec.spec)

    def _tensor(self, node: Node, i: int, meta: TensorMeta, tensors: list[Tensor]) -> Tensor:
        value = node.outputs[i]
        if value < 0:
            return tensors[-1 - value]
        if value not in self._tensors:
            tensor = self._received.get(value)
            name = node.name if node.kind == "call" else str(node)
            self._tensors[value] = Absent(meta, self._device, name) if tensor is None else tensor
            self._known.learn(self._tensors[value], value)
        return self._tensors[value]

    def _open(self, node: Node, parcel: Parcel, tensors: list[Tensor], objects: Snapshot | None) -> Any:
        """Apply the unit's changes of objects to the objects of this stage."""
        assert objects is not None and self._packer is not None
        given = [self._tensor(node, i, meta, tensors) for i, meta in enumerate(parcel.tensors)]
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

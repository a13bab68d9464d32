"""Collect the nodes and values of a call graph while its step runs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Node, Value
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.tensors import KnownTensors, is_strided, tensor_bytes
from lightning_avgpipe.utils.torch_compat import address, version_of

# Functions whose results have a length that depends on numbers, ...
_LENGTHS = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"))
# ... functions that keep such a length, ...
_SAME = frozenset(("squeeze", "flatten", "view", "reshape", "to", "cpu", "long", "int", "detach", "__getitem__"))
# ... and functions that return it.
_TELL = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel))  # type: ignore[attr-defined]


class Questions:
    """A record of the values of one step whose length depends on numbers."""

    def __init__(self) -> None:
        self._sized: set[int] = set()  # values whose length depends on numbers

    def asked(self, name: str, inputs: Sequence[int], result: Any) -> bool:
        """Return whether a glue operation on these values gave plain numbers, or as many tensors as numbers tell."""
        if name == "unbind":
            return not self._sized.isdisjoint(inputs)
        return bool(inputs) and any(isinstance(leaf, (bool, int, float)) for leaf in tree.flatten(result)[0])

    def told(self, func: Any, inputs: Sequence[int]) -> bool:
        """Return whether a function that reads a description of these values returns a length that depends on data."""
        return func in _TELL and not self._sized.isdisjoint(inputs)

    def note(
        self, name: str, args: Sequence[Any], inputs: Sequence[int], masks: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Note an operation, in case the length of its results depends on numbers.

        Args:
            name: name of the function.
            args: arguments of the function.
            inputs: values among the arguments.
            masks: values among the arguments after the first that are boolean tensors.
            outputs: values that the function returned.
        """
        new = name in _LENGTHS or (name == "where" and len(args) == 1) or (name == "__getitem__" and masks)
        if (new and inputs) or (name in _SAME and not self._sized.isdisjoint(inputs)):
            self._sized.update(outputs)


class Values:
    """All values of a graph, in the order in which they were made.

    Args:
        known: record of which tensor holds which value.

    Attributes:
        all: values so far.
    """

    def __init__(self, known: KnownTensors[int]) -> None:
        self._known = known
        self.all: list[Value] = []
        self._storages: dict[int, int] = {}
        self._held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique

    def of(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the values that these tensors hold."""
        found = (self._known.value_of(t) for t in tensors)
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def given(self, tensors: Sequence[Tensor], taken: Sequence[Tensor], name: str) -> tuple[int, ...]:
        """Return the outputs, see :attr:`Node.outputs`, of a node of this name that took and returned these tensors."""
        outputs = []
        for tensor in tensors:
            value = self._known.own_value_of(tensor)
            if value is None:
                same = next((i for i, t in enumerate(taken) if t is tensor), None)
                value = -1 - same if same is not None else self._new(tensor, name)
            outputs.append(value)
        return tuple(outputs)

    def written(
        self, taken: Sequence[Tensor], versions: Sequence[int], owned: Container[int], name: str
    ) -> tuple[tuple[int, int, bool], ...]:
        """Return the writes, see :attr:`Node.writes`, of a node of this name.

        Args:
            taken: tensors that it took.
            versions: version counters of these tensors before the node ran.
            owned: ids of the tensors whose uses are known by name.
            name: name of the node.
        """
        writes: list[tuple[int, int, bool]] = []
        for i, (tensor, version) in enumerate(zip(taken, versions, strict=False)):
            if version_of(tensor) == version:
                continue
            for target, base in ((tensor, False), (tensor._base, True)):
                if target is not None and id(target) not in owned:
                    value = self._known.own_value_of(target)
                    writes.append((i, self._new(target, name) if value is None else value, base))
        return tuple(dict.fromkeys(writes))

    def _new(self, tensor: Tensor, name: str) -> int:
        index = len(self.all)
        storage = self._storages.setdefault(address(tensor), len(self._storages))
        self.all.append(
            Value(
                index, name, tuple(tensor.shape), str(tensor.dtype), tensor_bytes(tensor),
                tensor.requires_grad, storage, is_strided(tensor),
            )
        )  # fmt: skip
        self._held.append(tensor)
        self._known.learn(tensor, index)
        return index


ANYWHERE = sys.maxsize  # stands for the last node of a range
Pin = tuple[int, int, str]  # first and last position where no cut may lie, and the reason


class Draft:
    """A call graph under construction.

    Attributes:
        nodes: nodes so far, in program order.
        values: values that flow between the nodes.
        kept: values that are needed at the end of the step.
        resident: units that are nodes whatever their arguments are.
        readers: units that find values in objects only, not in their arguments.
        pinned: ranges where no cut may lie, see :attr:`CallGraph.pinned`.
        questions: record of where the step learns numbers of values.
    """

    def __init__(self, known: KnownTensors[int], readers: Collection[str]) -> None:
        self.nodes: list[Node] = []
        self.values = Values(known)
        self.kept: set[int] = set()
        self.resident, self.readers = set(readers), set(readers)
        self.pinned: list[Pin] = []
        self.questions = Questions()

    def position(self) -> int:
        """Return the number of nodes so far."""
        return len(self.nodes)

    def pin(self, begin: int, end: int, reason: str) -> None:
        """Forbid cuts at the positions ``begin .. end``."""
        self.pinned.append((begin, end, reason))

    def add(
        self,
        node: Node,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        versions: Sequence[int],
        owned: Container[int],
    ) -> None:
        """Add a node that returned ``given`` and may have written into the tensors ``taken`` of these ``versions``."""
        writes = self.values.written(taken, versions, owned, node.name)
        self.nodes.append(replace(node, outputs=self.values.given(given, taken, node.name), writes=writes))

    def told(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note that the step has read a description of tensors, which may depend on numbers of values."""
        if self.questions.told(func, self.values.of(tensors)):
            self.nodes[-1] = replace(self.nodes[-1], asks=True)

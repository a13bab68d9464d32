"""Number the values that nodes return while a step is recorded."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from lightning_avgpipe.capture.graph import Value
from lightning_avgpipe.capture.known_tensors import KnownTensors
from lightning_avgpipe.utils.tensors import is_strided, tensor_bytes
from lightning_avgpipe.utils.torch_compat import address, version_of


class Values:
    """All values of a graph, in the order in which they were made.

    Args:
        known: record of which tensor holds which value.

    Attributes:
        all: values so far.
    """

    def __init__(self, known: KnownTensors) -> None:
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

"""Count what the forwards of a step keep for their backwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.utils.torch_compat import storage_id


class SavedTensors:
    """The tensors that nodes save in one run of a step: values by index, everything else in bytes.

    Args:
        num_nodes: number of nodes in the step.
        resident: tensors that are in memory in any case, such as weights.

    Attributes:
        internal: for each node the bytes that only this node saves.
        values: indices of the values that any node saves.
    """

    def __init__(self, num_nodes: int, resident: Iterable[Tensor]) -> None:
        self.internal = [0] * num_nodes
        self.values: set[int] = set()
        self._resident = {storage_id(tensor) for tensor in resident}
        self._homes: dict[int, tuple[Tensor, int]] = {}  # storage -> (tensor that keeps it alive, value)

    def learn(self, tensor: Tensor, value: int) -> None:
        """Note that a tensor of the step is this value."""
        self._homes.setdefault(storage_id(tensor), (tensor.detach(), value))

    def value_in(self, tensor: Tensor) -> int | None:
        """Return the value that lies in a tensor's storage; None if there is none."""
        home = self._homes.get(storage_id(tensor))
        return None if home is None else home[1]

    def count(
        self,
        node: Node,
        module: nn.Module | None,
        kept: Sequence[Tensor],
        outputs: Sequence[Tensor],
        aliases: dict[int, int | None],
    ) -> None:
        """Note what the forward of a node has saved.

        Args:
            node: node that ran.
            module: the called module, if the node is a call.
            kept: the saved tensors.
            outputs: tensors that the node returned.
            aliases: storage -> value, of the copies that the node was given.
        """
        own = {storage_id(t): value for t, value in zip(outputs, node.outputs, strict=True) if value >= 0}
        visitors = {storage_id(t) for t in tensors_of(module)} if module is not None else set()
        inside: dict[int, int] = {}
        for tensor in kept:
            storage = storage_id(tensor)
            if storage in visitors or storage in self._resident:
                continue
            value = aliases.get(storage)
            value = own.get(storage) if value is None else value
            if value is not None:
                self.values.add(value)
            else:
                inside[storage] = _nbytes(tensor)
        self.internal[node.index] = sum(inside.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def _nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()

"""Find out, while a step is captured, which stages need which tensors of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Leaf
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors, tensor_bytes


def leaf_names(batch: Any) -> tuple[str, ...]:
    """Return the names of the tensors of a batch; two batches with the same names have the same structure."""
    return tuple(name for name, leaf in tree.flatten_with_names(batch)[0] if isinstance(leaf, Tensor))


class BatchUse:
    """A record of which nodes, and which free glue (glue that every stage executes), use the tensors of one batch.

    A stage that does not receive a tensor has an :class:`~lightning_avgpipe.utils.placeholder.Absent` in its place.
    Whether an operation accepts such a stand-in is found out by calling it with one.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device or torch.device("cpu")
        self._leaves: list[Leaf] = []
        self._origins = KnownTensors[frozenset[int]]()

    def begin(self, batch: Any) -> None:
        """Start to follow the tensors of the batch, before the step runs on it."""
        tensors = tree.tensors(batch)
        for i, (name, tensor) in enumerate(zip(leaf_names(batch), tensors, strict=True)):
            self._leaves.append(Leaf(name, tensor_bytes(tensor)))
            self._origins.learn(tensor, frozenset((i,)))

    def leaves(self) -> tuple[Leaf, ...]:
        """Return the tensors of the batch, with all uses so far."""
        return tuple(self._leaves)

    # -- uses ---------------------------------------------------------------------------------------------------------

    def is_passed_on(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether a function only makes views or copies of the batch's tensors, so that it accepts stand-ins."""
        if not self._of(tensors):
            return False
        try:
            result = func(*tree.map_tensors(self._absent, args), **tree.map_tensors(self._absent, kwargs))
        except Exception:  # the function computes, or reads numbers
            return False
        leaves = tree.flatten(result)[0]
        return bool(leaves) and all(isinstance(leaf, Absent) for leaf in leaves)

    def passed_on(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note that these results are views or copies of tensors of the batch."""
        origin = self._of(tensors)
        for result in results:
            self._origins.learn(result, origin)

    def computed(self, tensors: Sequence[Tensor], position: int) -> None:
        """Note that free glue or a free unit computes with these tensors before the node at this position."""
        for i in self._of(tensors):
            if self._leaves[i].free_use is None:
                self._leaves[i] = replace(self._leaves[i], free_use=position)

    def taken(self, tensors: Sequence[Tensor], node: int) -> None:
        """Note that a node takes these tensors."""
        for i in self._of(tensors):
            self._leaves[i] = replace(self._leaves[i], nodes=tuple(dict.fromkeys((*self._leaves[i].nodes, node))))

    def needed_by_result(self, tensors: Sequence[Tensor]) -> None:
        """Note that the result of the step, ``self.log`` or a metric needs these tensors."""
        for i in self._of(tensors):
            self._leaves[i] = replace(self._leaves[i], needed_by_result=True)

    def knows(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether any of these is a tensor of the batch, or a view or copy of one."""
        return bool(self._of(tensors))

    def _of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Return the indices of the batch's tensors that these tensors are, or are views or copies of."""
        known = (self._origins.own_value_of(one) for t in tensors for one in (t, t._base) if one is not None)
        return frozenset[int]().union(*(found for found in known if found is not None))

    def _absent(self, tensor: Tensor) -> Tensor:
        if not self._of([tensor]):
            return tensor
        return Absent.of_batch(TensorMeta.of(tensor), self._device, "the batch")

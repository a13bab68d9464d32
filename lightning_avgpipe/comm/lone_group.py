"""A process group of one process, whose collectives return at once with this process's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Tensors = Sequence[Tensor]


_Group: Any = dist.ProcessGroup  # its stubs know neither this constructor nor the methods that Python calls


class LoneGroup(_Group):  # type: ignore[misc]
    """A process group that ``torch.distributed`` uses where rank 0 is the only process. It opens no connection.

    A sum or a mean over processes leaves its tensor as it is; a gathered list has one item.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    def getBackendName(self) -> str:
        """Return a name for messages."""
        return "lone"

    def new_group(self, ranks: Any, **options: Any) -> LoneGroup:
        """Return a group of some processes of this group, which can only be this process."""
        return LoneGroup()

    # -- nothing to do ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> _Done:
        return _Done()

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        return None

    # -- what comes in goes out ---------------------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        return _copied(outputs, inputs)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = alltoall

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Done:
        return _copied([first for first, *_ in outputs], inputs)

    gather = allgather

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Done:
        return _copied(outputs, [first for first, *_ in inputs])

    reduce_scatter = scatter

    def alltoall_base(self, output: Tensor, given: Tensor, *args: Any, opts: Any = None) -> _Done:
        return _copied([output], [given.reshape(output.shape)])

    _allgather_base = _reduce_scatter_base = alltoall_base


class _Done:
    """The work of an asynchronous collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _copied(outputs: Tensors, inputs: Tensors) -> _Done:
    for output, given in zip(outputs, inputs, strict=True):
        output.copy_(given)
    return _Done()

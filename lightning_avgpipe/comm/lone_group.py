"""A process group of one process: every collective gives at once what this process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Tensors = Sequence[Tensor]


_Group: Any = dist.ProcessGroup  # whose stubs know neither this constructor nor what Python calls


class LoneGroup(_Group):  # type: ignore[misc]
    """What ``torch.distributed`` calls for its functions, where rank 0 is all there is. It opens no connection.

    Sums and means over processes are what they were; what is gathered is a list of one.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    def getBackendName(self) -> str:
        """A name for messages."""
        return "lone"

    def new_group(self, ranks: Any, **options: Any) -> LoneGroup:
        """Some of the processes of this group, that is this one."""
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
    """What an asynchronous collective returns: it has ended."""

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

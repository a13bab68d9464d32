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

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    def reduce(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    def broadcast(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    def barrier(self, opts: Any = None) -> _Done:
        return _Done()

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        return None

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Done:
        return _copied([first for first, *_ in outputs], inputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Done:
        return self.allgather(outputs, inputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Done:
        return _copied([output], [given.reshape(output.shape)])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        return _copied(outputs, inputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Done:
        return _copied(outputs, [first for first, *_ in inputs])

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Done:
        return self.scatter(outputs, inputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Done:
        return self._allgather_base(output, given)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        return _copied(outputs, inputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        return _copied(outputs, inputs)

    def alltoall_base(self, output: Tensor, given: Tensor, *args: Any) -> _Done:
        return self._allgather_base(output, given)


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

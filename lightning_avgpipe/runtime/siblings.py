"""Siblings: the processes that host the same stages in every group, each with other parallel models.

::

    group 0     stage 0 on rank 1     stage 1 on rank 0
    group 1     stage 0 on rank 3     stage 1 on rank 2
                siblings 1 and 3      siblings 0 and 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.runtime.collectives import Collectives
from lightning_avgpipe.runtime.frame import as_bytes

__all__ = ["Siblings"]

_BUCKET_BYTES = 64 * 1024**2


class Siblings:
    """What siblings do together with tensors on their devices, in few large messages.

    Args:
        members: connected on host and device, or ``on_host`` only; the first of them is in group 0.
        number: of this process's group.
        on_host: whether tensors meet on the host, as those of processes that share a device must.
    """

    def __init__(self, members: Collectives, number: int, on_host: bool = False) -> None:
        self.members = members
        self.number = number
        self._on_host = on_host

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.members.world_size

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the groups. All siblings get the same bits.

        Args:
            tensors: the same shapes and types on all siblings.
        """
        for bucket in _buckets(tensors):
            self._exchange(bucket, "a sum over groups", self._summing)

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Take over, in place, what the sibling in group 0 has. Arguments as of :meth:`sum`."""
        for bucket in _buckets(tensors):
            self._exchange(bucket, "a copy of group 0's parameters", self._copying)

    def total(self, count: int) -> int:
        """The sum of a number over the groups."""
        return int(self.members.sum(torch.tensor(count)))

    def _exchange(self, bucket: Sequence[Tensor], what: str, collective: Callable[[Tensor], object]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sent = torch.view_as_real(flat) if flat.is_complex() else flat
        met = sent.cpu() if self._on_host else sent
        self.members.together(what, lambda: collective(met))
        if met is not sent:
            sent.copy_(met)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _summing(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self.members.control)

    def _copying(self, flat: Tensor) -> None:
        dist.broadcast(as_bytes(flat), self.members.ranks[0], group=self.members.control)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of the same type, together of a size that is worth a message, and no more than memory has room for."""
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_type[tensor.dtype].append(tensor)
    for alike in by_type.values():
        bucket: list[Tensor] = []
        nbytes = 0
        for tensor in alike:
            bucket.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()
            if nbytes >= _BUCKET_BYTES:
                yield bucket
                bucket, nbytes = [], 0
        if bucket:
            yield bucket

"""Replica groups: the processes that host the same stages in several groups.

::

    group 0     stage 0 on rank 1     stage 1 on rank 0
    group 1     stage 0 on rank 3     stage 1 on rank 2
                ranks 1 and 3         ranks 0 and 2

Groups that train other models average these; groups that train the same sum their gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes
from lightning_avgpipe.comm.collectives import Collectives, wait_for

_BUCKET_BYTES = 64 * 1024**2

_Collective = Callable[[Tensor], Any]  # begins, on one tensor


class ReplicaGroup:
    """What the processes of a replica group do together with tensors on their devices, in few large messages.

    Args:
        members: connected on host and device, or ``on_host`` only; the first of them is in the first group.
        number: of this process's group among them.
        on_host: whether tensors meet on the host, as those of processes that share a device must.
    """

    def __init__(self, members: Collectives, number: int, on_host: bool = False) -> None:
        self.members = members
        self._number = number
        self._on_host = on_host

    @property
    def on_host(self) -> bool:
        """Whether tensors meet on the host."""
        return self._on_host

    @property
    def number(self) -> int:
        """Of this process's group among them."""
        return self._number

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.members.world_size

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the groups. All processes get the same bits.

        Args:
            tensors: the same shapes and types on all processes.
        """
        self.begin_sum(tensors)()

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to sum, and go on meanwhile. All processes begin and end their sums in the same order.

        Args:
            tensors: as of :meth:`sum`; not to be touched before the end.
        Returns:
            Ends it: waits for the sums and puts them into the tensors.
        """
        return self._begin(tensors, "a sum over groups", self._all_reduce)

    def settle(self) -> bool:
        """Whether the sums that have begun count: not if a group has left meanwhile. All processes ask for it."""
        return True

    def copy(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Take over, in place, what the process in one of the groups has. Arguments as of :meth:`sum`."""
        self._begin(tensors, f"a copy of the parameters of group {source}", partial(self._broadcast, source))()

    @torch.no_grad()
    def _begin(self, tensors: Sequence[Tensor], what: str, collective: _Collective) -> Callable[[], None]:
        exchanges = [self._exchange(bucket, collective) for bucket in _buckets(tensors)]

        @torch.no_grad()
        def end() -> None:
            for exchange in exchanges:
                wait_for(self.members, exchange.work, what)
                exchange.put()

        return end

    def _exchange(self, bucket: Sequence[Tensor], collective: _Collective) -> _Exchange:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sent = torch.view_as_real(flat) if flat.is_complex() else flat
        met = sent.cpu() if self._on_host else sent
        # gloo and NCCL go on with it in the background
        return _Exchange(bucket, flat, sent, met, collective(met))

    def _all_reduce(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self.members.process_group, async_op=True)

    def _broadcast(self, source: int, flat: Tensor) -> Any:
        group = self.members.process_group
        return dist.broadcast(as_bytes(flat), self.members.ranks[source], group=group, async_op=True)


@dataclass(frozen=True)
class _Exchange:
    """Tensors that are on their way, as one message."""

    tensors: Sequence[Tensor]
    flat: Tensor
    sent: Tensor  # the same, as numbers that every connection knows
    met: Tensor  # the same, where they meet
    work: Any

    def put(self) -> None:
        """Put what has arrived into the tensors."""
        if self.met is not self.sent:
            self.sent.copy_(self.met)
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


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

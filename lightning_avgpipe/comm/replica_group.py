"""Replica groups: the processes that host the same stages in several groups.

::

    group 0     stage 0 on rank 1     stage 1 on rank 0
    group 1     stage 0 on rank 3     stage 1 on rank 2
                ranks 1 and 3         ranks 0 and 2

Groups that train different models average them; groups that train the same models sum their gradients.
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

_Collective = Callable[[Tensor], Any]  # starts a collective on a tensor and returns its work


class ReplicaGroup:
    """The collectives of a replica group on tensors of its devices, in few large messages.

    Args:
        members: processes of the group, connected on host and device, or, if ``on_host``, on the host only. The first
            one is in the first group.
        number: number of this process's group among them.
        on_host: whether tensors are exchanged on the host, as is necessary for processes that share a device.

    Attributes:
        members: as given.
        number: as given.
        on_host: as given.
    """

    def __init__(self, members: Collectives, number: int, on_host: bool = False) -> None:
        self.members = members
        self.number = number
        self.on_host = on_host

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.members.world_size

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the groups, in place. All processes get the same bits.

        Args:
            tensors: tensors of the same shapes and types on all processes.
        """
        self.begin_sum(tensors)()

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to sum without waiting. All processes begin and end their sums in the same order.

        Args:
            tensors: as of :meth:`sum`; not to be read or written before the end.
        Returns:
            A function that waits for the sums and puts them into the tensors.
        """
        return self._begin(tensors, "a sum over groups", self._all_reduce)

    def copy(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy the source group's tensors into those of the other groups. ``tensors`` is as of :meth:`sum`."""
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
        met = sent.cpu() if self.on_host else sent
        # the collective runs in the background
        return _Exchange(bucket, flat, sent, met, collective(met))

    def _all_reduce(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self.members.process_group, async_op=True)

    def _broadcast(self, source: int, flat: Tensor) -> Any:
        group = self.members.process_group
        return dist.broadcast(as_bytes(flat), self.members.ranks[source], group=group, async_op=True)


@dataclass(frozen=True)
class _Exchange:
    """A bucket of tensors that is being exchanged as one message."""

    tensors: Sequence[Tensor]
    flat: Tensor
    sent: Tensor  # flat as real numbers, which every backend knows
    met: Tensor  # sent on the device on which the collective runs
    work: Any

    def put(self) -> None:
        """Copy the result of the collective into the tensors."""
        if self.met is not self.sent:
            self.sent.copy_(self.met)
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of tensors of the same type, large enough for a message and small enough for memory."""
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

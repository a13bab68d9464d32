"""Share values between the processes of a group that run the same program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message, pack, unpack
from lightning_avgpipe.comm.topology import subsets
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.source import source_line


class Exchange:
    """A connection of processes that run the same program and share values at the same places in it.

    Before anything is sent the processes compare where they are. If they have diverged, all of them raise an error at
    once, and none waits for a value that is never sent.

    Args:
        cluster: cluster of the processes. Every process must construct the exchange at the same time.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._number = 0
        ranks = range(cluster.group.world_size)
        connected = cluster.connect(subsets(cluster.stage_map, ranks), "once more for values of steps")
        assert connected is not None
        self._group = connected.process_group

    @property
    def rank(self) -> int:
        """The rank of this process in its group."""
        return self._cluster.rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._cluster.device

    def share(self, what: str, source: int, item: Any = None) -> Any:
        """Send the source's item to every process, tensors without history. Every process must call this.

        Args:
            what: description of the place, equal on every process that has not diverged.
            source: rank of the sender in the group.
            item: any tree of tensors and picklable leaves; ignored on other processes.
        Raises:
            StepChangedError: the processes are at different places.
        """
        self._number += 1
        cluster, place = self._cluster, f"{self._number} {what} {source}"
        mine = source == cluster.rank
        message = pack(item) if mine else Message(0, ())
        tensors = tree.tensors(message.tensors)
        forms = [TensorForm.of(tensor) for tensor in tensors]
        told = cluster.group.exchange_objects((place, forms, message.entries), what)
        if any(other != place for other, *_ in told):
            self._refuse(what)
        _, forms, entries = told[source]
        arrived: list[Tensor] = []
        if forms:
            cluster.group.together(what, lambda: arrived.extend(self._broadcast(source, forms, tensors)))
        return item if mine else unpack(Message(0, tuple(arrived), (), entries))

    def _broadcast(self, source: int, forms: Sequence[TensorForm], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Send the tensors of the source to every process, and yield them."""
        cluster = self._cluster
        for i, form in enumerate(forms):
            if source == cluster.rank:
                wired = form.on_wire(tensors[i]).contiguous()
            else:
                device = "cpu" if form.on_host else cluster.device
                wired = torch.empty(form.wire_shape, dtype=form.dtype, device=device)
            if not form.is_empty:
                dist.broadcast(as_bytes(wired), cluster.group.ranks[source], group=self._group)
            yield form.from_wire(wired)

    def _refuse(self, what: str) -> None:
        places = self._cluster.group.exchange_objects(f"{what} (number {self._number}) at {source_line()}")
        ways = "; ".join(f"rank {self._cluster.group.ranks[r]} came to {place}" for r, place in enumerate(places))
        raise StepChangedError(
            f"the processes have taken different ways: {ways}. All of them run the same steps and hooks, and must call "
            "the same submodules: a condition on the rank, the time or a random number of another generator leads apart"
        )

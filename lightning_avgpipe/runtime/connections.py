"""Connections: the process groups of torch.distributed that join the processes of a mesh.

Every process takes part in making every connection, in the same order, also of those whose member it is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Connections"]

_GRACE = timedelta(seconds=60)
_NEVER_SENT = 99  # a tag of transfers


class Connections:
    """Connects the processes of each group alike; ranks are those within a group.

    Args:
        layout: the ranks of each group among all processes.
        number: of this process's group.
        rank: of this process among all.
        timeout: longest wait for another process.
        device_backend: backend between devices, such as "nccl"; None if all goes over the host.

    Attributes:
        both: backend of connections for tensors on the host and on devices.
    """

    def __init__(
        self,
        layout: Sequence[Sequence[int]],
        number: int,
        rank: int,
        timeout: timedelta,
        device_backend: str | None = None,
    ) -> None:
        self.both = f"cpu:gloo,cuda:{device_backend}" if device_backend else "gloo"
        self._layout = layout
        self._number = number
        self._rank = rank
        self._timeout = timeout + _GRACE  # our own waits end first: their errors name stage and action
        self._device_backend = None if device_backend == "gloo" else device_backend
        self._on_hosts: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._on_devices: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._ours: list[dist.ProcessGroup] = []  # in which the host may wait

    def connect(self, kind: str, a: int, b: int, devices: bool = False) -> None:
        """Connect two processes for messages of a kind, unless they are.

        Args:
            kind: name; messages of several kinds do not wait for each other.
            a: the one.
            b: the other.
            devices: whether tensors travel between devices, where these have a backend.
        """
        key = kind, a, b
        if key in self._on_hosts:
            return
        self._on_hosts[key] = self.join_in_each((a, b))
        if devices and self._device_backend is not None:
            self._on_devices[key] = self.join_in_each((a, b), self._device_backend)

    def on_host(self, kind: str, a: int, b: int) -> dist.ProcessGroup:
        """What :meth:`connect` has made for tensors on the host."""
        return self._on_hosts[kind, a, b]

    def on_devices(self, kind: str, a: int, b: int) -> dist.ProcessGroup | None:
        """The same for tensors on devices; None where these travel over the host."""
        return self._on_devices.get((kind, a, b))

    def subset(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Connect some processes for collectives among them, unless they are."""
        key = tuple(ranks)
        if key not in self._subsets:
            self._subsets[key] = self.join_in_each(key, self.both)
        return self._subsets[key]

    def join_in_each(self, ranks: Iterable[int], backend: str = "gloo") -> dist.ProcessGroup:
        """Connect the same ranks of each group; gives the connection of one's own."""
        ranks = tuple(ranks)
        return [self.join([group[r] for r in ranks], backend) for group in self._layout][self._number]

    def join(self, ranks: Iterable[int], backend: str = "gloo") -> dist.ProcessGroup:
        """Connect processes by their ranks among all."""
        members = list(ranks)
        made = dist.new_group(members, timeout=self._timeout, backend=backend)
        if self._rank in members and backend != self._device_backend:
            self._ours.append(made)
        return made

    def disconnect(self) -> None:
        """End the transfers that wait in threads; nothing can be sent any more.

        gloo has no way to give one up, but closes all connections of a group when a transfer in it takes too long.
        """
        for group in self._ours:
            for peer in dist.get_process_group_ranks(group):
                if peer != self._rank:
                    with contextlib.suppress(RuntimeError):  # this is the purpose
                        nothing = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
                        if nothing is not None:
                            nothing.wait(timedelta(milliseconds=1))

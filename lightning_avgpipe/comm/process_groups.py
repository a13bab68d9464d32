"""Process groups: what joins the processes of a mesh, pairs of them for messages and groups of them for collectives.

On the host both are gloo's. Everything that a process connects there shares one listening socket and the thread that
serves it, those of torch's group of all processes. A process has the connections of one mesh at a time: the next mesh
closes those of the one before, so their number does not grow with the number of trainers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_avgpipe.comm.alone import own_group
from lightning_avgpipe.utils.device import backends

__all__ = ["Pair", "ProcessGroups"]

_GRACE = timedelta(seconds=60)
_NEVER_SENT = 99  # a tag of transfers
_HOST = "avgpipe_gloo"  # backend of groups on the host

_current: ProcessGroups | None = None  # of this process
_numbers = itertools.count()  # of what was opened; the same on all processes, which open in the same order


@dataclass(frozen=True)
class Pair:
    """A connection of two processes.

    Attributes:
        group: of gloo, or of torch.distributed.
        peer: number of the other process in it.
    """

    group: Any
    peer: int


class ProcessGroups:
    """Connects the processes of each group alike; ranks are those within a group.

    Args:
        layout: the ranks of each group among all processes.
        number: of this process's group.
        rank: of this process among all.
        timeout: longest wait for another process.
        device_backend: backend between devices, such as "nccl"; None if all goes over the host.
    """

    def __init__(
        self,
        layout: Sequence[Sequence[int]],
        number: int,
        rank: int,
        timeout: timedelta,
        device_backend: str | None = None,
    ) -> None:
        self._both = backends(_HOST, device_backend) if device_backend else _HOST
        self._layout = layout
        self._number = number
        self._rank = rank
        self._timeout = timeout + _GRACE  # our own waits end first: their errors name stage and action
        self._device_backend = None if device_backend == "gloo" else device_backend
        self._opened: int | None = None
        self._store: dist.Store | None = None
        self._on_hosts: dict[tuple[str, int, int], Pair] = {}
        self._on_devices: dict[tuple[str, int, int], Pair] = {}
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._groups: list[dist.ProcessGroup] = []  # of torch.distributed
        self._ours: list[Any] = []  # in which the host may wait: group, and its ranks

    @property
    def is_open(self) -> bool:
        """Whether it may connect."""
        return self._opened is not None

    def open(self) -> None:
        """Begin to connect, in the place of other connections of this process. Every process calls it."""
        global _current
        if _current is not None and _current is not self:
            _current.close()
        _current = self
        self._opened = next(_numbers)
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, where torch can make one: who connects may wait in the store for long
        store = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"avgpipe/connections/{self._opened}", store)

    def close(self) -> None:
        """Give up all connections, on which nothing is under way. They may be opened again."""
        global _current
        for group in self._groups:
            with contextlib.suppress(ValueError):  # torch.distributed has been ended meanwhile
                dist.destroy_process_group(group)
        for kept in (self._on_hosts, self._on_devices, self._subsets):
            kept.clear()
        self._groups, self._ours, self._opened, self._store = [], [], None, None
        if _current is self:
            _current = None

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
        self._on_hosts[key] = self.pair(kind, *(self._layout[self._number][rank] for rank in (a, b)))
        if devices and self._device_backend is not None:
            group = self._join_in_each((a, b), self._device_backend)
            self._on_devices[key] = Pair(group, int(self._layout[self._number][a] == self._rank))

    def on_host(self, kind: str, a: int, b: int) -> Pair:
        """What :meth:`connect` has made for tensors on the host."""
        return self._on_hosts[kind, a, b]

    def on_devices(self, kind: str, a: int, b: int) -> Pair | None:
        """The same for tensors on devices; None where these travel over the host."""
        return self._on_devices.get((kind, a, b))

    def subset(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Connect some processes for collectives among them, unless they are."""
        key = tuple(ranks)
        if key not in self._subsets:
            self._subsets[key] = self._join_in_each(key, self._both)
        return self._subsets[key]

    def pair(self, kind: str, a: int, b: int) -> Pair:
        """Connect two processes on the host by their ranks among all; elsewhere this does nothing."""
        position = (a, b).index(self._rank) if self._rank in (a, b) else None
        if position is None:
            return Pair(None, -1)
        assert self._store is not None
        made = _gloo(dist.PrefixStore(f"{kind}/{a}/{b}", self._store), position, 2, self._timeout, threads=0)
        self._ours.append((made, 2))
        return Pair(made, 1 - position)

    def join_in_each(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """Connect the same ranks of each group on the host; gives that of one's own. Every process calls it."""
        return self._join_in_each(tuple(ranks), _HOST)

    def _join_in_each(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        return [self._join([group[r] for r in ranks], backend) for group in self._layout][self._number]

    def join(self, ranks: Iterable[int], on_host: bool = True) -> dist.ProcessGroup:
        """Connect processes by their ranks among all, ``on_host`` only or also on devices. Every process calls it."""
        return self._join(ranks, _HOST if on_host else self._both)

    def _join(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        members = list(ranks)
        _register()
        made = own_group(dist.new_group(members, timeout=self._timeout, backend=backend))
        if self._rank in members:
            self._groups.append(made)
            if backend != self._device_backend:
                self._ours.append((made, len(members)))
        return made

    def disconnect(self) -> None:
        """End the transfers that wait in threads; nothing can be sent any more.

        gloo has no way to give one up, but closes all connections of a group when a transfer in it takes too long.
        """
        for group, size in self._ours:
            for peer in range(size):
                if peer != group.rank():
                    with contextlib.suppress(RuntimeError):  # this is the purpose
                        group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


# -- gloo ------------------------------------------------------------------------------------------------------------


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, threads: int = 2) -> Any:
    """Connect over the devices of this process. Collectives run in threads; messages need none."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know all of it
    options: Any = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, _devices(), threads
    return gloo(store, rank, size, options)


def _devices() -> list[Any]:
    """Those of torch's group of all processes, if it connects hosts; a device of gloo is a network interface."""
    try:
        default: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return list(default.options._devices)
    except (RuntimeError, AttributeError):  # it connects devices only, or in another way
        return [_own_device()]


@functools.cache
def _own_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


@functools.cache
def _register() -> None:
    dist.Backend.register_backend(_HOST, _gloo, devices=["cpu"])

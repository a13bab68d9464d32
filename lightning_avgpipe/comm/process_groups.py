"""Process groups: a network of torch, pairs of processes for messages and groups of them for collectives.

On the host both are gloo's. Everything that a process connects there shares one listening socket and the thread that
serves it, those of torch's group of all processes. A process has the connections of one network at a time: the
next one closes those of the one before, so their number does not grow with the number of trainers.
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
from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.network_channel import NetworkInbox, NetworkOutbox, Receiver, Sender
from lightning_avgpipe.comm.routes import Edge, Party, Route
from lightning_avgpipe.comm.wire import Pair, Wire
from lightning_avgpipe.utils.device import backends, first_options
from lightning_avgpipe.utils.torch_compat import default_store

_GRACE = timedelta(seconds=60)
_NEVER_SENT = 2**30  # a tag of transfers; those of channels count from 0
_HOST = "avgpipe_gloo"  # backend of groups on the host

_current: ProcessGroups | None = None  # of this process
# the same on all processes, which do the same in order
_networks, _openings, _runs = itertools.count(), itertools.count(), itertools.count()


@dataclass
class _Line:
    """From one process to another.

    Attributes:
        on_host: the connection there.
        between: that of the devices; None if no tensors of stages go this way, or over the host.
        openings: how often it was in use.
        end: of this process, if channels are open, or were.
    """

    on_host: Pair
    between: Pair | None = None
    openings: int = 0
    end: Sender | Receiver | None = None


class ProcessGroups:
    """Connects processes by their ranks among all.

    Args:
        rank: of this process.
        device: of this process.
        timeout: longest wait for another process.
        device_backend: backend between devices, such as "nccl"; None if all goes over the host.
    """

    wire_type: type[Wire] = Wire

    def __init__(self, rank: int, device: torch.device, timeout: timedelta, device_backend: str | None = None) -> None:
        self._both = backends(_HOST, device_backend, device) if device_backend else _HOST
        self._number = next(_networks)
        self._run = 0
        self._rank = rank
        self._all: tuple[int, ...] | None = None  # the processes of torch's group; None: each by its rank
        self._common: dist.Store | None = None  # in which parties meet; None: in that of torch's group
        self._device = device
        self._timeout = timeout + _GRACE  # our own waits end first: their errors name stage and action
        self._device_backend = None if device_backend == "gloo" else device_backend
        self._store: dist.Store | None = None
        self._opening: str | None = None
        self._lines: dict[tuple[int, int], _Line] = {}  # from one process to another
        self._parties: dict[Party, dist.ProcessGroup] = {}
        self._groups: list[dist.ProcessGroup] = []  # of torch.distributed
        self._ours: list[Any] = []  # in which the host may wait: group, and its ranks

    @property
    def is_open(self) -> bool:
        """Whether it may connect."""
        return self._store is not None

    def run_store(self, store: dist.Store | None) -> dist.Store:
        """What the next run has of a store; None: that of torch.distributed."""
        self._run = next(_runs)
        return self.this_run_store(store)

    def this_run_store(self, store: dist.Store | None) -> dist.Store:
        """The same for the run that goes on."""
        return _part_of(store, f"runs/{self._run}")

    def lasting_store(self, store: dist.Store | None) -> dist.Store:
        """What all runs with this network have of a store."""
        return _part_of(store, f"networks/{self._number}")

    def visiting_store(self, store: dist.Store | None) -> dist.Store:
        """What processes have of it that come later, and do not know how many networks and runs there were."""
        return _part_of(store, "visits")

    @property
    def is_first(self) -> bool:
        """Whether this is the first network of this process, in its first run."""
        return self._number == self._run == 0

    def stand_apart(self, ranks: Sequence[int]) -> None:
        """torch's group of all processes is about to have these only, of which this process is one."""
        self._all = tuple(ranks)

    def meet_in(self, store: dist.Store) -> None:
        """From now on parties meet there, since torch's groups of all processes are not the same."""
        self._common = store

    def open(self) -> None:
        """Begin to connect, in the place of other connections of this process. Every process calls it."""
        global _current
        if _current is not None and _current is not self:
            _current.close()
        _current = self
        self._opening = f"connections/{next(_openings)}"
        self._store = _part_of(None, self._opening)

    def close(self) -> None:
        """Give up all connections, on which nothing is under way. They may be opened again."""
        global _current
        for group in self._groups:
            with contextlib.suppress(ValueError):  # torch.distributed has been ended meanwhile
                dist.destroy_process_group(group)
        self._lines.clear()
        self._parties.clear()
        self._groups, self._ours, self._store = [], [], None
        if _current is self:
            _current = None

    def connect(self, route: Route) -> None:
        """Connect the ends of a route, unless they are; those of stages also between devices that have a backend."""
        ends = route.source, route.target
        line = self._lines.get(ends)
        if line is None:
            line = self._lines[ends] = _Line(self._pair(ends))
        if self._device_backend is not None and line.between is None and isinstance(route.what, Edge):
            ranks = sorted(ends)
            line.between = Pair(self._join(ranks, self._device_backend), int(ranks[0] == self._rank))

    def join(self, party: Party) -> None:
        """Connect a party, on the host only or also between devices, unless it is."""
        if party not in self._parties:
            self._parties[party] = self._join(party.ranks, _HOST if party.on_host else self._both)

    def meet(self, party: Party, name: str) -> Any:
        """Connect a party on the host, under a name of its own. Only its members call it."""
        assert self._opening is not None
        opening = self._opening if self._common is None else "all"
        store = _part_of(self._common, f"{opening}/meetings/{party}/{name}")
        made = _gloo(store, party.ranks.index(self._rank), len(party.ranks), self._timeout)
        self._ours.append((made, len(party.ranks)))
        return made

    def part(self, group: Any) -> None:
        """Close the connections of such a party; what is under way there ends with an error."""
        for made, size in self._ours:
            if made is group:
                _break(made, size)
        self._ours = [(made, size) for made, size in self._ours if made is not group]

    def outbox(self, route: Route, arrivals: Arrivals) -> NetworkOutbox:
        """Open the sending end of a route."""
        line = self._lines[route.source, route.target]
        if not isinstance(line.end, Sender) or not line.end.routes:
            line.end = Sender(self.wire(route, arrivals), arrivals)
        return NetworkOutbox(route, line.end)

    def inbox(self, route: Route, arrivals: Arrivals) -> NetworkInbox:
        """Open the receiving end of a route."""
        line = self._lines[route.source, route.target]
        if not isinstance(line.end, Receiver) or not line.end.routes:
            line.end = Receiver(self.wire(route, arrivals), arrivals)
        return NetworkInbox(route, line.end)

    def wire(self, route: Route, arrivals: Arrivals) -> Wire:
        """This process's end of the connection for a route, for as long as it has channels."""
        peer = route.target if route.source == self._rank else route.source
        line = self._lines[route.source, route.target]
        line.openings += 1
        return self.wire_type(peer, line.on_host, self._device, line.between, arrivals.moved, line.openings - 1)

    def group(self, party: Party) -> dist.ProcessGroup:
        """What connects a party."""
        return self._parties[party]

    def _pair(self, ends: tuple[int, int]) -> Pair:
        """Connect two processes on the host; elsewhere this does nothing."""
        if self._rank not in ends:
            return Pair(None, -1)
        position = ends.index(self._rank)
        assert self._store is not None
        store = dist.PrefixStore("{}/{}".format(*ends), self._store)
        made = _gloo(store, position, 2, self._timeout, threads=0)
        self._ours.append((made, 2))
        return Pair(made, 1 - position)

    def _join(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        members = list(ranks)
        places = members if self._all is None else list(map(self._all.index, members))
        _register()
        options = first_options(backend, self._timeout) if backend == self._device_backend else None
        made = own_group(dist.new_group(places, timeout=self._timeout, backend=backend, pg_options=options))
        if self._rank in members:
            self._groups.append(made)
            if backend != self._device_backend:
                self._ours.append((made, len(members)))
        return made

    def disconnect(self) -> None:
        """End the transfers that wait in threads; nothing can be sent any more.

        gloo has no way to give one up, but closes all connections of a group when a transfer in it takes too long. What
        waits between devices would hold up all that its device does later: it is aborted.
        """
        if self._device_backend is not None:
            for group in self._groups:
                with contextlib.suppress(RuntimeError, AttributeError):  # it has none there, or nothing to abort
                    group._get_backend(self._device).abort()  # type: ignore[attr-defined]
        for group, size in self._ours:
            _break(group, size)


def _break(group: Any, size: int) -> None:
    for peer in range(size):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # this is the purpose
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def _part_of(store: dist.Store | None, name: str) -> dist.Store:
    store = store or default_store()
    # a connection of its own, where torch can make one: who connects may wait in the store for long
    store = store.clone() if hasattr(store, "clone") else store
    return dist.PrefixStore(f"avgpipe/{name}", store)


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

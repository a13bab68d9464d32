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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_avgpipe.comm.alone import own_group
from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.network_channel import NetworkInbox, NetworkOutbox, Receiver, Sender
from lightning_avgpipe.comm.routes import Edge, Party, Route
from lightning_avgpipe.comm.stores import Stores, part_of
from lightning_avgpipe.comm.wire import Pair, Wire
from lightning_avgpipe.utils.device import backends, first_options

_GRACE = timedelta(seconds=60)
_NEVER_SENT = 2**30  # a tag of transfers; those of channels count from 0
_HOST = "avgpipe_gloo"  # backend of groups on the host

_current: ProcessGroups | None = None  # of this process
# the same on all processes, which do the same in order
_networks, _openings, _runs = itertools.count(), itertools.count(), itertools.count()

End = TypeVar("End", Sender, Receiver)


@dataclass(frozen=True)
class _Connected:
    """A group of processes that has been connected.

    Attributes:
        group: of torch.distributed.
        size: of the group, if it connects hosts; else 0.
        of_torch: whether torch.distributed knows of it.
    """

    group: Any
    size: int
    of_torch: bool

    def disconnect(self) -> None:
        """End what waits in threads.

        gloo has no way to give up a transfer, but closes all connections of a group when one takes too long.
        """
        for peer in set(range(self.size)) - {self.group.rank()}:
            with contextlib.suppress(RuntimeError):  # this is the purpose
                self.group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


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

    Attributes:
        stores: of this network.
    """

    wire_type: type[Wire] = Wire

    def __init__(self, rank: int, device: torch.device, timeout: timedelta, device_backend: str | None = None) -> None:
        self.stores = Stores(next(_networks), _runs)
        self._rank = rank
        self._all: tuple[int, ...] | None = None  # the processes of torch's group; None: each by its rank
        self._device = device
        self._timeout = timeout + _GRACE  # our own waits end first: their errors name stage and action
        self._device_backend = device_backend
        self._store: dist.Store | None = None  # of this opening
        self._lines: dict[tuple[int, int], _Line] = {}  # from one process to another
        self._parties: dict[Party, dist.ProcessGroup] = {}
        self._connected: list[_Connected] = []

    @property
    def is_open(self) -> bool:
        """Whether it may connect."""
        return self._store is not None

    def open(self, ranks: Sequence[int] | None = None) -> None:
        """Begin to connect, in the place of other connections of this process. Every process calls it.

        Args:
            ranks: torch's group of all processes has these only, this one among them; None: the same as before.
        """
        global _current
        if _current is not None and _current is not self:
            _current.close()
        self._all = self._all if ranks is None else tuple(ranks)
        _current = self
        self._store = part_of(None, f"connections/{next(_openings)}")

    def close(self) -> None:
        """Give up all connections, on which nothing is under way. They may be opened again."""
        global _current
        for made in self._connected:
            if made.of_torch:
                with contextlib.suppress(ValueError):  # torch.distributed has been ended meanwhile
                    dist.destroy_process_group(made.group)
        self._lines.clear()
        self._parties.clear()
        self._connected, self._store = [], None
        if _current is self:
            _current = None

    def connect(self, route: Route) -> None:
        """Connect the ends of a route, unless they are; those of stages also between devices that have a backend."""
        ends = route.source, route.target
        line = self._lines.get(ends)
        if line is None:
            line = self._lines[ends] = _Line(self._pair(ends))
        if self._between is not None and line.between is None and isinstance(route.what, Edge):
            ranks = sorted(ends)
            line.between = Pair(self._join(ranks, self._between), int(ranks[0] == self._rank))

    def join(self, party: Party) -> None:
        """Connect a party, on the host only or also between devices, unless it is."""
        if party not in self._parties:
            between = None if party.on_host else self._device_backend
            backend = _HOST if between is None else backends(_HOST, between, self._device)
            self._parties[party] = self._join(party.ranks, backend)

    def meet(self, party: Party, name: str) -> Any:
        """Connect a party on the host, under a name of its own. Only its members call it."""
        assert self._store is not None
        store = self.stores.meeting(f"{party}/{name}", self._store)
        made = _gloo(store, party.ranks.index(self._rank), len(party.ranks), self._timeout)
        self._connected.append(_Connected(made, len(party.ranks), of_torch=False))
        return made

    def part(self, group: Any) -> None:
        """Close the connections of such a party; what is under way there ends with an error."""
        for made in [made for made in self._connected if made.group is group]:
            made.disconnect()
            self._connected.remove(made)

    def outbox(self, route: Route, arrivals: Arrivals) -> NetworkOutbox:
        """Open the sending end of a route."""
        return NetworkOutbox(route, self._end(Sender, route, arrivals))

    def inbox(self, route: Route, arrivals: Arrivals) -> NetworkInbox:
        """Open the receiving end of a route."""
        return NetworkInbox(route, self._end(Receiver, route, arrivals))

    def group(self, party: Party) -> dist.ProcessGroup:
        """What connects a party."""
        return self._parties[party]

    @property
    def _between(self) -> str | None:
        """The backend of messages between devices; gloo would go over the host, as they do without one."""
        return None if self._device_backend == "gloo" else self._device_backend

    def _end(self, kind: type[End], route: Route, arrivals: Arrivals) -> End:
        """This process's end of the line for a route."""
        line = self._lines[route.source, route.target]
        if not isinstance(line.end, kind) or not line.end.routes:
            peer = route.target if route.source == self._rank else route.source
            wire = self.wire_type(peer, line.on_host, self._device, line.between, arrivals.moved, line.openings)
            line.openings += 1
            line.end = kind(wire, arrivals)
        return line.end

    def _pair(self, ends: tuple[int, int]) -> Pair:
        """Connect two processes on the host; elsewhere this does nothing."""
        if self._rank not in ends:
            return Pair(None, -1)
        position = ends.index(self._rank)
        assert self._store is not None
        store = dist.PrefixStore("{}/{}".format(*ends), self._store)
        made = _gloo(store, position, 2, self._timeout, threads=0)
        self._connected.append(_Connected(made, 2, of_torch=False))
        return Pair(made, 1 - position)

    def _join(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        members = list(ranks)
        places = members if self._all is None else list(map(self._all.index, members))
        _register()
        options = first_options(backend, self._timeout) if backend == self._between else None
        made = own_group(dist.new_group(places, timeout=self._timeout, backend=backend, pg_options=options))
        if self._rank in members:
            on_host = backend != self._between
            self._connected.append(_Connected(made, len(members) if on_host else 0, of_torch=True))
        return made

    def disconnect(self) -> None:
        """End the transfers that wait in threads; nothing can be sent any more.

        What waits between devices would hold up all that its device does later: it is aborted.
        """
        if self._between is not None:
            for made in self._connected:
                # it has none there, or nothing to abort
                with contextlib.suppress(RuntimeError, AttributeError):
                    made.group._get_backend(self._device).abort()
        for made in self._connected:
            made.disconnect()


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

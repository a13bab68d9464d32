"""Process groups of torch.distributed: pairs of processes for messages, and larger groups for collectives.

On the host both use gloo. All gloo connections of a process share the listening socket of torch's default group, and
the thread that serves it. A process has the connections of one network at a time: opening the next network closes those
of the last one, so their number does not grow with the number of trainers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.alone import own_group
from lightning_avgpipe.comm.line import Line, NetworkInbox, NetworkOutbox, Pair
from lightning_avgpipe.comm.mailbox import Mailbox, meet
from lightning_avgpipe.comm.topology import Edge, Party, Route
from lightning_avgpipe.comm.transfer import UNLIMITED, Arrivals
from lightning_avgpipe.utils.device import backends, port_of, urgent_options
from lightning_avgpipe.utils.torch_compat import default_store

_log = logging.getLogger(__name__)

_ABORTED_S = 5.0  # longest time that the transfers of all groups between devices take to be aborted
_NEVER_SENT = 2**30  # a tag that no transfer has; the tags of channels count from 0
_HOST = "avgpipe_gloo"  # backend of groups on the host

_current: ProcessGroups | None = None  # the open network of this process
# equal on all processes, because they make the same calls in the same order
_openings, _runs = itertools.count(), itertools.count()


class ProcessGroups:
    """The connections of this process through torch.distributed. Ranks are those among all processes.

    All processes call open, connect and join in the same order.

    Args:
        rank: rank of this process.
        device: device of this process.
        timeout: longest time for connecting, and for an exchange between devices that both ends have started. Waits on
            the host are limited elsewhere.
        device_backend: backend between devices, such as "nccl"; None if everything travels over the host.
        shared_memory: whether messages between processes that compute on the CPU of one host travel in mailboxes.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        device_backend: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self._device_backend = device_backend
        self._shares = shared_memory and port_of(device).is_host
        self._store: dist.Store | None = None  # None while the network is closed
        self._lines: dict[tuple[int, int], Line | Mailbox] = {}  # by (source rank, target rank)
        self._mailboxes: dict[int, Mailbox | None] = {}  # by rank of the other process
        self._parties: dict[Party, dist.ProcessGroup] = {}
        # groups of which this process is a member: those that connect hosts, those that connect devices, and those that
        # are registered with torch.distributed
        self._on_hosts: list[Any] = []
        self._on_devices: list[Any] = []
        self._registered: list[Any] = []

    def next_run(self, store: dist.Store | None) -> dist.Store:
        """Return a part of a store for the next run only; None stands for the store of torch.distributed."""
        return _part_of(store, f"runs/{next(_runs)}")

    @property
    def is_open(self) -> bool:
        """Whether connections can be made."""
        return self._store is not None

    def open(self) -> None:
        """Allow connections to be made, and close the last network of this process. Every process calls it."""
        global _current
        if _current is not None and _current is not self:
            _current.close()
        _current = self
        self._store = _part_of(None, f"connections/{next(_openings)}")

    def close(self) -> None:
        """Close all connections; no message may be in flight. The network can be opened again."""
        global _current
        for group in self._registered:
            with contextlib.suppress(ValueError):  # torch.distributed was shut down before
                dist.destroy_process_group(group)
        self._close_mailboxes()
        self._mailboxes.clear()
        self._lines.clear()
        self._parties.clear()
        self._on_hosts, self._on_devices, self._registered, self._store = [], [], [], None
        if _current is self:
            _current = None

    def connect(self, route: Route) -> None:
        """Connect the ends of a route, unless they are connected; those of a hop also between devices, if possible."""
        ends = route.source, route.target
        line = self._lines.get(ends)
        if line is None:
            line = self._lines[ends] = self._line(ends)
        if self._between is not None and isinstance(line, Line) and not line.between and isinstance(route.what, Edge):
            ranks = sorted(ends)
            pair = line.between = Pair(self._join(ranks, self._between), int(ranks[0] == self._rank))
            if self._rank in ends:
                move = pair.group.send if route.source == self._rank else pair.group.recv
                self._start(lambda number: move([number], pair.peer, 0))

    def join(self, party: Party) -> None:
        """Connect a party, unless it is connected: on the host and, unless it is ``on_host``, between devices."""
        if party not in self._parties:
            between = None if party.on_host else self._device_backend
            backend = _HOST if between is None else backends(_HOST, between, self._device)
            group = self._parties[party] = self._join(party.ranks, backend)
            if between is not None and self._rank in party.ranks and len(party.ranks) > 1:
                self._start(lambda number: group.allreduce([number]))

    def has_joined(self, parties: Iterable[Party]) -> bool:
        """Return whether all of these parties are connected."""
        return all(party in self._parties for party in parties)

    def _start(self, transfer: Callable[[Tensor], Any]) -> None:
        """Create the communicator of a group, by a first transfer while nothing else runs.

        The host waits for the other processes when a communicator is created. If a sender did so later, it would wait
        before it has sent the frame for which the receiver waits: a deadlock.
        """
        transfer(torch.zeros(1, device=self._device)).wait()

    def outbox(self, route: Route, arrivals: Arrivals) -> NetworkOutbox:
        """Open the sending end of a route."""
        return self._lines[route.source, route.target].outbox(route, arrivals)

    def inbox(self, route: Route, arrivals: Arrivals) -> NetworkInbox:
        """Open the receiving end of a route."""
        return self._lines[route.source, route.target].inbox(route, arrivals)

    def group(self, party: Party) -> dist.ProcessGroup:
        """Return the process group of a party."""
        return self._parties[party]

    @property
    def _between(self) -> str | None:
        """The backend of messages between devices. None for gloo, which would copy them over the host."""
        return None if self._device_backend == "gloo" else self._device_backend

    def _line(self, ends: tuple[int, int]) -> Line | Mailbox:
        """Connect two processes on the host. On other processes this does nothing."""
        if self._rank not in ends:
            return Line(Pair(None, -1), -1, self._device)
        position = ends.index(self._rank)
        assert self._store is not None
        peer = ends[1 - position]
        if peer not in self._mailboxes:
            store = dist.PrefixStore("mailbox {}/{}".format(*sorted(ends)), self._store)
            self._mailboxes[peer] = meet(store, self._rank, peer, self._timeout, self._shares)
        if (mailbox := self._mailboxes[peer]) is not None:
            return mailbox
        store = dist.PrefixStore("{}/{}".format(*ends), self._store)
        made = _gloo(store, position, 2, self._timeout, threads=0)
        self._on_hosts.append(made)
        return Line(Pair(made, 1 - position), peer, self._device)

    def _join(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        members = list(ranks)
        _register()
        options = urgent_options(backend, self._timeout) if backend == self._between else None
        made = own_group(dist.new_group(members, timeout=self._timeout, backend=backend, pg_options=options))
        if self._rank in members:
            self._registered.append(made)
            if backend != self._between:
                self._on_hosts.append(made)
            if self._between is not None and backend != _HOST:
                self._on_devices.append(made)
        return made

    def _close_mailboxes(self) -> None:
        for mailbox in self._mailboxes.values():
            if mailbox is not None:
                mailbox.close()

    def disconnect(self) -> None:
        """End the transfers for which threads wait. Nothing can be sent after it.

        A transfer between devices would block all later work of its device, so it is aborted. All groups are aborted at
        the same time, since one abort may wait until the device has ended the transfers of the other groups. gloo
        cannot cancel a transfer, but closes all connections of a group when a transfer exceeds its timeout.
        """
        self._close_mailboxes()
        aborts = [threading.Thread(target=self._abort, args=(group,), daemon=True) for group in self._on_devices]
        for thread in aborts:
            thread.start()
        deadline = time.monotonic() + _ABORTED_S
        for thread in aborts:
            thread.join(max(0.0, deadline - time.monotonic()))
        for group in self._on_hosts:
            for peer in set(range(group.size())) - {group.rank()}:
                with contextlib.suppress(RuntimeError):  # the timeout is intended
                    group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _abort(self, group: Any) -> None:
        try:
            group._get_backend(self._device).abort()
        except (RuntimeError, AttributeError) as error:  # another backend than NCCL may have no such method
            _log.warning(
                "the backend '%s' cannot abort its transfers (%s): %s may wait for a process that has failed until "
                "this one is ended",
                self._device_backend, error, self._device,
            )  # fmt: skip


def _part_of(store: dist.Store | None, name: str) -> dist.Store:
    """Return a view of a store (None: that of torch.distributed) that adds a prefix to all keys."""
    store = store or default_store()
    # A clone, where torch can make one, has a connection of its own: connecting may block in the store for long.
    store = store.clone() if hasattr(store, "clone") else store
    return dist.PrefixStore(f"avgpipe/{name}", store)


# -- gloo ------------------------------------------------------------------------------------------------------------


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, threads: int = 2) -> Any:
    """Create a gloo group on the network interfaces of this process. Collectives need ``threads``, messages none."""
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs are incomplete
    options: Any = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, _devices(), threads
    made = gloo(store, rank, size, options)
    made._set_default_timeout(UNLIMITED)  # timeout of collectives
    return made


def _devices() -> list[Any]:
    """Return the gloo devices (network interfaces) of torch's default group; a new one if that does not use gloo."""
    try:
        default: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return list(default.options._devices)
    except (RuntimeError, AttributeError):  # the default group has no gloo backend
        return [_own_device()]


@functools.cache
def _own_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


@functools.cache
def _register() -> None:
    dist.Backend.register_backend(_HOST, _gloo, devices=["cpu"])

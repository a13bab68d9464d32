"""Threads that stand for processes: a cluster in memory, and faults that happen to one of them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.channel import Inbox, MemoryChannel, Outbox, Traffic
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Party, Route, StageMap
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.errors import PeerError
from tests.processes import left_behind

LIMIT_S = 20.0  # of every wait here
TIMEOUT = timedelta(seconds=10)
CPU = torch.device("cpu")


class Blown(ValueError):
    """What an injected fault raises in the code of a process."""


class Injector:
    """Lets things happen to processes when they come to do something."""

    def __init__(self) -> None:
        self._faults: dict[tuple[int, str], BaseException] = {}

    def fail_at(self, rank: int, action: str, error: BaseException | None = None) -> Injector:
        """The process fails when it comes to an action, as ``connect forward 0`` or ``join world``."""
        self._faults[rank, action] = error or Blown("the fuse has blown")
        return self

    def reach(self, rank: int, action: str) -> None:
        """A process comes to an action."""
        if (error := self._faults.pop((rank, action), None)) is not None:
            raise error


# -- a network in memory ---------------------------------------------------------------------------------------------


class Mailbox(MemoryChannel):
    """Both ends of a channel, which two threads have."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._lock = threading.Lock()

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        with self._lock:
            super().expect(count, observers, onwards)

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        with self._lock:
            super().put(message, observers)
        self._arrivals.notify()


class Hub:
    """What the threads share."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        self.store = dist.HashStore()
        self._changed = threading.Condition()
        self._mail: dict[Any, deque[Tensor]] = defaultdict(deque)
        self._inboxes: dict[tuple[Route, int], tuple[Mailbox, Arrivals]] = {}
        self._early: dict[tuple[Route, int], list[Message]] = defaultdict(list)
        self._gone: set[int] = set()

    def post(self, key: Any, tensor: Tensor) -> None:
        with self._changed:
            self._mail[key].append(tensor.clone())
            self._changed.notify_all()

    def collect(self, key: Any, sender: int) -> Tensor:
        with self._changed:
            there = self._changed.wait_for(lambda: self._mail[key] or sender in self._gone, LIMIT_S)
            if not there or not self._mail[key]:
                raise dist.DistNetworkError(f"connection closed by rank {sender}")
            return self._mail[key].popleft()

    def open(self, route: Route, number: int, arrivals: Arrivals) -> Mailbox:
        with self._changed:
            channel = Mailbox(arrivals)
            self._inboxes[route, number] = channel, arrivals
            for message in self._early.pop((route, number), ()):
                channel.put(message)
            return channel

    def send(self, route: Route, number: int, message: Message) -> None:
        with self._changed:
            if (route, number) not in self._inboxes:
                self._early[route, number].append(message)
                return
        self._inboxes[route, number][0].put(message)  # which may send it on

    def leave(self, rank: int) -> None:
        """The connections of a process break."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
            open_routes = [(route, arrivals) for (route, _), (_, arrivals) in self._inboxes.items()]
        for route, arrivals in open_routes:
            if route.source == rank:
                arrivals.fail(PeerError(f"the connection to rank {rank} broke while receiving on channel '{route}'"))


class MemoryNetwork:
    """One thread's part in a hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._opened: Counter[Any] = Counter()
        self._connected: set[Route] = set()
        self._joined: set[Party] = set()
        self.is_open = False
        self._runs = itertools.count()

    def next_run(self, store: dist.Store | None) -> dist.Store:
        return dist.PrefixStore(f"runs/{next(self._runs)}", store or self._hub.store)

    def open(self) -> None:
        self.is_open = True

    def connect(self, route: Route) -> None:
        ends = (route.source, route.target)
        if self._rank in ends and route not in self._connected:
            self._hub.injector.reach(self._rank, f"connect {route}")
            self._connected.add(route)
            (peer,) = set(ends) - {self._rank}
            self._hub.post((route, self._rank), torch.zeros(0))
            self._hub.collect((route, peer), peer)

    def join(self, party: Party) -> None:
        if self._rank in party.ranks:
            self._hub.injector.reach(self._rank, f"join {party.what}")
        self._joined.add(party)

    def has_joined(self, parties: Iterable[Party]) -> bool:
        return self._joined.issuperset(parties)

    def outbox(self, route: Route, arrivals: Arrivals) -> Outbox:
        self._opened["out", route] += 1
        return _Sending(self._hub, route, self._opened["out", route])

    def inbox(self, route: Route, arrivals: Arrivals) -> Inbox:
        self._opened["in", route] += 1
        return self._hub.open(route, self._opened["in", route], arrivals)

    def group(self, party: Party) -> MemoryGroup:
        return MemoryGroup(self._hub, party, party.ranks.index(self._rank))

    def disconnect(self) -> None:
        self._hub.leave(self._rank)

    def close(self) -> None:
        self.is_open = False


@dataclass(frozen=True)
class _Sending:
    """The sending end: what was put arrives, also after it is closed, or before the other end is opened."""

    hub: Hub
    route: Route
    number: int

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        self.hub.send(self.route, self.number, message)

    def close(self, join_s: float) -> None:
        pass


class _Done:
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class _Coming:
    collect: Callable[[], None]

    def wait(self, timeout: Any = None) -> bool:
        self.collect()
        return True

    def is_completed(self) -> bool:
        return False


@dataclass(frozen=True)
class MemoryGroup:
    """What collectives need of a process group."""

    hub: Hub
    party: Party
    rank: int

    def broadcast(self, tensor: Tensor, root: int) -> _Done:
        if self.rank == root:
            for rank in range(len(self.party.ranks)):
                if rank != root:
                    self._post(tensor, rank)
        else:
            tensor.copy_(self._collect(root))
        return _Done()

    def allreduce(self, tensors: list[Tensor], op: Any = None) -> _Done:
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in self.party.ranks]
            self.allgather(parts, tensor)
            tensor.copy_(sum(parts[1:], parts[0]))
        return _Done()

    def allgather(self, output_tensors: list[Tensor], input_tensor: Tensor) -> _Done:
        for rank in range(len(self.party.ranks)):
            self._post(input_tensor, rank)
        for rank, output in enumerate(output_tensors):
            output.copy_(self._collect(rank))
        return _Done()

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> _Done:
        self._post(tensors[0], dst, tag)
        return _Done()

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> _Done:
        def wait() -> None:
            received = self._collect(src, tag)
            tensors[0][: len(received)].copy_(received)  # it may be shorter, as with gloo

        return _Coming(wait)

    def _post(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.hub.post((self.party, self.rank, to, tag), tensor)

    def _collect(self, sender: int, tag: int = 0) -> Tensor:
        return self.hub.collect((self.party, sender, self.rank, tag), self.party.ranks[sender])


# -- processes -------------------------------------------------------------------------------------------------------


def alone(num_stages: int) -> Cluster:
    """The cluster of one process with all stages."""
    return Cluster(StageMap(num_stages), Process(0, CPU, TIMEOUT.total_seconds(), MemoryNetwork(Hub(Injector()), 0)))


def run(
    stage_map: StageMap, work: Callable[[Cluster], Any], injector: Injector | None = None, timeout: timedelta = TIMEOUT
) -> list[Any]:
    """Call ``work(cluster)`` in a thread for each rank, while the cluster is open.

    Args:
        stage_map: of the cluster.
        work: of a process.
        injector: of faults.
        timeout: of the cluster.
    Returns:
        What the call returned, or the error that a process ended with, by rank.
    """
    hub = Hub(injector or Injector())
    outcomes: list[Any] = [None] * stage_map.world_size

    def live(rank: int) -> None:
        process = Process(rank, CPU, timeout.total_seconds(), MemoryNetwork(hub, rank))
        cluster = Cluster(stage_map, process)
        try:
            cluster.open(hub.store)
            outcomes[rank] = work(cluster)
            cluster.close()
        except Exception as error:  # handed to the test
            outcomes[rank] = error
            cluster.watch.report(error)
            cluster.close(failed=True)

    threads = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}") for rank in range(len(outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} did not end"
    left = left_behind()
    assert not left, f"threads are left: {left}"
    return outcomes


def results(outcomes: list[Any]) -> list[Any]:
    """Of all processes; fails with the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes

"""The mesh: which process hosts which stage, and everything that connects the processes.

::

    K = 4 stages on 2 processes      rank 1: stages 0, 2       rank 0: stages 1, 3
    the last stage is always on rank 0, and so are the loss, the loggers and the dataloader
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.runtime.accounting import Meter
from lightning_avgpipe.runtime.channel import Arrivals, NetworkInbox, NetworkOutbox, Wire
from lightning_avgpipe.runtime.clock import ClockOffset, estimate_offset, host_now
from lightning_avgpipe.runtime.feed import Feed, FeedSink, FeedSource
from lightning_avgpipe.runtime.frame import as_bytes
from lightning_avgpipe.runtime.message import pack, unpack
from lightning_avgpipe.runtime.recording import Recorder
from lightning_avgpipe.runtime.watch import Watch
from lightning_avgpipe.runtime.wiring import DIRECTIONS, Wiring, channel_name, wire

__all__ = ["Mesh"]

T = TypeVar("T")

_CLOCK_ROUNDS = 16
_GRACE = timedelta(seconds=60)
_DISCONNECTED_S = 5.0  # longest time that a thread takes to end when its connection is closed
_NEVER_SENT = 99  # a tag of transfers
_instances = itertools.count()


class Mesh:
    """Processes, stages and channels of one group.

    Args:
        num_stages: K, a multiple of ``world_size``.
        rank: of this process.
        world_size: number of processes.
        device: of this process.
        timeout: longest wait for another process.
        device_backend: backend of the channels between devices, such as "nccl"; None sends over the host.
        reader: the process that reads the data.

    All processes build it at the same time. With one process nothing is connected.
    """

    def __init__(
        self,
        num_stages: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        device_backend: str | None = None,
        reader: int = 0,
    ) -> None:
        if num_stages % world_size:
            raise ConfigurationError(
                f"num_stages={num_stages} on {world_size} processes: the number of stages must be a multiple of the "
                f"number of processes; use num_stages={max(1, num_stages // world_size) * world_size}"
            )
        self.num_stages = num_stages
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timeout
        self.reader = reader
        self.arrivals = Arrivals()
        self.links: tuple[Link, ...] | None = None  # of the hops, once they are measured
        # told of a request to all processes, at the same point of the program on each of them
        self.when_agreed: Callable[[str], None] = lambda request: None
        stages = ([str(k) for k in range(num_stages) if self.rank_of(k) == r] for r in range(world_size))
        self._names = [f"rank {r} (stage{'s' * (len(ks) > 1)} {', '.join(ks)})" for r, ks in enumerate(stages)]
        self._number = next(_instances)
        self._openings = itertools.count()
        self._agreed: frozenset[str] = frozenset()
        self._collective: threading.Thread | None = None
        self._opened: list[NetworkInbox | NetworkOutbox] = []
        self._news_out: list[NetworkOutbox] = []
        self._news_in: NetworkInbox | None = None
        self._reports_out: NetworkOutbox | None = None
        self._reports_in: dict[int, NetworkInbox] = {}
        self.recorder: Recorder | None = None
        self.meter: Meter | None = None  # told of what the stages of this process keep in memory
        self.wiring: dict[tuple[int, int], Wiring] = {}  # (pipeline, stage) -> its channels
        self._device_backend = device_backend
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._control: dist.ProcessGroup | None = None
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._subset_backend = f"cpu:gloo,cuda:{device_backend}" if device_backend else "gloo"
        # there is nothing to watch before it is open
        self.watch = Watch(rank, self._names, None, 0.0, self.arrivals.notify)
        if world_size > 1:
            self._make_groups()

    # -- who is where ------------------------------------------------------------------------------------------------

    def rank_of(self, stage: int) -> int:
        """The process that hosts a stage."""
        return (self.num_stages - 1 - stage) % self.world_size

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return self.stages_of(self.rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a process."""
        return tuple(k for k in range(self.num_stages) if self.rank_of(k) == rank)

    @property
    def reads(self) -> bool:
        """Whether this process reads the data."""
        return self.rank == self.reader

    @property
    def hosts_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == 0

    @property
    def control(self) -> dist.ProcessGroup | None:
        """All processes, connected on the host; None if there is only one."""
        return self._control

    # -- groups and channels -----------------------------------------------------------------------------------------

    def _make_groups(self) -> None:
        # Every process takes part in making every group, in the same order.
        timeout = self.timeout + _GRACE  # our own waits end first: their errors name stage and action
        self._control = dist.new_group(list(range(self.world_size)), timeout=timeout, backend="gloo")
        for peer in range(1, self.world_size):
            self._make_group("news", 0, peer, "gloo")
            self._make_group("reports", 0, peer, "gloo")
        for peer in range(self.world_size):
            if peer != self.reader:
                self._make_group("batches", self.reader, peer, "gloo")
        self._make_hops(0)

    def _make_hops(self, pipeline: int) -> None:
        for k in range(self.num_stages - 1):
            a, b = self.rank_of(k), self.rank_of(k + 1)
            for direction in DIRECTIONS:
                # two hops between the same processes (several stages per process) need two groups as well
                name = channel_name(direction, k, pipeline)
                if (name, a, b) in self._groups:
                    continue
                self._make_group(name, a, b, "gloo")
                if self._device_backend not in (None, "gloo"):
                    assert self._device_backend is not None
                    self._make_group(f"{name} device", a, b, self._device_backend)

    def _make_group(self, kind: str, a: int, b: int, backend: str) -> None:
        self._groups[kind, a, b] = dist.new_group([a, b], timeout=self.timeout + _GRACE, backend=backend)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Connect some processes for collectives among them. Every process calls it, also those that are not named."""
        key = tuple(ranks)
        if key not in self._subsets:
            timeout = self.timeout + _GRACE
            self._subsets[key] = dist.new_group(list(key), timeout=timeout, backend=self._subset_backend)
        return self._subsets[key]

    def open(self) -> None:
        """Start the channels, unless they are open."""
        if self.wiring:
            return
        self.arrivals = Arrivals()
        self.watch = self._make_watch()
        self._agreed = frozenset()
        self.wiring = wire(self, 0, self._inbox, self._outbox)
        if self.reads:
            peers = [peer for peer in range(self.world_size) if peer != self.rank]
            outboxes = {peer: self._outbox("batches", self.rank, peer, peer) for peer in peers}
            self.feed: Feed = FeedSource(outboxes, self._agree, lambda: frozenset(self.watch.requests))
        else:
            inbox = self._inbox("batches", self.reader, self.rank, self.reader)
            self.feed = FeedSink(inbox, self._agree, self.device, self._wait_for_batch)
        if self.rank == 0:
            self._news_out = [self._outbox("news", 0, peer, peer) for peer in range(1, self.world_size)]
            self._reports_in = {peer: self._inbox("reports", 0, peer, peer) for peer in range(1, self.world_size)}
        else:
            self._news_in = self._inbox("news", 0, self.rank, 0)
            self._reports_out = self._outbox("reports", 0, self.rank, 0)

    def widen(self, num_pipelines: int) -> None:
        """Start the channels of so many pipelines, unless they are open. Every process calls it."""
        for pipeline in range(1, num_pipelines):
            if (pipeline, self.stages[0]) in self.wiring:
                continue
            if self.world_size > 1:
                self._make_hops(pipeline)
            self.wiring |= wire(self, pipeline, self._inbox, self._outbox)
        self.record(self.recorder)

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads; after a failure without waiting for peers, and for good."""
        if failed and self.wiring:
            # rank 0 holds the store; and connections that break before the reason is known would look like one
            self.watch.await_readers()
            self._disconnect()
        elif self.wiring:
            self.feed.close()
        for channel in self._opened:
            channel.close(join_s=_DISCONNECTED_S if failed else self.timeout.total_seconds())
        if self._collective is not None:
            self._collective.join(_DISCONNECTED_S)
        self.watch.close()
        self._opened, self._news_out, self._news_in = [], [], None
        self._reports_out, self._reports_in = None, {}
        self.wiring = {}

    def record(self, recorder: Recorder | None) -> None:
        """From now on tell this recorder, or nobody, what executor and channels do."""
        self.recorder = recorder
        for wiring in self.wiring.values():
            for end in (wiring.values, wiring.to_next, wiring.gradients, wiring.to_previous):
                if isinstance(end, (NetworkInbox, NetworkOutbox)):
                    end.recorder = recorder

    def _disconnect(self) -> None:
        """End the transfers that wait in threads.

        gloo has no way to give one up, but closes all connections of a group when a transfer in it takes too long.
        """
        groups = [group for (kind, *_), group in self._groups.items() if not kind.endswith("device")]
        for group in (*groups, *self._subsets.values(), self._control):
            members = dist.get_process_group_ranks(group) if group is not None else []
            for peer in members if self.rank in members else []:
                if peer != self.rank:
                    with contextlib.suppress(RuntimeError):  # this is the purpose
                        nothing = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
                        if nothing is not None:
                            nothing.wait(timedelta(milliseconds=1))

    def _make_watch(self) -> Watch:
        store = None
        if self.world_size > 1:
            shared = dist.distributed_c10d._get_default_store()
            # a connection of its own, where torch can make one: others may wait in the store for long
            shared = shared.clone() if hasattr(shared, "clone") else shared
            store = dist.PrefixStore(f"avgpipe/{self._number}/{next(self._openings)}", shared)
        announces = self.rank in (0, self.reader)
        return Watch(
            self.rank, self._names, store, self.timeout.total_seconds(), lambda: self.arrivals.notify(), announces
        )

    def _outbox(self, kind: str, a: int, b: int, peer: int) -> NetworkOutbox:
        outbox = NetworkOutbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(outbox)
        return outbox

    def _inbox(self, kind: str, a: int, b: int, peer: int) -> NetworkInbox:
        inbox = NetworkInbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(inbox)
        return inbox

    def _wire(self, kind: str, a: int, b: int, peer: int) -> Wire:
        return Wire(peer, self._groups[kind, a, b], self.device, self._groups.get((f"{kind} device", a, b)))

    def _wait_for_batch(self, ready: Callable[[], bool]) -> None:
        self.arrivals.wait_for(
            ready,
            self.timeout.total_seconds(),
            lambda: f"waits for a batch from {self._names[self.reader]}",
            self.watch,
        )

    # -- news: from rank 0 to all ------------------------------------------------------------------------------------

    def publish(self, item: T | None = None) -> T:
        """Rank 0 tells all processes: it passes the item and does not wait; the others get what it passed.

        Args:
            item: any tree of tensors and picklable leaves; ignored on other ranks.
        """
        self.watch.check()
        if self.rank == 0:
            if self._news_out:
                requests = frozenset(self.watch.requests)
                message = pack((item, requests))
                for outbox in self._news_out:
                    outbox.put(message)
                self._agree(requests)
            return item  # type: ignore[return-value]
        inbox = self._news_in
        assert inbox is not None
        inbox.expect(1)
        self.arrivals.wait_for(
            inbox.ready,
            self.timeout.total_seconds(),
            lambda: "waits for rank 0's news",
            self.watch,
        )
        news, requests = unpack(inbox.get())
        self._agree(requests)
        return news  # type: ignore[no-any-return]

    def hand_in(self, item: T) -> list[tuple[int, T]]:
        """Tell rank 0, and do not wait. Every process calls it equally often.

        Args:
            item: any tree of tensors and picklable leaves.
        Returns:
            On rank 0 what has arrived since the last call, with ranks, and its own item; of each rank in order.
            Elsewhere nothing.
        """
        if self._reports_out is not None:
            self._reports_out.put(pack(item))
            return []
        arrived = [(self.rank, item)]
        for peer, inbox in self._reports_in.items():
            inbox.expect(1)
            while inbox.ready():
                arrived.append((peer, unpack(inbox.get())))
        return arrived

    def _agree(self, requests: frozenset[str]) -> None:
        """All processes learn of a request with the same news, so all do what was asked for at the same point."""
        for request in sorted(requests - self._agreed):
            self.when_agreed(request)
        self._agreed |= requests

    def agreed(self, request: str) -> bool:
        """Whether all processes know by now of what one was asked for."""
        return request in self._agreed

    # -- collectives on the host -------------------------------------------------------------------------------------

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all processes."""
        self.together(what, lambda: dist.barrier(group=self._control))

    def broadcast(self, item: T, source: int = 0) -> T:
        """Every process gets the source's item."""
        if self.world_size == 1:
            return item
        if source == 0 and self.wiring:
            return pickle.loads(self.publish(pickle.dumps(item)))  # type: ignore[no-any-return]
        box = [item]
        self.together("a broadcast", lambda: dist.broadcast_object_list(box, source, group=self._control))
        return box[0]

    def gather_objects(self, item: T) -> list[T]:
        """On rank 0 every process's item, by rank; elsewhere only one's own."""
        items: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [item]
        self.together(
            "a gathering of objects",
            lambda: dist.gather_object(item, items if self.rank == 0 else None, dst=0, group=self._control),
        )
        return items if self.rank == 0 else [item]

    def clock(self) -> ClockOffset:
        """How far this process's clock is from that of rank 0. Every rank calls it."""
        rounds: list[tuple[float, float, float]] = []

        def exchange() -> None:
            reading = torch.empty((), dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                asked = host_now()
                dist.send(reading, 0, group=self._control)
                dist.recv(reading, 0, group=self._control)
                rounds.append((asked, float(reading), host_now()))

        def answer() -> None:
            for peer in range(1, self.world_size):
                for _ in range(_CLOCK_ROUNDS):
                    dist.recv(torch.empty((), dtype=torch.float64), peer, group=self._control)
                    dist.send(torch.tensor(host_now(), dtype=torch.float64), peer, group=self._control)

        self.together("an alignment of clocks", answer if self.rank == 0 else exchange)
        return estimate_offset(rounds) if rounds else ClockOffset()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place, for a tensor on the host."""
        self.together("a sum", lambda: dist.all_reduce(tensor, group=self._control))
        return tensor

    def collect(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On rank 0 the owners' tensors, those of other processes as copies on the host; elsewhere one's own.

        Args:
            tensors: the same names, shapes and types on every process.
            owner: name -> rank.
        """
        collected = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                source = owner(name)
                if source == 0 or tensor.numel() == 0:
                    continue
                if self.rank == source:
                    dist.send(as_bytes(tensor.cpu()), 0, group=self._control)
                elif self.rank == 0:
                    collected[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    dist.recv(as_bytes(collected[name]), source, group=self._control)

        self.together("a gathering of parameters", exchange)
        return collected

    def deliver(
        self, tensors: Mapping[str, Tensor], holders: Mapping[str, int], wanted: Mapping[int, Sequence[str]]
    ) -> dict[str, Tensor]:
        """What this process wants and others hold, as copies on the host.

        Args:
            tensors: the same names, shapes and types on every process.
            holders: name -> rank that holds it; what nobody holds is not delivered. The same on every process.
            wanted: rank -> names that it lacks. The same on every process.
        """
        delivered: dict[str, Tensor] = {}

        def exchange() -> None:
            for receiver, names in wanted.items():
                for name in names:
                    tensor = tensors[name]
                    if name not in holders or tensor.numel() == 0:
                        continue
                    if self.rank == holders[name]:
                        dist.send(as_bytes(tensor.cpu().contiguous()), receiver, group=self._control)
                    elif self.rank == receiver:
                        delivered[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                        dist.recv(as_bytes(delivered[name]), holders[name], group=self._control)

        self.together("a delivery of parameters", exchange)
        return delivered

    def spread(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On every process all owners' tensors; those of other processes as copies on the host."""
        spread = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                if tensor.numel() == 0:
                    continue
                mine = owner(name) == self.rank
                copy = tensor.detach().cpu().contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.broadcast(as_bytes(copy), owner(name), group=self._control)
                if not mine:
                    spread[name] = copy

        self.together("a spreading of parameters", exchange)
        return spread

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective on the host; while it waits, look whether another process has failed.

        It runs in a thread, because a collective of gloo can neither be polled nor given up.
        """
        if self.world_size == 1:
            return
        self.watch.check()
        done, errors = threading.Event(), []

        def work() -> None:
            try:
                with torch.no_grad():
                    collective()
            except Exception as error:  # re-raised below, in the thread that asked
                errors.append(error)
            finally:
                done.set()
                self.arrivals.notify()

        self._collective = threading.Thread(target=work, name=f"avgpipe {what}", daemon=True)
        self._collective.start()
        doing = f"waits for the other processes in {what}"
        with self.watch.during(doing):
            self.arrivals.wait_for(done.is_set, self.timeout.total_seconds(), lambda: doing, self.watch)
            if errors:
                self.watch.look()
                lost = f"{self.watch.name} {doing}, but a connection broke: {errors[0]}{self.watch.account()}"
                raise PeerError(lost) from errors[0]

    # -- failure -----------------------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends."""
        self.watch.report(error)

"""The mesh: everything that connects the processes."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.batch_stream import BatchSink, BatchSource, BatchStream
from lightning_avgpipe.comm.channel import Arrivals, NetworkInbox, NetworkOutbox, Wire
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.control import ControlChannel, ControlChannels
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process_groups import Pair, ProcessGroups
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.wiring import DIRECTIONS, Wiring, channel_name, wire
from lightning_avgpipe.engine.accounting import Meter
from lightning_avgpipe.engine.guard import MemoryGuard
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.errors import AvgPipeError, PeerError

__all__ = ["Mesh"]

T = TypeVar("T")
End = TypeVar("End", NetworkInbox, NetworkOutbox)

_DISCONNECTED_S = 3.0  # longest time that threads take to end when their connections are closed
_openings = itertools.count()  # of this process; the same on all of them


class Mesh(Collectives):
    """Processes, stages and channels of one group.

    Args:
        num_stages: K, a multiple of the number of devices, or a divisor of it: then there are several groups.
        rank: of this process among all.
        world_size: number of all processes.
        device: of this process.
        timeout: longest wait for another process.
        device_backend: backend of the channels between devices, such as "nccl"; None sends over the host.
        reader: the process of each group that reads the group's data.
        arrangement: of the processes on devices; None for a device each.
        deaths: rank among all -> how it ended, of those processes started by this one that have died.

    All processes open it at the same time. With one process nothing is connected.

    Attributes:
        stage_map: which process hosts which stage.
        group_number: which group this is; the group's mesh is all that its processes know, but for the following.
        num_groups: how many groups there are.
        layout: the ranks of each group among all processes.
        world: all processes of all groups; with one group this mesh.
        leaders: the processes with rank 0 in each group; elsewhere, and with one group, this process alone.
        replica_group: the processes that host the same stages in each group; None if there is one group.
        process_groups: of the processes.
        control_channel: from rank 0 to all, while it is open.
        batch_stream: of batches, while it is open.
        agreement: of all processes, while it is open.
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
        device_layout: DeviceLayout | None = None,
        deaths: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        device_layout = device_layout or DeviceLayout(world_size)
        self.stage_map = StageMap.on(device_layout, num_stages, reader)
        self.layout, self.num_groups = self.stage_map.layout, self.stage_map.num_groups
        self.group_number, position = self.stage_map.position(rank)
        super().__init__(self.layout[self.group_number], position)
        self.num_stages = num_stages
        self.device = device
        self.timeout = timeout
        self.reader = reader
        self.arrivals = Arrivals()
        self.links: tuple[Link, ...] | None = None  # of the hops, once they are measured
        # told of a request to all processes, at the same point of the program on each of them
        self.when_agreed: Callable[[str], None] = lambda request: None
        self._names = [self.stage_map.name(other) for other in range(world_size)]
        self._shares_devices = device_layout.sharing > 1
        self._deaths = deaths
        self._collective: threading.Thread | None = None
        self._opened: list[NetworkInbox | NetworkOutbox] = []
        self.recorder: Recorder | None = None
        self.meter: Meter | None = None  # told of what the stages of this process keep in memory
        self.guard: MemoryGuard | None = None  # of a trial iteration
        self.wiring: dict[tuple[int, int], Wiring] = {}  # (pipeline, stage) -> its channels
        self.process_groups = ProcessGroups(self.layout, self.group_number, rank, timeout, device_backend)
        self._relays: dict[int, Pair] = {}  # from rank 0 of all processes to the group
        # there is nothing to watch before it is open
        self.monitor = Monitor(rank, self._names, None, 0.0, self.arrivals.notify)
        self.world: Collectives = self
        self.leaders: Collectives = _Party((rank,), 0, self)
        self.replica_group: ReplicaGroup | None = None
        if self.num_groups > 1:
            self.world = _Party(range(world_size), rank, self)
            if self.rank == 0:
                self.leaders = _Party([members[0] for members in self.layout], self.group_number, self)
            alike = sorted(members[self.rank] for members in self.layout)
            members = _Party(alike, alike.index(rank), self)
            self.replica_group = ReplicaGroup(members, self.group_number, on_host=self._shares_devices)

    # -- who is where ------------------------------------------------------------------------------------------------

    def rank_of(self, stage: int) -> int:
        """The process that hosts a stage."""
        return self.stage_map.owner(stage)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return self.stage_map.stages(self.rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a process."""
        return self.stage_map.stages(rank)

    @property
    def reads(self) -> bool:
        """Whether this process reads the data."""
        return self.rank == self.reader

    @property
    def hosts_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of all processes, which logs and writes."""
        return self.hosts_last and self.group_number == 0

    # -- connections and channels ------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the processes, in the place of those of another mesh. Every process calls it; the wait is long."""
        self.process_groups.open()
        self.world.control = self.process_groups.join(self.world.ranks)
        if self.num_groups > 1:
            self._connect_groups()
        for peer in range(1, self.world_size):
            self.process_groups.connect("news", 0, peer)
            self.process_groups.connect("reports", 0, peer)
        for peer in range(self.world_size):
            if peer != self.reader:
                self.process_groups.connect("batches", self.reader, peer)
        self._connect_hops(0)

    def _connect_groups(self) -> None:
        self.control = self.process_groups.join_in_each(range(self.world_size))
        leaders, *others = zip(*self.layout, strict=True)
        connection = self.process_groups.join(leaders)
        if self.rank == 0:
            self.leaders.control = connection
        self._relays = {n: self.process_groups.pair("relay", 0, head) for n, head in enumerate(leaders) if n}
        # two processes of one device meet on the host: no communicator of devices can have a device twice
        for position, ranks in enumerate((leaders, *others)):
            connection = self.process_groups.join(ranks, on_host=self._shares_devices)
            if position == self.rank:
                assert self.replica_group is not None
                self.replica_group.members.control = connection

    def _connect_hops(self, pipeline: int) -> None:
        for k in range(self.num_stages - 1):
            a, b = self.rank_of(k), self.rank_of(k + 1)
            for direction in DIRECTIONS if a != b else ():
                # two hops between the same processes (several stages per process) need two connections as well
                self.process_groups.connect(channel_name(direction, k, pipeline), a, b, devices=True)

    def open(
        self, store: dist.Store | None = None, meet: Callable[[], object] = lambda: None, keeper: str | None = None
    ) -> None:
        """Watch over the processes, connect them if they are not, and start the channels, unless they are open.

        Args:
            store: shared by all processes; None takes that of torch.distributed.
            meet: makes torch's group of all processes, if there is none.
            keeper: who keeps the store, for messages; None: rank 0.
        Raises:
            PeerError: a process does not come, or ends meanwhile.
        """
        if self.wiring:
            return
        self.arrivals = Arrivals()
        store = self._own(store)
        self.monitor = self._make_watch(store, keeper or self._names[0])
        self.agreement = Agreement(self.world.rank, self._names, store, self.timeout.total_seconds() / 2, self.monitor)
        if self.world.world_size > 1:

            def connected() -> None:
                meet()
                self._reconnect()

            self._wait_for(connected, "waits for the other processes to connect")
        self.control_channel = ControlChannel(
            self.rank,
            self.num_groups,
            self._news_channels(),
            self.monitor,
            self.wait,
            lambda request: self.when_agreed(request),  # which somebody may replace
        )
        self.wiring = wire(self, 0, self._inbox, self._outbox)
        if self.reads:
            peers = [peer for peer in range(self.world_size) if peer != self.rank]
            outboxes = {peer: self._outbox("batches", self.rank, peer, peer) for peer in peers}
            self.batch_stream: BatchStream = BatchSource(
                outboxes, self.control_channel.agree, self.control_channel.requests
            )
        else:
            inbox = self._inbox("batches", self.reader, self.rank, self.reader)
            waits = f"waits for a batch from {self._names[self.ranks[self.reader]]}"
            self.batch_stream = BatchSink(
                inbox, self.control_channel.agree, self.device, lambda ready: self.wait(ready, waits)
            )

    def _news_channels(self) -> ControlChannels:
        peers = range(1, self.world_size)
        if self.rank != 0:
            return ControlChannels(
                source=self._inbox("news", 0, self.rank, 0), reports_out=self._outbox("reports", 0, self.rank, 0)
            )
        return ControlChannels(
            out=[self._outbox("news", 0, peer, peer) for peer in peers],
            reports={peer: self._inbox("reports", 0, peer, peer) for peer in peers},
            relay_out=[self._relay(NetworkOutbox, g, r) for g, r in enumerate(self.leaders.ranks) if g and self.leads],
            relay_source=None if self.leads else self._relay(NetworkInbox, self.group_number, 0),
        )

    def widen(self, num_pipelines: int) -> None:
        """Start the channels of so many pipelines, unless they are open. Every process calls it."""
        for pipeline in range(1, num_pipelines):
            if (pipeline, self.stages[0]) in self.wiring:
                continue
            if self.world.world_size > 1:
                waits = f"waits for the other processes to connect pipeline {pipeline}"
                self._wait_for(partial(self._connect_hops, pipeline), waits)
            self.wiring |= wire(self, pipeline, self._inbox, self._outbox)
        self.record(self.recorder)

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads; after a failure without waiting for peers, and for good."""
        if failed:
            # rank 0 holds the store; and connections that break before the reason is known would look like one
            self.monitor.await_readers()
            self.process_groups.disconnect()
        elif self.wiring:
            self.batch_stream.close()
        deadline = time.monotonic() + (_DISCONNECTED_S if failed else self.timeout.total_seconds())
        for channel in self._opened:
            channel.close(join_s=max(0.0, deadline - time.monotonic()))
        if self._collective is not None:
            self._collective.join(max(0.0, min(_DISCONNECTED_S, deadline - time.monotonic())))
        self.monitor.close()
        self._opened, self.wiring = [], {}
        if failed:
            self.process_groups.close()

    def record(self, recorder: Recorder | None) -> None:
        """From now on tell this recorder, or nobody, what executor and channels do."""
        self.recorder = recorder
        for wiring in self.wiring.values():
            for end in (wiring.values, wiring.to_next, wiring.gradients, wiring.to_previous):
                if isinstance(end, (NetworkInbox, NetworkOutbox)):
                    end.recorder = recorder

    def _own(self, store: dist.Store | None) -> dist.Store | None:
        """What this run has of the store."""
        if self.world.world_size == 1:
            return None
        store = store or dist.distributed_c10d._get_default_store()
        # a connection of its own, where torch can make one: others may wait in the store for long
        store = store.clone() if hasattr(store, "clone") else store
        return dist.PrefixStore(f"avgpipe/runs/{next(_openings)}", store)

    def _make_watch(self, store: dist.Store | None, keeper: str) -> Monitor:
        return Monitor(
            self.world.rank,
            self._names,
            store,
            self.timeout.total_seconds(),
            wake=lambda: self.arrivals.notify(),
            announces=self.leads or (self.reads and self.num_groups == 1),
            keeper=keeper,
            idle_s=lambda: self.arrivals.idle_s(),
            deaths=self._deaths,
        )

    def subset(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Connect some processes of the group for collectives, unless they are. Every process calls it."""
        made: list[dist.ProcessGroup] = []
        doing = f"waits for the other processes to connect ranks {', '.join(map(str, ranks))}"
        self._wait_for(lambda: made.append(self.process_groups.subset(ranks)), doing)
        return made[0]

    def _outbox(self, kind: str, a: int, b: int, peer: int) -> NetworkOutbox:
        outbox = NetworkOutbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(outbox)
        return outbox

    def _inbox(self, kind: str, a: int, b: int, peer: int) -> NetworkInbox:
        inbox = NetworkInbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(inbox)
        return inbox

    def _wire(self, kind: str, a: int, b: int, peer: int) -> Wire:
        on_host, on_devices = self.process_groups.on_host(kind, a, b), self.process_groups.on_devices(kind, a, b)
        return Wire(self.ranks[peer], on_host, self.device, on_devices, self.moved)

    def _relay(self, kind: Callable[..., End], group: int, peer: int) -> End:
        """An end of the channel from rank 0 of all processes to a group's own."""
        end = kind("relay", Wire(peer, self._relays[group], self.device, None, self.moved), self.arrivals)
        self._opened.append(end)
        return end

    def wait(self, ready: Callable[[], bool], doing: str) -> None:
        """Wait until something is so, within the limits of the mesh.

        Raises:
            PeerError: it takes too long, or another process has failed.
        """
        self.arrivals.wait_for(ready, self.timeout.total_seconds(), lambda: doing, self.monitor)

    def agreed(self, request: str) -> bool:
        """Whether all processes know by now of what one was asked for."""
        return self.control_channel.agreed(request)

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all processes ask for the same. Arguments and errors as of :meth:`Agreement.confirm`."""
        if self.world.world_size > 1:
            waits = f"waits for the other processes to ask for {asked} as well"
            self._wait_for(lambda: self.agreement.confirm(asked, where), waits)

    # -- collectives on the host -------------------------------------------------------------------------------------

    def broadcast(self, item: T, source: int = 0) -> T:
        """Every process gets the source's item."""
        if source == 0 and self.wiring and self.world_size > 1:
            return pickle.loads(self.control_channel.publish(pickle.dumps(item)))  # type: ignore[no-any-return]
        return super().broadcast(item, source)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective on the host; while it waits, look whether another process has failed.

        It runs in a thread, because a collective of gloo can neither be polled nor given up.
        """
        if self.world_size > 1:
            self.wait_together(what, collective)

    def wait_together(self, what: str, collective: Callable[[], object]) -> None:
        """The same for any set of processes."""

        def connected() -> None:
            self._reconnect()  # another trainer may have run since
            collective()

        self._wait_for(connected, f"waits for the other processes in {what}")

    def moved(self) -> None:
        """Bytes went over a connection of this process."""
        self.arrivals.moved()

    def _reconnect(self) -> None:
        if not self.process_groups.is_open:
            self.connect()

    def _wait_for(self, function: Callable[[], object], doing: str) -> None:
        """Run something that waits for other processes; meanwhile look whether one has failed."""
        self.monitor.check()
        done, errors = threading.Event(), []

        def work() -> None:
            try:
                with torch.no_grad():
                    function()
            except Exception as error:  # re-raised below, in the thread that asked
                errors.append(error)
            finally:
                done.set()
                self.arrivals.notify()

        self._collective = threading.Thread(target=work, name=f"avgpipe {doing}", daemon=True)
        self._collective.start()
        with self.monitor.during(doing):
            self.wait(done.is_set, doing)
            if errors:
                if not isinstance(errors[0], RuntimeError) or isinstance(errors[0], AvgPipeError):
                    raise errors[0]
                self.monitor.look()
                lost = f"{self.monitor.name} {doing}, but a connection broke: {errors[0]}{self.monitor.account().text}"
                raise PeerError(lost) from errors[0]

    # -- failure -----------------------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends."""
        self.monitor.report(error)


class _Party(Collectives):
    """Processes of several groups, with whom a mesh talks."""

    def __init__(self, ranks: Iterable[int], rank: int, mesh: Mesh) -> None:
        super().__init__(tuple(ranks), rank)
        self._mesh = mesh

    def together(self, what: str, collective: Callable[[], object]) -> None:
        if self.world_size > 1:
            self._mesh.wait_together(what, collective)

    def moved(self) -> None:
        self._mesh.moved()

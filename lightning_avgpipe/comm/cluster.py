"""The cluster: the processes of a run, and everything that connects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.batch_stream import BatchSink, BatchSource, BatchStream
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.control import ControlChannel, ControlChannels
from lightning_avgpipe.comm.links import measure_links
from lightning_avgpipe.comm.meetings import LivingCollectives, LivingReplicaGroup, Meetings
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.network import Network
from lightning_avgpipe.comm.parties import Parties, control_routes
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.returns import Returns
from lightning_avgpipe.comm.routes import Party, Route
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.utils.patching import nothing

_PATIENCE_S = 10.0  # how much longer than each other groups wait for each other
_DISCONNECTED_S = 3.0  # longest time that threads take to end when their connections are closed


class Cluster:
    """This process among the others. All of them make it, open it and close it at the same time.

    Args:
        stage_map: who hosts what.
        rank: of this process among all.
        device: of this process.
        timeout: longest wait for another process.
        network: connects the processes; with one process it is not asked.
        shares_devices: whether several processes have the same device.
        deaths: rank among all -> how it ended, of those processes started by this one that have died.
        min_groups: if so many groups are left when others die, these go on; None: all groups end.

    Attributes:
        stage_map: as given.
        device: as given.
        group: the processes that host all stages together, with this one among them.
        world: all processes of all groups; with one group the same.
        leaders: the processes with rank 0 in each group; elsewhere, and with one group, this process alone.
        replica_group: the processes that host the same stages of other teams' models; None if there is one team.
        replicas: the processes that host the same stages of the same models; None if there is one replica.
        waits: of this process for others.
        transport: the channels between stages; they are there while this is open.
        control_channel: from rank 0 to all, while this is open.
        batch_stream: of batches, while this is open.
        returns: of groups that have left, while this is open; None if none may leave.
        when_leading: called when this process begins to lead, since the groups before its own have left.
    """

    control_channel: ControlChannel
    batch_stream: BatchStream

    def __init__(
        self,
        stage_map: StageMap,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        network: Network,
        shares_devices: bool = False,
        deaths: Callable[[], Mapping[int, str]] = dict,
        min_groups: int | None = None,
    ) -> None:
        self.stage_map = self._whole = stage_map
        self.device = device
        self._timeout_s = timeout.total_seconds()
        self._network = network
        self._shares_devices = shares_devices
        self._deaths = deaths
        self._names = [stage_map.name(other) for other in range(stage_map.world_size)]
        self._links: tuple[Link, ...] | None = None
        self._agreement: Agreement | None = None
        self._is_open = False
        self._number = rank
        self._has_led = rank == 0
        self.when_leading: Callable[[], None] = nothing
        self.membership: Membership | None = None
        self.returns: Returns | None = None
        if min_groups is not None and min_groups < stage_map.num_groups:
            self.membership = Membership(stage_map, rank, min_groups)
            self._meetings = Meetings(rank, self.membership, network, self._go_on, self._shrunk)
        layout = stage_map.layout
        number, position = stage_map.position(rank)
        self.world = self._together(Party("world", tuple(range(stage_map.world_size))), rank)
        self.group, self.leaders = self.world, self._together(Party("alone", (rank,)), rank)
        self.replica_group: ReplicaGroup | None = None
        self.replicas: ReplicaGroup | None = None
        if stage_map.num_groups > 1:
            self.group = self._together(Party("group", layout[number]), rank)
            if position == 0:
                self.leaders = self._together(Party("leaders", tuple(ranks[0] for ranks in layout)), rank)
            team, replica = stage_map.team(number)
            if self.membership is not None:
                whole, world = self._parties.counterparts(position, replica), Party("world", self.world.ranks)
                self.replica_group = LivingReplicaGroup(whole, world, self._meetings, network, self._moved)
            elif stage_map.num_teams > 1:
                members = self._together(self._parties.counterparts(position, replica), rank)
                self.replica_group = ReplicaGroup(members, team, on_host=shares_devices)
            if stage_map.replicas > 1:
                members = self._together(self._parties.replicas(position, team), rank)
                self.replicas = ReplicaGroup(members, replica, on_host=shares_devices)
        self._replicate_stages(rank)
        self._begin(None)  # there is nothing to watch before it is open

    # -- this process ------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this process within its group, as in the stage map."""
        return self.group.rank

    @property
    def group_number(self) -> int:
        """Which group this process is in."""
        return self.stage_map.position(self._number)[0]

    @property
    def survives(self) -> bool:
        """Whether groups may go on when another one dies."""
        return self.membership is not None

    @property
    def apart(self) -> bool:
        """Whether this process was started anew, and its group is not among the others yet."""
        return self.membership is not None and self.membership.apart

    @property
    def place(self) -> tuple[int, int]:
        """Which group this process is in, and of how many: those at the start while it is apart."""
        if self.membership is not None and self.apart:
            return self.membership.group, self._whole.num_groups
        return self.group_number, self.stage_map.num_groups

    @property
    def has_others(self) -> bool:
        """Whether there are other processes, or will be when this one has come back to them."""
        return self.world.world_size > 1 or self.apart

    @property
    def ranks_without_this(self) -> tuple[int, ...]:
        """If the group of this process has left, those that go on; else nothing."""
        membership = self.membership
        if membership is None or membership.group in membership.groups():
            return ()
        return membership.ranks()

    @property
    def groups_left(self) -> tuple[int, ...]:
        """The groups that have not left, by their numbers at the start."""
        return tuple(self._whole.layout.index(ranks) for ranks in self.stage_map.layout)

    def has_groups(self, stage_map: StageMap) -> bool:
        """Whether these are the groups of a stage map, or were at the start."""
        return self._whole.layout == stage_map.layout

    def ranks_at_start(self, group: int) -> tuple[int, ...]:
        """The processes of a group, by its number at the start."""
        return self._whole.layout[group]

    @property
    def team(self) -> tuple[int, int]:
        """The team of this process's group, and which of its replicas the group is."""
        return self.stage_map.team(self.group_number)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return self.stage_map.stages(self.rank)

    @property
    def hosts_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == self.stage_map.leader

    @property
    def shares_last(self) -> bool:
        """Whether this process has a part of the losses, which replicas of the last stage share."""
        ranks = self.stage_map.ranks(self.stage_map.num_stages - 1)
        return len(ranks) > 1 and self.rank in ranks

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of all processes, which logs and writes: the first one of those that are left."""
        return self.world.rank == 0 and not self.apart

    @property
    def gathers(self) -> bool:
        """Whether rank 0 of this group gets whole what its processes have divided, to write it.

        That of the first group writes. If it may leave in the midst of that, others must have the same.
        """
        return self.survives or self.group_number == 0

    @property
    def reads(self) -> bool:
        """Whether this process reads the data of its group."""
        return self.rank == self.stage_map.reader

    @property
    def monitor(self) -> Monitor:
        """Of all processes."""
        return self.waits.monitor

    # -- connections -------------------------------------------------------------------------------------------------

    def open(
        self,
        store: dist.Store | None = None,
        meet: Callable[[], object] = lambda: None,
        keeper: str | None = None,
        apart: dist.Store | None = None,
    ) -> None:
        """Watch over the processes, connect them if they are not, and start the channels, unless they are open.

        Args:
            store: shared by all processes; None takes that of torch.distributed.
            meet: makes torch's group of all processes, if there is none.
            keeper: who keeps the store, for messages; None: rank 0.
            apart: of a process that was started anew: what its group has of the store alone.
        Raises:
            PeerError: a process does not come, or ends meanwhile.
        """
        if self._is_open:
            return
        self.returns = None
        if self.world.world_size == 1:
            self._begin(None)
        else:
            if self.membership is not None:
                self.membership.begin(self._network.stores.lasting(apart or store), outlives=keeper is not None)
            if self.membership is not None and apart is not None:
                self._stand_apart(self.membership)
            self._begin(self._network.stores.next_run(apart or store), keeper or self._names[0])
            if self.membership is not None and keeper is not None and store is not None:
                self.returns = Returns(
                    self._number, self._whole.layout, self.membership, self._meetings, self._network, self.waits,
                    store, self._moved,
                )  # fmt: skip

            def connect() -> None:
                meet()
                self._connect()

            self.waits.run(connect, "waits for the other processes to connect")
        self.transport.widen(1)
        leaders = self.leaders if self.survives else None
        self.control_channel = ControlChannel(
            self.rank, self._whole.num_groups, self._control_ends(), self.waits, leaders
        )
        self.batch_stream = self._open_batches()
        self._is_open = True
        if self.survives:  # in an earlier run a group may have left after its last averaging
            self._meetings.settle(True, Party("world", tuple(range(self._whole.world_size))))

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads; after a failure without waiting for peers, and for good."""
        if failed:
            # rank 0 holds the store; and connections that break before the reason is known would look like one
            self.monitor.await_readers()
            self._network.disconnect()
        elif self._is_open:
            self.batch_stream.close()
        begin, limit_s = time.monotonic(), _DISCONNECTED_S if failed else self._timeout_s
        self.transport.close(limit_s)
        self.waits.close(max(0.0, min(_DISCONNECTED_S, begin + limit_s - time.monotonic())))
        self.monitor.close()
        self._is_open = False
        if failed:
            self._network.close()

    def meet_anew(self) -> None:
        """A group has come back: connect all that meet, now that all of them are there. Every process calls it.

        So whoever dies afterwards breaks a connection, and nobody waits for one that will not come. If the group leaves
        meanwhile, it does so for what follows.
        """
        what = "the return of a group"
        self.world.barrier(what)
        self.leaders.barrier(what)
        assert self.replica_group is not None
        self.replica_group.begin_sum([torch.zeros(1, device=self.device)])
        self.replica_group.settle()

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all ask for the same, while this is open. Arguments and errors as of :meth:`Agreement.confirm`."""
        if self._is_open and (agreement := self._agreement) is not None:
            waits = f"waits for the other processes to ask for {asked} as well"
            self.waits.run(lambda: agreement.confirm(asked, where), waits)

    def rearrange(self, stage_map: StageMap) -> None:
        """From now on these processes host other stages. Every process calls it, between iterations.

        Args:
            stage_map: of the same groups of processes, or with those that have left.
        """
        stage_map = self._of_groups_left(stage_map)
        if stage_map == self.stage_map:
            return
        if self.stage_map.stage_replicas:
            self.replicas = None
        self.stage_map = stage_map
        self._whole = replace(stage_map, layout=self._whole.layout)
        self._names[:] = [self._whole.name(other) for other in range(self._whole.world_size)]
        self._links = None
        self.transport.rearrange(stage_map)
        if self._is_open and stage_map.stage_replicas:
            parties = list(self._parties.of_stages())

            def join() -> None:
                for party in parties:
                    self._network.join(party)

            counts = list(stage_map.stage_replicas)
            self.waits.run(join, f"waits for the other processes to connect replicas={counts}")
        self._replicate_stages(self._number)

    def _replicate_stages(self, rank: int) -> None:
        for party in self._parties.of_stages():
            if rank in party.ranks:
                self.replicas = ReplicaGroup(self._together(party, rank), party.ranks.index(rank))

    def subset(self, ranks: Sequence[int]) -> Any:
        """Connect some processes of each group for collectives, unless they are; gives torch's process group.

        Every process calls it.
        """
        parties = [Party("subset", tuple(r[i] for i in ranks), on_host=False) for r in self.stage_map.layout]

        def join() -> None:
            for party in parties:
                self._network.join(party)

        self.waits.run(join, f"waits for the other processes to connect ranks {', '.join(map(str, ranks))}")
        return self._network.group(parties[self.group_number])

    def connect_replicas(self, what: str) -> ReplicaGroup | None:
        """Connect the replicas of each stage once more, for collectives that other ones must not come between.

        Every process calls it; None where a stage has one replica.

        Args:
            what: they are then.
        """
        parties = [replace(party, what=what) for party in self._parties if party.what == "replicas"]

        def join() -> None:
            for party in parties:
                self._network.join(party)

        self.waits.run(join, f"waits for the other processes to connect for {what}")
        found = next((party for party in parties if self._number in party.ranks), None)
        if found is None:
            return None
        return ReplicaGroup(self._together(found, self._number), found.ranks.index(self._number), found.on_host)

    def links(self) -> tuple[Link, ...]:
        """The link of each hop, as :func:`measure_links` finds them once. Every process calls it."""
        if self._links is None:
            self._links = measure_links(self.stage_map, self.group, self.transport, self.waits, self.device)
        return self._links

    def _begin(self, store: dist.Store | None, keeper: str = "") -> None:
        """A run, with nothing behind it."""
        arrivals = self._arrivals = Arrivals()
        rank, timeout_s = self._number, self._timeout_s
        monitor = Monitor(
            rank,
            self._names,
            store,
            timeout_s,
            wake=arrivals.notify,
            announces=self.leads
            or (self.reads and self.stage_map.num_groups == 1)
            or (self.survives and (self.reads or self.rank == 0)),
            keeper=keeper,
            idle_s=arrivals.idle_s,
            deaths=self._deaths,
            membership=self.membership,
        )
        self.waits = Waits(arrivals, monitor, timeout_s, self.device, _PATIENCE_S if self.survives else 0.0)
        if self.survives and store is not None:
            self._meetings.begin(self.waits, self._network.stores.lasting(store))
        self.transport = Transport(self.stage_map, rank, self._network, arrivals, self.waits)
        self._agreement = None
        if store is not None:
            self._agreement = Agreement(rank, self._names, store, timeout_s / 2, monitor, lambda: self.world.ranks)

    def _connect(self) -> None:
        """Unless the processes are connected: another trainer may have run since."""
        if not self._network.is_open:
            self._network.open(self._whole.layout[self.place[0]] if self.apart else None)
            for party in self._parties:
                self._network.join(party)
            for route in control_routes(self.stage_map, relays=not self.survives):
                self._network.connect(route)

    @property
    def _parties(self) -> Parties:
        return Parties(self.stage_map, self._shares_devices, self.survives)

    def _moved(self) -> None:
        self._arrivals.moved()

    def _shrunk(self) -> None:
        if self.leads and not self._has_led:
            self._has_led = True
            self.when_leading()

    def _stand_apart(self, membership: Membership) -> None:
        """All other groups have left, as far as this process can see."""
        membership.stand_apart()
        self._meetings.enter(membership.count)

    def _go_on(self) -> None:
        """Groups have left the averaging, or come back, at the same point of the program on all that go on."""
        self.stage_map = self._of_groups_left(self.stage_map)
        self.transport.follow(self.stage_map)

    def _of_groups_left(self, stage_map: StageMap) -> StageMap:
        if self.membership is None:
            return stage_map
        left = self.membership.groups(self._meetings.averaging)
        return replace(stage_map, layout=tuple(self._whole.layout[group] for group in left))

    def _together(self, party: Party, rank: int) -> Collectives:
        if self.survives and party.what in ("world", "leaders"):
            return LivingCollectives(party, self._meetings, self._network, self._moved)

        def run(collective: Callable[[], object], doing: str) -> None:
            def connected() -> None:
                self._connect()
                collective()

            self.waits.run(connected, doing)

        return Collectives(party, party.ranks.index(rank), self._network, run, self._moved)

    # -- what rank 0 says, and batches -------------------------------------------------------------------------------

    def _control_ends(self) -> ControlChannels:
        me, ranks = self._number, self.group.ranks
        inbox, outbox = self.transport.inbox, self.transport.outbox
        relays = self.leads and not self.survives
        if self.rank != 0:
            return ControlChannels(
                source=inbox(Route("news", ranks[0], me)), reports_out=outbox(Route("reports", me, ranks[0]))
            )
        return ControlChannels(
            out=[outbox(Route("news", me, rank)) for rank in ranks[1:]],
            reports={peer: inbox(Route("reports", ranks[peer], me)) for peer in range(1, len(ranks))},
            relay_out=[
                outbox(Route("relay", me, leader)) for leader in self.leaders.ranks[1:] if self.leads and relays
            ],
            relay_source=None if self.leads or self.survives else inbox(Route("relay", 0, me)),
        )

    def _open_batches(self) -> BatchStream:
        control, ranks = self.control_channel, self.group.ranks
        reader = ranks[self.stage_map.reader]
        routes = {peer: Route("batches", reader, rank) for peer, rank in enumerate(ranks) if rank != reader}
        if self.reads:
            outboxes = {peer: self.transport.outbox(route) for peer, route in routes.items()}
            return BatchSource(outboxes, control.agree, control.requests)
        inbox, waits = self.transport.inbox(routes[self.rank]), f"waits for a batch from {self._names[reader]}"
        return BatchSink(inbox, control.agree, self.device, lambda ready: self.waits.until(ready, waits))

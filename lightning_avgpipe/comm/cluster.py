"""The cluster: the processes of a run, and everything that connects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channels import Channels
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.meetings import LivingCollectives, LivingReplicaGroup, Meetings
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.parties import Parties, control_routes
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.returns import Returns
from lightning_avgpipe.comm.routes import Party
from lightning_avgpipe.comm.stage_map import StageMap, names
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.utils.patching import nothing

_PATIENCE_S = 10.0  # how much longer than each other groups wait for each other


class Cluster:
    """This process among the others. All of them make it, open it and close it at the same time.

    Args:
        stage_map: who hosts what.
        process: this one.
        min_groups: if so many groups are left when others die, these go on; None: all groups end.

    Attributes:
        stage_map: as given, of the groups that are left.
        group: the processes that host all stages together, with this one among them.
        world: all processes of all groups; with one group the same.
        leaders: the processes with rank 0 in each group; elsewhere, and with one group, this process alone.
        replica_group: the processes that host the same stages of other teams' models; None if there is one team.
        replicas: the processes that host the same stages of the same models; None if there is one replica.
        channels: what goes between this process and others; they are there while this is open.
        meetings: of the groups; None if none may leave.
        when_leading: called once when this process begins to lead, since the groups before its own have left.
    """

    def __init__(self, stage_map: StageMap, process: Process, min_groups: int | None = None) -> None:
        self.stage_map = stage_map
        self._process = process
        self.when_leading: Callable[[], None] = nothing
        self.meetings: Meetings | None = None
        if min_groups is not None and min_groups < stage_map.num_groups:
            membership = Membership(stage_map.layout, process.rank, min_groups)
            self.meetings = Meetings(membership, process.network, self._groups_changed)
        layout = stage_map.layout
        number, position = stage_map.position(process.rank)
        world = Party("world", tuple(range(stage_map.world_size)))
        self.world = self._together(world)
        self.group, self.leaders = self.world, self._together(Party("alone", (process.rank,)))
        self.replica_group: ReplicaGroup | None = None
        self.replicas: ReplicaGroup | None = None
        if stage_map.num_groups > 1:
            self.group = self._together(Party("group", layout[number]))
            if position == 0:
                self.leaders = self._together(Party("leaders", tuple(ranks[0] for ranks in layout)))
            (team, replica), on_host = divmod(number, stage_map.replicas), stage_map.shares_devices
            teams = self._parties.counterparts(position, replica)
            if self.meetings is not None:
                self.replica_group = LivingReplicaGroup(
                    teams, world, process.rank, self.meetings, process.network, self._moved
                )
            elif stage_map.num_teams > 1:
                self.replica_group = ReplicaGroup(self._together(teams), team, on_host)
            if stage_map.replicas > 1:
                members = self._together(self._parties.replicas(position, team))
                self.replicas = ReplicaGroup(members, replica, on_host)
        self._replicate_stages()
        self._begin(None)  # there is nothing to watch before it is open

    # -- this process ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self._process.device

    @property
    def rank(self) -> int:
        """Of this process within its group, as in the stage map. Rank 0 hosts the last stage."""
        return self.group.rank

    @property
    def group_number(self) -> int:
        """Which group this process is in."""
        return self.stage_map.position(self._process.rank)[0]

    @property
    def survives(self) -> bool:
        """Whether groups may go on when another one dies."""
        return self.meetings is not None

    @property
    def apart(self) -> bool:
        """Whether this process was started anew, and its group is not among the others yet."""
        return self.meetings is not None and self.meetings.membership.apart

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return self.stage_map.stages(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of all processes, which logs and writes: the first one of those that are left."""
        return self.world.rank == 0 and not self.apart

    @property
    def reads(self) -> bool:
        """Whether this process reads the data of its group."""
        return self.rank == self.stage_map.reader

    # -- connections -------------------------------------------------------------------------------------------------

    def open(
        self,
        store: dist.Store | None = None,
        meet: Callable[[], object] = nothing,
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
        if self.channels.are_open:
            return
        network, meetings = self._process.network, self.meetings
        if self.world.world_size == 1:
            self._begin(None)
        else:
            if meetings is not None:
                meetings.membership.begin(network.stores.lasting(apart or store), outlives=keeper is not None)
                if apart is not None:
                    self._stand_apart(meetings)
            self._begin(network.stores.next_run(apart or store), keeper or names(self._whole)[0])
            if meetings is not None and keeper is not None and store is not None:
                self.channels.returns = Returns(self._process, meetings, self.channels.waits, store)

            def connect() -> None:
                meet()
                self._connect()

            self.channels.waits.run(connect, "waits for the other processes to connect")
        whole = self._whole
        self.channels.open(self.stage_map, whole.num_groups, self.leaders, self.survives)
        if meetings is not None:  # in an earlier run a group may have left after its last averaging
            meetings.settle(True, Party("world", tuple(range(whole.world_size))))

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads; after a failure without waiting for peers, and for good."""
        self.channels.close(failed)

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
        self.channels.monitor.activity.names[:] = names(self._whole)
        self.channels.transport.rearrange(stage_map)
        if self.channels.are_open and (counts := stage_map.stage_replicas):
            self.connect(list(self._parties.of_stages()), f"replicas={list(counts)}")
        self._replicate_stages()

    def connect(self, parties: Sequence[Party], what: str) -> Collectives | None:
        """Connect parties, unless they are. Every process calls it.

        Args:
            parties: this process is a member of one at most.
            what: they are, for messages.
        Returns:
            That one.
        """

        def join() -> None:
            for party in parties:
                self._process.network.join(party)

        self.channels.waits.run(join, f"waits for the other processes to connect {what}")
        return next((self._together(party) for party in parties if self._process.rank in party.ranks), None)

    def _begin(self, store: dist.Store | None, keeper: str = "") -> None:
        """A run, with nothing behind it."""
        process, meetings, arrivals, named = self._process, self.meetings, Arrivals(), names(self._whole)
        monitor = Monitor(
            process.rank,
            named,
            store,
            process.timeout_s,
            wake=arrivals.notify,
            announces=self.leads
            or (self.reads and self.stage_map.num_groups == 1)
            or (self.survives and (self.reads or self.rank == 0)),
            keeper=keeper,
            idle_s=arrivals.idle_s,
            deaths=process.deaths,
            membership=None if meetings is None else meetings.membership,
        )
        waits = Waits(arrivals, monitor, process.timeout_s, self.device, _PATIENCE_S if self.survives else 0.0)
        if meetings is not None and store is not None:
            meetings.begin(waits, process.network.stores.lasting(store))
        agreement = None
        if store is not None:
            agreement = Agreement(process.rank, named, store, process.timeout_s / 2, monitor, lambda: self.world.ranks)
        self.channels = Channels(self.stage_map, process, self.group, waits, agreement)

    def _connect(self) -> None:
        """Unless the processes are connected: another trainer may have run since."""
        network, membership = self._process.network, None if self.meetings is None else self.meetings.membership
        if not network.is_open:
            network.open(membership.layout[membership.group] if membership is not None and membership.apart else None)
            for party in self._parties:
                network.join(party)
            for route in control_routes(self.stage_map, relays=not self.survives):
                network.connect(route)

    @property
    def _parties(self) -> Parties:
        return Parties(self.stage_map, self.survives)

    @property
    def _whole(self) -> StageMap:
        """With the groups at the start."""
        meetings = self.meetings
        return self.stage_map if meetings is None else replace(self.stage_map, layout=meetings.membership.layout)

    def _moved(self) -> None:
        self.channels.waits.arrivals.moved()

    def _stand_apart(self, meetings: Meetings) -> None:
        """All other groups have left, as far as this process can see."""
        membership = meetings.membership
        membership.stand_apart()
        meetings.enter(membership.count)

    def _groups_changed(self) -> None:
        """Groups have left, or come back; for averaging at the same point of the program on all that go on."""
        self.stage_map = self._of_groups_left(self.stage_map)
        self.channels.transport.follow(self.stage_map)
        if self.leads:
            take_over, self.when_leading = self.when_leading, nothing
            take_over()

    def _of_groups_left(self, stage_map: StageMap) -> StageMap:
        if self.meetings is None:
            return stage_map
        layout = self.meetings.membership.layout
        return replace(stage_map, layout=tuple(layout[group] for group in self.meetings.groups))

    def _replicate_stages(self) -> None:
        for party in self._parties.of_stages():
            if self._process.rank in party.ranks:
                self.replicas = ReplicaGroup(self._together(party), party.ranks.index(self._process.rank))

    def _together(self, party: Party) -> Collectives:
        process = self._process
        if self.meetings is not None and party.what in ("world", "leaders"):
            return LivingCollectives(party, process.rank, self.meetings, process.network, self._moved)

        def run(collective: Callable[[], object], doing: str) -> None:
            def connected() -> None:
                self._connect()
                collective()

            self.channels.waits.run(connected, doing)

        return Collectives(party, process.rank, process.network, run, self._moved)

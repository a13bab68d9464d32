"""The cluster: the processes of a run, and everything that connects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channels import Channels
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.routes import Party, all_parties, control_routes, counterparts, replicas, stage_replicas
from lightning_avgpipe.comm.stage_map import StageMap, names
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.utils.patching import nothing


class Cluster:
    """A process and its connections to the others. All processes create, open and close their clusters together.

    Args:
        stage_map: which process hosts which stage.
        process: this process.

    Attributes:
        stage_map: as given, or as last passed to :meth:`rearrange`.
        group_number: number of the group of this process.
        group: processes that host all stages together, including this one.
        world: all processes of all groups; the same as ``group`` if there is one group.
        leaders: the processes with rank 0 of their group; on other ranks, and with one group, this process alone.
        replica_group: processes that host the same stages of other teams' models; None if there is one team.
        replicas: processes that host the same stages of the same models; None if there is one replica.
        channels: channels between this process and others, usable while the cluster is open.
    """

    def __init__(self, stage_map: StageMap, process: Process) -> None:
        self.stage_map = stage_map
        self._process = process
        self.group_number, position = stage_map.position(process.rank)
        self.world = self._together(Party("world", tuple(range(stage_map.world_size))))
        self.group, self.leaders = self.world, self._together(Party("alone", (process.rank,)))
        self.replica_group: ReplicaGroup | None = None
        self.replicas: ReplicaGroup | None = None
        if stage_map.num_groups > 1:
            self.group = self._together(Party("group", stage_map.layout[self.group_number]))
            if position == 0:
                self.leaders = self._together(Party("leaders", tuple(ranks[0] for ranks in stage_map.layout)))
            (team, replica), on_host = divmod(self.group_number, stage_map.replicas), stage_map.shares_devices
            if stage_map.num_teams > 1:
                members = self._together(counterparts(stage_map, position, replica))
                self.replica_group = ReplicaGroup(members, team, on_host)
            if stage_map.replicas > 1:
                members = self._together(replicas(stage_map, position, team))
                self.replicas = ReplicaGroup(members, replica, on_host)
        self._replicate_stages()
        self._begin(None)  # nothing is watched before the cluster is open

    # -- this process ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._process.device

    @property
    def rank(self) -> int:
        """The rank of this process within its group, as in the stage map. Rank 0 hosts the last stage."""
        return self.group.rank

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this process hosts."""
        return self.stage_map.stages(self.rank)

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
    ) -> None:
        """Monitor the processes, connect them unless they are connected, and start the channels, unless they are open.

        Args:
            store: store that all processes share; None takes that of torch.distributed.
            meet: creates torch's group of all processes, if there is none.
            keeper: name, for messages, of the process that keeps the store; None: rank 0.

        Raises:
            PeerError: a process does not connect, or ends meanwhile.
        """
        if self.channels.are_open:
            return
        if self.world.world_size == 1:
            self._begin(None)
        else:
            self._begin(self._process.network.next_run(store), keeper or names(self.stage_map)[0])

            def connect() -> None:
                meet()
                self._connect()

            self.channels.waits.run(connect, "waits for the other processes to connect")
        self.channels.open(self.stage_map)

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads.

        Args:
            failed: whether the run failed: then peers are not waited for, and the connections are given up.
        """
        self.channels.close(failed)

    def rearrange(self, stage_map: StageMap) -> None:
        """Assign the stages to the processes anew. Every process calls it, between iterations.

        Args:
            stage_map: new stage map of the same groups of processes.
        """
        if stage_map == self.stage_map:
            return
        if self.stage_map.stage_replicas:
            self.replicas = None
        self.stage_map = stage_map
        self.channels.monitor.activity.names[:] = names(stage_map)
        self.channels.transport.rearrange(stage_map)
        if self.channels.are_open and (counts := stage_map.stage_replicas):
            self.connect(list(stage_replicas(stage_map)), f"replicas={list(counts)}")
        self._replicate_stages()

    def connect(self, parties: Sequence[Party], what: str) -> Collectives | None:
        """Connect the members of each party, unless they are connected. Every process calls it.

        Args:
            parties: parties to connect; this process is a member of one of them at most.
            what: name of the parties, for messages.

        Returns:
            The collectives of the party of which this process is a member; None if there is none.
        """

        def join() -> None:
            for party in parties:
                self._process.network.join(party)

        self.channels.waits.run(join, f"waits for the other processes to connect {what}")
        return next((self._together(party) for party in parties if self._process.rank in party.ranks), None)

    def _begin(self, store: dist.Store | None, keeper: str = "") -> None:
        """Begin a run with a new monitor and new channels; nothing of an earlier run remains."""
        process, arrivals, named = self._process, Arrivals(), names(self.stage_map)
        monitor = Monitor(
            process.rank,
            named,
            store,
            process.timeout_s,
            wake=arrivals.notify,
            announces=self.world.rank == 0 or (self.reads and self.stage_map.num_groups == 1),
            keeper=keeper,
            idle_s=arrivals.idle_s,
            deaths=process.deaths,
        )
        waits = Waits(arrivals, monitor, process.timeout_s, self.device)
        agreement = None
        if store is not None:
            agreement = Agreement(process.rank, named, store, process.timeout_s / 2, monitor)
        self.channels = Channels(self.stage_map, process, self.group, waits, agreement)

    def _connect(self) -> None:
        """Connect the processes, unless they are. They are not if another trainer has run since."""
        network = self._process.network
        if not network.is_open:
            network.open()
            for party in all_parties(self.stage_map):
                network.join(party)
            for route in control_routes(self.stage_map):
                network.connect(route)

    def _moved(self) -> None:
        self.channels.waits.arrivals.moved()

    def _replicate_stages(self) -> None:
        for party in stage_replicas(self.stage_map):
            if self._process.rank in party.ranks:
                self.replicas = ReplicaGroup(self._together(party), party.ranks.index(self._process.rank))

    def _together(self, party: Party) -> Collectives:
        def run(collective: Callable[[], object], doing: str) -> None:
            def connected() -> None:
                self._connect()
                collective()

            self.channels.waits.run(connected, doing)

        return Collectives(party, self._process.rank, self._process.network, run, self._moved)

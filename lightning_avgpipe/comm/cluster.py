"""The cluster: the processes of a run, and everything that connects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.batches import BatchStream
from lightning_avgpipe.comm.collectives import Collectives, TensorCollectives
from lightning_avgpipe.comm.control import ControlChannel
from lightning_avgpipe.comm.probe import measure_links
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Party, Route, StageMap, all_parties, control_routes, names, stage_replicas
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.comm.watch import Watch
from lightning_avgpipe.utils.patching import noop

_DISCONNECTED_S = 3.0  # longest time that threads may take to end when their connections are closed


@dataclass(frozen=True)
class Process:
    """A process of a cluster, as it was started.

    Attributes:
        rank: rank of the process among all.
        device: device on which it computes.
        timeout_s: longest wait for another process, in seconds.
        network: network that connects it with others; unused if there are none.
        deaths: returns, for each rank that this process started and that has died, how it ended.
    """

    rank: int
    device: torch.device
    timeout_s: float
    network: ProcessGroups
    deaths: Callable[[], Mapping[int, str]] = dict


class Cluster:
    """A process and its connections to the others. All processes create, open and close their clusters together.

    Args:
        stage_map: which process hosts which stage.
        process: this process.

    Attributes:
        process: as given.
        stage_map: as given, or as last passed to :meth:`rearrange`.
        device: device of this process.
        group_number: number of the group of this process.
        group: processes that host all stages together, including this one.
        world: all processes of all groups; the same as ``group`` if there is one group.
        leaders: the processes with rank 0 of their group; on other ranks, and with one group, this process alone.
        averaging_group: processes that host the same stages of other teams' models; None if there is one team.
        replicas: processes that host the same stages of the same models; None if there is one replica.
        watch: knows what the processes do and which of them failed; a new one for each time the cluster is open.
        waits: waits for other processes.
        transport: channels between stages.
        control: control channel from rank 0 to the other ranks.
        batches: batch stream from the reader to the other ranks; set by :meth:`open`.
        is_open: whether the channels are open.
    """

    batches: BatchStream
    is_open: bool

    def __init__(self, stage_map: StageMap, process: Process) -> None:
        self.stage_map, self.device = stage_map, process.device
        self.process, self._network = process, process.network
        self.group_number, _ = stage_map.position(process.rank)
        alone = Party("alone", (process.rank,))
        mine = {party.what: party for party in all_parties(stage_map) if process.rank in party.ranks}
        self.world = Collectives(mine["world"], self)
        self.group = Collectives(mine["group"], self) if "group" in mine else self.world
        self.leaders = Collectives(mine.get("leaders", alone), self)
        self.averaging_group: TensorCollectives | None = None
        self.replicas: TensorCollectives | None = None
        if "groups" in mine:
            team = self.group_number // stage_map.replicas
            self.averaging_group = TensorCollectives(Collectives(mine["groups"], self), team)
        if "replicas" in mine:
            self.replicas = TensorCollectives(Collectives(mine["replicas"], self))
        self._begin(None)  # nothing is watched before the cluster is open

    # -- this process ------------------------------------------------------------------------------------------------

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
        self, store: dist.Store | None = None, meet: Callable[[], object] = noop, keeper: str | None = None
    ) -> None:
        """Start the watch, connect the processes if necessary, and open the channels, unless they are open already.

        Args:
            store: store that all processes share; None takes that of torch.distributed.
            meet: creates torch's group of all processes, if there is none.
            keeper: name, for messages, of the process that keeps the store; None: rank 0.

        Raises:
            PeerError: a process does not connect, or ends before all are connected.
        """
        if self.is_open:
            return
        if self.world.world_size == 1:
            self._begin(None)
        else:
            self._begin(self._network.next_run(store), keeper or names(self.stage_map)[0])

            def connect() -> None:
                meet()
                self.ensure_connected()

            self.waits.run(connect, "waits for the other processes to connect")
        self.transport.widen(1)
        self.control.open(self.transport, self.stage_map.layout, self.group_number)
        self._open_batches()
        self.is_open = True

    def close(self, failed: bool = False) -> None:
        """Wait until all processes have reached the end of the run, then stop the channels and their threads.

        Rank 0 may hold the store: if it left early, a group that is still averaging its weights would fail.

        Args:
            failed: whether the run failed; if so, peers are not waited for, and all connections are closed.
        Raises:
            PeerError: another process fails before it reaches the end.
        """
        if failed:
            # Rank 0 holds the store. And if a connection broke before the others have read why the run failed, they
            # would take the broken connection for the cause.
            self.watch.await_readers()
            self._network.disconnect()
        elif self.is_open:
            self.world.barrier("the end of the run")
            self.batches.close()
        begin, limit_s = time.monotonic(), _DISCONNECTED_S if failed else self.process.timeout_s
        self.transport.close(limit_s)
        self.waits.close(max(0.0, min(_DISCONNECTED_S, begin + limit_s - time.monotonic())))
        self.watch.close()
        self.is_open = False
        if failed:
            self._network.close()

    def rearrange(self, stage_map: StageMap) -> None:
        """Assign the stages to other processes. Every process calls it, between iterations.

        Args:
            stage_map: new stage map of the same groups of processes.
        """
        if stage_map == self.stage_map:
            return
        if self.stage_map.stage_replicas:
            self.replicas = None
        self.stage_map = stage_map
        self.watch.names[:] = names(stage_map)
        self.transport.rearrange(stage_map)
        if self.is_open and (counts := stage_map.stage_replicas):
            self.connect(list(stage_replicas(stage_map)), f"replicas={list(counts)}")
        for party in stage_replicas(stage_map):
            if self.process.rank in party.ranks:
                self.replicas = TensorCollectives(Collectives(party, self))

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
                self._network.join(party)

        if not self._network.has_joined(parties):  # the answer is the same on all processes
            self.waits.run(join, f"waits for the other processes to connect {what}")
        return next((Collectives(party, self) for party in parties if self.process.rank in party.ranks), None)

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all processes ask for the same operation, if the channels are open.

        Arguments and errors are those of :meth:`Watch.confirm`. The time limit is half of that of other waits, so that
        this error comes first: it says more about the cause than theirs.
        """
        if self.is_open and self.world.world_size > 1:
            self.waits.run(
                lambda: self.watch.confirm(asked, where, self.process.timeout_s / 2),
                f"waits for the other processes to ask for {asked} as well",
            )

    def links(self, stage_map: StageMap) -> tuple[Link, ...]:
        """Return the link of each hop; :func:`measure_links` runs once per stage map. Every process calls it."""
        if stage_map not in self._links:
            self._links[stage_map] = measure_links(self, stage_map)
        return self._links[stage_map]

    def _begin(self, store: dist.Store | None, keeper: str = "") -> None:
        """Begin a run with a new watch and new channels; nothing of an earlier run remains."""
        process, arrivals = self.process, Arrivals()
        self.watch = Watch(
            process.rank,
            names(self.stage_map),
            store,
            process.timeout_s,
            arrivals,
            collects_requests=self.world.rank == 0 or (self.reads and self.stage_map.num_groups == 1),
            keeper=keeper,
            deaths=process.deaths,
        )
        self.waits = Waits(arrivals, self.watch, process.timeout_s, self.device)
        self.transport = Transport(self.stage_map, process.rank, process.network, self.waits)
        self.control = ControlChannel(self.rank, self.waits)
        self.is_open = False
        self._links: dict[StageMap, tuple[Link, ...]] = {}

    def _open_batches(self) -> None:
        ranks, transport = self.group.ranks, self.transport
        reader, me = ranks[self.stage_map.reader], self.process.rank
        if self.reads:
            outboxes = {peer: transport.outbox(Route("batches", me, to)) for peer, to in enumerate(ranks) if to != me}
            self.batches = BatchStream(self.control, self.device, outboxes)
        else:
            doing = f"waits for a batch from {self.watch.names[reader]}"
            inbox = transport.inbox(Route("batches", reader, me))
            self.batches = BatchStream(self.control, self.device, inbox=inbox, doing=doing)

    def ensure_connected(self) -> None:
        """Connect the processes, unless they are connected. Another trainer that ran since has closed connections."""
        if not self._network.is_open:
            self._network.open()
            for party in all_parties(self.stage_map):
                self._network.join(party)
            for route in control_routes(self.stage_map):
                self._network.connect(route)

"""The connection of the strategy's processes, from the set-up of the environment to teardown."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.requests import STOP
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks, launch
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.utils import parent
from lightning_avgpipe.utils.device import backends, connects_hosts, device_backend, port_of
from lightning_avgpipe.utils.patching import nothing

T = TypeVar("T")


class Connection:
    """Connects the processes of one strategy, and ends them together. Several runs use one connection.

    Args:
        backend: of torch.distributed; None: one is chosen for the device.

    Attributes:
        backend: of torch.distributed; None before it is chosen.
        cluster: of the processes; None before they are connected, and after a failure.
        layout: of all processes on devices; None before they are arranged.
        failed: whether the last run has ended with an error, here or in another process.
        noted: what this process has been asked from outside in this run, such as to stop by a signal.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.cluster: Cluster | None = None
        self.layout: DeviceLayout | None = None
        self.failed = False
        self.noted: set[str] = set()
        self._groups: Sequence[tuple[int, ...]] = ()  # ranks of each at the start
        self._hears: Callable[[str], None] = nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cluster": None, "_hears": nothing}  # a trainer that has trained can be pickled

    def arrange(
        self, num_stages: int, rank: int, device: torch.device, layout: DeviceLayout, options: Options
    ) -> Cluster:
        """Make the cluster, unless it is there, with the same groups of processes.

        Args:
            num_stages: K.
            rank: of this process among all.
            device: of this process.
            layout: of all processes on devices.
            options: of the strategy.
        """
        self.layout, several = layout, layout.world_size > 1
        checks.schedule(options, num_stages, layout.group_size(num_stages))
        checks.groups(options, layout.world_size // layout.group_size(num_stages), device)
        self.failed = False
        if several:
            self.backend = self.backend or device_backend(None, device)
            checks.backend(self.backend, device)
        stage_map = StageMap.on(layout, num_stages, placement=options.placement)
        if self.cluster is None or self._groups != stage_map.layout:
            self._groups = stage_map.layout
            if several and options.reader == "first":
                stage_map = replace(stage_map, reader=stage_map.owner(0))
            if several:
                gc.collect()  # a trainer that nobody uses any more is a cycle, and holds its connections until then
            between = None if port_of(device).is_host or not several else device_backend(self.backend, device)
            network = ProcessGroups(rank, device, options.timeout, between)
            process = Process(rank, device, options.timeout.total_seconds(), network, parent.deaths)
            self.cluster = Cluster(stage_map, process, options.min_groups)
        else:  # a plan of the last run may have placed stages
            self.cluster.rearrange(replace(stage_map, reader=self.cluster.stage_map.reader))
        return self.cluster

    def open(self, environment: ClusterEnvironment, options: Options) -> None:
        """Connect the processes, unless they are. All of them call it; the wait is long.

        Args:
            environment: in which they find each other.
            options: of the strategy.
        Raises:
            PeerError: not all come, or one ends meanwhile.
            ConfigurationError: this process was started anew, and cannot come back.
        """
        assert self.cluster is not None
        if self.cluster.apart:
            raise ConfigurationError(
                "this process was started anew, and has not come back to the others in its first run, so it cannot in "
                "another one"
            )
        rank, size = self.cluster.world.rank, self.cluster.world.world_size
        if size == 1:
            self.cluster.open()
            return
        assert self.backend is not None
        with launch.connecting(rank, size):
            found = launch.meeting(environment, rank, options.timeout, apart=self.cluster.survives)
            if self.cluster.survives and found.keeper is None:
                rank_zero_warn(
                    f"min_groups={options.min_groups}, but a trainer without it has connected these processes, so rank "
                    "0 keeps the store through which they find each other: if group 0 dies, all end. Set min_groups "
                    "for the first trainer of the script as well"
                )
            # control messages travel on the host, whatever connects the devices
            all_devices = self.backend if options.processes_per_device == 1 else "gloo"
            both = self.backend if connects_hosts(self.backend) else backends("gloo", all_devices, self.cluster.device)
            meet, store = partial(_init_dist_connection, environment, both, timeout=options.timeout), found.store
            if found.before is None:
                # if torch has a group of all processes, Lightning leaves it as it is
                self.cluster.open(store, partial(meet, store=store), found.keeper)
            else:
                number = self.cluster.group_number
                ranks = self._groups[number]
                apart = launch.meeting_apart(found, number, ranks, rank, options.timeout)
                of_group = partial(meet, ranks.index(rank), len(ranks), store=apart)
                self.cluster.open(store, of_group, found.keeper, apart)
        self.cluster.channels.control.when_agreed(self._hears)
        for request in tuple(self.noted):  # while other connections were open, or none
            self.cluster.channels.monitor.requests.note(request)

    def note(self, request: str) -> None:
        """This process was asked for something. A signal handler may call it: nothing here waits."""
        self.noted.add(request)
        if self.cluster is not None:
            self.cluster.channels.monitor.requests.note(request)

    def agreed(self, request: str) -> bool:
        """Whether all processes have agreed to do what some were asked."""
        return self.cluster is not None and self.cluster.channels.control.agreed(request)

    @contextlib.contextmanager
    def listening(self, hears: Callable[[str], None]) -> Iterator[None]:
        """Within this context, a run, somebody is told of what all have agreed to."""
        self.noted, self._hears = set(), hears
        try:
            yield
        finally:
            self._hears = nothing

    def fail(self, exception: BaseException) -> None:
        """Tell the other processes that this one ends, unless all have agreed to end here."""
        if self.cluster is None or (isinstance(exception, SIGTERMException) and self.agreed(STOP)):
            return
        self.failed = True
        self.cluster.channels.monitor.report(exception)
        meetings, this = self.cluster.meetings, self.cluster.group.ranks[self.cluster.rank]
        left = () if meetings is None else meetings.membership.ranks()
        spared = () if this in left else left  # who go on without it
        parent.end_with_this_process(spared)
        if spared and parent.started():
            names = ", ".join(map(str, spared))
            rank_zero_warn(
                f"This process has failed, but has started others that go on (of ranks {names}), and ends when they "
                "do; SIGTERM is passed on to them"
            )

    def close(self) -> None:
        """A run has ended: stop the channels. After a failure the connections are closed for good."""
        if self.cluster is not None:
            self.cluster.close(self.failed)
        if self.failed:
            self.cluster = None

    def stay(self) -> None:
        """Raise PeerError if other groups have gone on without that of this process, which may have been stopped."""
        if self.cluster is not None and self.cluster.survives and not self.failed:
            self.cluster.channels.monitor.look()

    def write(self, write: Callable[[], object]) -> None:
        """Let rank 0 write something; if its group leaves before all know that it has, the next one does so.

        Args:
            write: does it, on the process that leads.
        """
        if self.cluster is None or self.failed or not self.cluster.survives:
            write()
            return
        world, writer = self.cluster.world, -1
        world.barrier("a checkpoint")  # after which all know of the same groups
        while writer != world.ranks[0]:
            writer = world.ranks[0]
            write()
            world.barrier("a checkpoint")

    def barrier(self, name: str | None) -> None:
        """Wait for all processes, if they are connected."""
        if self.cluster is not None and not self.failed:
            self.cluster.world.barrier(f"the barrier '{name}'" if name else "a barrier")

    def broadcast(self, item: T, source: int) -> T:
        """Every process gets the source's item, if they are connected."""
        return item if self.cluster is None or self.failed else self.cluster.world.broadcast(item, source)

    def decide(self, decision: bool, unanimously: bool) -> bool:
        """Whether all processes, or any, decided so."""
        if self.cluster is None or self.failed or self.cluster.world.world_size == 1:
            return decision
        votes = int(self.cluster.world.sum(torch.tensor(int(decision))))
        return votes == self.cluster.world.world_size if unanimously else votes > 0

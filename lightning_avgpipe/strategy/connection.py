"""The connection of the strategy's processes, from the set-up of the environment to teardown."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.comm.watch import STOP
from lightning_avgpipe.strategy import checks, launch
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.utils import parent
from lightning_avgpipe.utils.device import backends, connects_hosts, device_backend, port_of
from lightning_avgpipe.utils.lightning import ClusterEnvironment, SIGTERMException, _init_dist_connection
from lightning_avgpipe.utils.patching import nothing

T = TypeVar("T")

_GRACE = timedelta(seconds=60)  # our own waits end before those of connections: their errors name stage and action


class Connection:
    """Connects the processes of one strategy, and ends them together. Several runs use one connection.

    Args:
        backend: backend of torch.distributed; None: one is chosen for the device.

    Attributes:
        backend: backend of torch.distributed; None before it is chosen.
        cluster: the processes and their channels; None before :meth:`arrange`, and after a failure.
        layout: layout of all processes on devices; None before :meth:`arrange`.
        failed: whether the last run has ended with an error, here or in another process.
        noted: requests from outside to this process in this run, such as a signal to stop.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.cluster: Cluster | None = None
        self.layout: DeviceLayout | None = None
        self.failed = False
        self.noted: set[str] = set()
        self._hears: Callable[[str], None] = nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cluster": None, "_hears": nothing}  # a trainer that has trained can be pickled

    def arrange(
        self, num_stages: int, rank: int, device: torch.device, layout: DeviceLayout, options: Options
    ) -> Cluster:
        """Make the cluster, unless there is one with the same groups of processes.

        Args:
            num_stages: K.
            rank: rank of this process among all.
            device: device of this process.
            layout: layout of all processes on devices.
            options: options of the strategy.
        """
        self.layout, several = layout, layout.world_size > 1
        checks.schedule(options, num_stages, layout.group_size(num_stages))
        self.failed = False
        if several:
            self.backend = self.backend or device_backend(None, device)
            checks.backend(self.backend, device)
        stage_map = StageMap.on(layout, num_stages, placement=options.placement)
        if self.cluster is None or self.cluster.stage_map.layout != stage_map.layout:
            if several and options.links.reader == "first":
                stage_map = replace(stage_map, reader=stage_map.owner(0))
            if several:
                gc.collect()  # an unused trainer is a reference cycle, and holds its connections until it is collected
            between = None if port_of(device).is_host or not several else device_backend(self.backend, device)
            network = ProcessGroups(rank, device, options.timeout + _GRACE, between)
            process = Process(rank, device, options.timeout.total_seconds(), network, parent.deaths)
            self.cluster = Cluster(stage_map, process)
        else:  # a plan of the last run may have placed stages elsewhere
            self.cluster.rearrange(replace(stage_map, reader=self.cluster.stage_map.reader))
        return self.cluster

    def open(self, environment: ClusterEnvironment, options: Options) -> None:
        """Connect the processes, unless they are connected. Every process calls it, and waits for all others.

        Args:
            environment: environment through which processes find each other.
            options: options of the strategy.
        Raises:
            PeerError: a process does not come within the timeout, or ends meanwhile.
        """
        assert self.cluster is not None
        rank, size = self.cluster.world.rank, self.cluster.world.world_size
        if size == 1:
            self.cluster.open()
            return
        assert self.backend is not None
        with launch.connecting(rank, size):
            store = launch.shared_store(environment, rank, options.timeout)
            # control messages travel on the host, whatever connects the devices
            all_devices = self.backend if options.averaging.processes_per_device == 1 else "gloo"
            both = self.backend if connects_hosts(self.backend) else backends("gloo", all_devices, self.cluster.device)
            # if torch has a group of all processes, Lightning leaves it as it is
            meet = partial(_init_dist_connection, environment, both, timeout=options.timeout, store=store)
            self.cluster.open(store, meet, "torchrun's agent" if launch.has_agent() else None)
        self.cluster.control.when_agreed(self._hears)
        for request in tuple(self.noted):  # while other connections were open, or none
            self.cluster.watch.request(request)

    def note(self, request: str) -> None:
        """Note a request to this process. A signal handler may call it: nothing here waits."""
        self.noted.add(request)
        if self.cluster is not None:
            self.cluster.watch.request(request)

    def agreed(self, request: str) -> bool:
        """Return whether all processes know by now of a request that some of them were given."""
        return self.cluster is not None and self.cluster.control.agreed(request)

    @contextlib.contextmanager
    def listening(self, hears: Callable[[str], None]) -> Iterator[None]:
        """Within this context, a run, a function is told of each request that all processes have agreed on."""
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
        self.cluster.watch.report(exception)
        parent.end_with_this_process()

    def close(self) -> None:
        """Stop the channels at the end of a run; after a failure, close the connections for good."""
        if self.cluster is not None:
            self.cluster.close(self.failed)
        if self.failed:
            self.cluster = None

    def barrier(self, name: str | None) -> None:
        """Wait for all processes, if they are connected."""
        if self.cluster is not None and not self.failed:
            self.cluster.world.barrier(f"the barrier '{name}'" if name else "a barrier")

    def broadcast(self, item: T, source: int) -> T:
        """Return the source's item on every process, if they are connected; else the own item."""
        return item if self.cluster is None or self.failed else self.cluster.world.broadcast(item, source)

    def decide(self, decision: bool, unanimously: bool) -> bool:
        """Return whether all processes, or any, decided so."""
        if self.cluster is None or self.failed or self.cluster.world.world_size == 1:
            return decision
        votes = int(self.cluster.world.sum(torch.tensor(int(decision), device="cpu")))
        return votes == self.cluster.world.world_size if unanimously else votes > 0

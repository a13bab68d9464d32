"""The device layout: which processes share a device, and which of them make up a group.

::

    two nodes of two devices, two processes on each device, K = 4

                device     0   1     2   3
    first process  rank    0   1     4   5      group 0
    second process rank    2   3     6   7      group 1
                          node 0    node 1

    two replicas of K = 2 stages on four devices: groups 0 and 1 train the same models

Ranks go node by node. Within a node, the first processes of all its devices come before the second ones, so that no
group has two processes on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_avgpipe.errors import ConfigurationError


@dataclass(frozen=True)
class DeviceLayout:
    """The number of nodes, devices and processes, and how processes share devices.

    Attributes:
        devices: number of devices of each node.
        nodes: number of nodes.
        sharing: number of processes on each device.
        replicas: number of groups that train the same models.
        stage_replicas: for each stage, number of processes that share its micro-batches; empty: one process hosts whole
            stages.
        models: number of groups that train different models, for each replica.
    """

    devices: int
    nodes: int = 1
    sharing: int = 1
    replicas: int = 1
    stage_replicas: tuple[int, ...] = ()
    models: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes."""
        return self.nodes * self.devices

    @property
    def node_size(self) -> int:
        """The number of processes of each node."""
        return self.sharing * self.devices

    @property
    def world_size(self) -> int:
        """The number of all processes."""
        return self.nodes * self.node_size

    def device_of(self, local_rank: int) -> int:
        """Return which of its node's devices a process uses.

        Raises:
            ConfigurationError: the local rank is not smaller than the number of processes of a node.
        """
        if local_rank >= self.node_size:
            raise ConfigurationError(
                f"this process has local rank {local_rank}, but {self} make {self.node_size} processes on each node; "
                f"start {self.node_size}, or give as many devices as there are"
            )
        return local_rank % self.devices

    @property
    def devices_of_replica(self) -> int:
        """The number of devices that a group may use, so that there are enough groups for all replicas and models."""
        return max(1, min(self.num_devices, self.num_devices * self.sharing // (self.replicas * self.models)))

    def group_size(self, num_stages: int) -> int:
        """Return the number of processes that host K stages together."""
        return sum(self.stage_replicas) or min(num_stages, self.devices_of_replica)

    def groups(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group, ascending; groups are in the order of their first ranks.

        Args:
            num_stages: K, a multiple or a divisor of the number of devices.
        """
        size = self.group_size(num_stages)
        found = [
            tuple(self._rank(device, process) for device in range(first, first + size))
            for first in range(0, self.num_devices - size + 1, size)
            for process in range(self.sharing)
        ]
        return tuple(sorted(found))

    def _rank(self, device: int, process: int) -> int:
        node, number = divmod(device, self.devices)
        return node * self.node_size + process * self.devices + number

    def __str__(self) -> str:
        nodes = f", num_nodes={self.nodes}" if self.nodes > 1 else ""
        shared = f", processes_per_device={self.sharing}" if self.sharing > 1 else ""
        replicas = f", replicas={list(self.stage_replicas) or self.replicas}"
        replicas = replicas if self.stage_replicas or self.replicas > 1 else ""
        models = f", groups={self.models}" if self.models > self.sharing else ""
        return f"devices={self.devices}{nodes}{shared}{replicas}{models}"

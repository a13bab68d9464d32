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
    """Processes on devices.

    Attributes:
        devices: of each node.
        nodes: how many there are.
        sharing: processes on each device.
        replicas: groups that train the same models.
        stage_replicas: processes that share the micro-batches of each stage; empty: one process hosts whole stages.
    """

    devices: int
    nodes: int = 1
    sharing: int = 1
    replicas: int = 1
    stage_replicas: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    @property
    def node_size(self) -> int:
        """Processes of each node."""
        return self.sharing * self.devices

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.nodes * self.node_size

    def device_of(self, local_rank: int) -> int:
        """Which of its node's devices a process has.

        Raises:
            ConfigurationError: there are not so many processes.
        """
        if local_rank >= self.node_size:
            raise ConfigurationError(
                f"this process has local rank {local_rank}, but {self} make {self.node_size} processes on each node; "
                f"start {self.node_size}, or give as many devices as there are"
            )
        return local_rank % self.devices

    @property
    def devices_of_replica(self) -> int:
        """Devices that one group may have, so that there are as many groups as replicas."""
        return max(1, min(self.num_devices, self.num_devices * self.sharing // self.replicas))

    def group_size(self, num_stages: int) -> int:
        """Processes that host K stages together."""
        return sum(self.stage_replicas) or min(num_stages, self.devices_of_replica)

    def groups(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, ascending; also the first ranks of all groups are.

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
        return f"devices={self.devices}{nodes}{shared}{replicas}"

"""The stage map: which process hosts which stage.

::

    K = 4 stages on 2 processes      rank 1: stages 0, 2       rank 0: stages 1, 3
    the last stage is always on rank 0, and so are the loss, the loggers and the checkpoints
    in the shape of a V               rank 1: stages 1, 2       rank 0: stages 0, 3

    K = 2 stages on 4 processes       group 0: stage 0 on rank 1, stage 1 on rank 0
                                      group 1: stage 0 on rank 3, stage 1 on rank 2
    with replicas = 2                 both groups are a team: they train the same models
    ranks of a stage map are those within a group; its layout gives those among all processes

Processes that share devices are in different groups, so that no connection between devices has one of them twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule.kinds import Placement

__all__ = ["StageMap"]


@dataclass(frozen=True)
class StageMap:
    """Stages on the processes of each group; every group has the same.

    Attributes:
        num_stages: K.
        layout: the ranks of each group among all processes; shape ``(groups, processes of a group)``.
        reader: rank within each group of the process that reads the group's data.
        replicas: groups that train the same models, each on its share of the data; they are a *team*, and teams train
            other models. Groups of a team follow each other.
        placement: how several stages are placed on each process: in a ``"loop"``, or there and back, as a ``"v"``.
    """

    num_stages: int
    layout: tuple[tuple[int, ...], ...] = ((0,),)
    reader: int = 0
    replicas: int = 1
    placement: Placement = "loop"

    @classmethod
    def on(
        cls, device_layout: DeviceLayout, num_stages: int, reader: int = 0, placement: Placement = "loop"
    ) -> StageMap:
        """Stages on the processes of devices.

        Raises:
            ConfigurationError: K is neither a multiple nor a divisor of the number of devices that a replica has; the
                groups are no multiple of the replicas.
        """
        devices, replicas = device_layout.devices_of_replica, device_layout.replicas
        if num_stages % devices and devices % num_stages:
            each = " of each replica" if replicas > 1 else ""
            raise ConfigurationError(
                f"num_stages={num_stages} on {devices} devices{each}: the number of stages must be a multiple of the "
                f"number of devices; use num_stages={max(1, num_stages // devices) * devices}"
            )
        layout = device_layout.groups(num_stages)
        if len(layout) % replicas or device_layout.num_devices % len(layout[0]):
            size = len(layout[0])
            raise ConfigurationError(
                f"replicas={replicas} of {num_stages} stages on {device_layout.num_devices} devices: each replica has "
                f"{size} of them, and there must be a whole number of replicas; use devices={replicas * size}, or "
                "another number of replicas or stages"
            )
        return cls(num_stages, layout, reader, replicas, placement)

    @property
    def group_size(self) -> int:
        """Processes of each group."""
        return len(self.layout[0])

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.layout)

    @property
    def num_teams(self) -> int:
        """How many there are whose models differ."""
        return self.num_groups // self.replicas

    def team(self, group: int) -> tuple[int, int]:
        """The team of a group, and which of its replicas the group is."""
        return divmod(group, self.replicas)

    @property
    def world_size(self) -> int:
        """Processes of all groups."""
        return self.num_groups * self.group_size

    @property
    def leader(self) -> int:
        """The process of each group that computes the loss; that of group 0 logs and writes."""
        return self.owner(self.num_stages - 1)

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The processes of a group that host a stage."""
        back, rank = divmod(self.num_stages - 1 - stage, self.group_size)
        return (self.group_size - 1 - rank if self.placement == "v" and back % 2 else rank,)

    def owner(self, stage: int) -> int:
        """The first of them, from which others get what the stage has."""
        return self.ranks(stage)[0]

    def owners(self) -> list[int]:
        """Of all stages, shape ``(K,)``."""
        return [self.owner(stage) for stage in range(self.num_stages)]

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a process hosts, ascending."""
        return tuple(stage for stage in range(self.num_stages) if rank in self.ranks(stage))

    def position(self, rank: int) -> tuple[int, int]:
        """Group, and rank within it, of a rank among all."""
        return next((number, ranks.index(rank)) for number, ranks in enumerate(self.layout) if rank in ranks)

    def name(self, rank: int) -> str:
        """Of a process by its rank among all, for messages: as ``rank 3 (stage 0 of group 1)``."""
        number, position = self.position(rank)
        stages = self.stages(position)
        group = f" of group {number}" if self.num_groups > 1 else ""
        if self.replicas > 1:
            group = f" of replica {number}" if self.num_teams == 1 else f"{group}, replica {self.team(number)[1]}"
        return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}{group})"

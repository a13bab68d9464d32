"""The topology: nodes, devices and processes, which process hosts which stage, and which processes communicate.

::

    DeviceLayout    which processes share a device, and which of them make up a group
    StageMap        which process of each group hosts which stage
    Edge, Route     one-way connections between stages, and between processes
    Party           a set of processes that run collectives
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule.kinds import Direction, Placement


@dataclass(frozen=True)
class DeviceLayout:
    """The number of nodes, devices and processes, and how processes share devices.

    ::

        two nodes of two devices, two processes on each device, K = 4

                    device     0   1     2   3
        first process  rank    0   1     4   5      group 0
        second process rank    2   3     6   7      group 1
                              node 0    node 1

        two replicas of K = 2 stages on four devices: groups 0 and 1 train the same models

    Ranks go node by node. Within a node, the first processes of all its devices come before the second ones, so that no
    group has two processes on one device: a communicator of devices cannot have a device twice.

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
        """The most devices that a group may use, so that there are enough groups for all replicas and models."""
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


@dataclass(frozen=True)
class StageMap:
    """A mapping of stages to the processes of each group; it is the same for every group.

    ::

        K = 4 stages on 2 processes      rank 1: stages 0, 2       rank 0: stages 1, 3
        the last stage is always on rank 0, and with it the loss, the loggers and the checkpoints
        in the shape of a V               rank 1: stages 1, 2       rank 0: stages 0, 3

        K = 2 stages on 4 processes       group 0: stage 0 on rank 1, stage 1 on rank 0
                                          group 1: stage 0 on rank 3, stage 1 on rank 2
        with replicas = 2                 both groups are a team: they train the same models

        K = 2 stages with 3 and 1 replicas    stage 0 on ranks 1, 2, 3      stage 1 on rank 0
                                  micro-batches    0 3 ..  1 4 ..  2 5 ..             all
        ranks of a stage map are those within a group; its layout gives those among all processes

    Attributes:
        num_stages: number of stages, K.
        layout: the ranks of each group among all processes; shape ``(groups, processes of a group)``.
        reader: rank within each group of the process that reads the group's data.
        replicas: number of groups that train the same models, each on its share of the data. Such groups are a *team*,
            and other teams train other models. Groups of a team are consecutive: replica r of team t is group
            ``t * replicas + r``.
        placement: how several stages are placed on each process: in a ``"loop"``, or forth and back, as a ``"v"``.
        stage_replicas: for each stage, number of a group's processes that share its micro-batches, in turns; shape
            ``(K,)``. Empty: each process hosts whole stages.
        order: ranks in a group, from the last stage to the first, and for each stage in the order of turns; rank 0
            comes first. Empty: ascending.
        shares_devices: whether several processes use the same device.
    """

    num_stages: int
    layout: tuple[tuple[int, ...], ...] = ((0,),)
    reader: int = 0
    replicas: int = 1
    placement: Placement = "loop"
    stage_replicas: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    shares_devices: bool = False

    @classmethod
    def on(cls, device_layout: DeviceLayout, num_stages: int, placement: Placement = "loop") -> StageMap:
        """Map stages to the processes of a device layout, which has been checked for this number of stages."""
        return cls(
            num_stages,
            device_layout.groups(num_stages),
            replicas=device_layout.replicas,
            placement=placement,
            stage_replicas=device_layout.stage_replicas,
            shares_devices=device_layout.sharing > 1,
        )

    def placed(self, devices: Sequence[Sequence[int]]) -> StageMap:
        """Return a map of the same processes with other stages, each of which one or more processes host.

        Args:
            devices: for each stage, the ranks in a group of its processes, ascending; the last stage's include rank 0.
        """
        counts = tuple(map(len, devices))
        order = tuple(rank for ranks in reversed(devices) for rank in ranks)
        return replace(self, num_stages=len(devices), stage_replicas=counts, order=order)

    @property
    def given_stages(self) -> int:
        """The K that was asked for, even if :meth:`placed` changed it; it determines the division of batches."""
        return self.group_size if self.order else self.num_stages

    @property
    def group_size(self) -> int:
        """The number of processes of each group."""
        return len(self.layout[0])

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.layout)

    @property
    def num_teams(self) -> int:
        """The number of teams: sets of groups that train the same models."""
        return self.num_groups // self.replicas

    @property
    def world_size(self) -> int:
        """The number of processes of all groups."""
        return self.num_groups * self.group_size

    def ranks(self, stage: int, trains: bool = True) -> tuple[int, ...]:
        """Return the ranks in a group of the processes that host a stage, in the order in which they take turns.

        In evaluation the last stage runs on the first of them only, so that all results are there.
        """
        if self.stage_replicas:
            first = sum(self.stage_replicas[stage + 1 :])
            count = self.stage_replicas[stage] if trains or stage < self.num_stages - 1 else 1
            return (self.order or tuple(range(self.group_size)))[first : first + count]
        back, rank = divmod(self.num_stages - 1 - stage, self.group_size)
        return (self.group_size - 1 - rank if self.placement == "v" and back % 2 else rank,)

    def owner(self, stage: int) -> int:
        """Return the first process that hosts a stage. Other processes get the stage's state from it."""
        return self.ranks(stage)[0]

    def share(self, stage: int, rank: int, trains: bool = True) -> tuple[int, int]:
        """Return which micro-batches of a stage a process has: every n-th from the first one, as ``(first, n)``."""
        ranks = self.ranks(stage, trains)
        return ranks.index(rank), len(ranks)

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a process hosts, ascending."""
        return tuple(stage for stage in range(self.num_stages) if rank in self.ranks(stage))

    def position(self, rank: int) -> tuple[int, int]:
        """Return, for a rank among all processes, the number of its group and its rank within the group."""
        return next((number, ranks.index(rank)) for number, ranks in enumerate(self.layout) if rank in ranks)


def pairs(stage_map: StageMap, stage: int, other: int) -> list[tuple[int, int]]:
    """Return the pairs of processes of two stages, as ranks in a group, that have micro-batches in common."""
    found = []
    for trains in (True, False):
        here, there = stage_map.ranks(stage, trains), stage_map.ranks(other, trains)
        found += [(here[i % len(here)], there[i % len(there)]) for i in range(math.lcm(len(here), len(there)))]
    return list(dict.fromkeys(found))


def names(stage_map: StageMap) -> list[str]:
    """Return the names of all processes for messages, such as ``rank 3 (stage 0 of group 1)``."""
    return [_name(stage_map, rank) for rank in range(stage_map.world_size)]


def _name(stage_map: StageMap, rank: int) -> str:
    number, position = stage_map.position(rank)
    stages = stage_map.stages(position)
    group = f" of group {number}" if stage_map.num_groups > 1 else ""
    if stage_map.stage_replicas:
        replica, count = stage_map.share(stages[0], position)
        group = f", replica {replica}{group}" if count > 1 else group
    if stage_map.replicas > 1:
        replica = number % stage_map.replicas
        group = f" of replica {number}" if stage_map.num_teams == 1 else f"{group}, replica {replica}"
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}{group})"


@dataclass(frozen=True)
class Edge:
    """One direction of the hop between two neighbouring stages, in one pipeline.

    Attributes:
        pipeline: number n of the pipeline.
        hop: number of the hop, between the stages ``hop`` and ``hop + 1``.
        direction: ``"forward"`` for values, ``"backward"`` for their gradients.
    """

    pipeline: int
    hop: int
    direction: Direction

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.hop if self.direction == "forward" else self.hop + 1

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.hop + 1 if self.direction == "forward" else self.hop

    def __str__(self) -> str:
        return f"{self.direction} {self.hop}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True)
class Route:
    """A one-way connection between two processes. Messages of different routes do not wait for each other.

    Attributes:
        what: what travels on it: values or gradients of an edge, or another kind of message.
        source: rank among all of the sending process.
        target: rank among all of the receiving process.
    """

    what: Edge | Literal["news", "reports", "relay", "batches"]
    source: int
    target: int

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Party:
    """A set of processes that run collectives together.

    Attributes:
        what: kind of the set; different kinds have connections of their own.
        ranks: ranks of the members among all processes.
        on_host: whether all collectives run on the host; otherwise they also run between devices.
    """

    what: str
    ranks: tuple[int, ...]
    on_host: bool = True


# -- parties and routes of a stage map -------------------------------------------------------------------------------


def all_parties(stage_map: StageMap) -> Iterator[Party]:
    """Yield all parties of a run, in the order in which they connect. A process is in at most one of each kind.

    ``group`` are the processes of one group, and ``leaders`` the first processes of all groups. ``groups`` are
    processes at the same position of groups that train different models, which they average. ``replicas`` are
    processes at the same position of groups that train the same models, or the replicas of one stage. Processes that
    share devices exchange tensors on the host, since a communicator of devices cannot have a device twice.
    """
    layout, count = stage_map.layout, stage_map.replicas
    yield Party("world", tuple(range(stage_map.world_size)))
    yield from stage_replicas(stage_map)
    if len(layout) == 1:
        return
    yield from (Party("group", ranks) for ranks in layout)
    yield Party("leaders", tuple(ranks[0] for ranks in layout))
    for ranks in zip(*layout, strict=True):  # at each position
        teams = [ranks[replica::count] for replica in range(count)]
        replicas = [ranks[first : first + count] for first in range(0, len(ranks), count)]
        for what, sets in (("groups", teams), ("replicas", replicas)):
            yield from (
                Party(what, tuple(sorted(members)), stage_map.shares_devices) for members in sets if len(members) > 1
            )


def stage_replicas(stage_map: StageMap) -> Iterator[Party]:
    """Yield the replicas of each stage that has several."""
    for ranks in stage_map.layout:
        for stage, count in enumerate(stage_map.stage_replicas):
            if count > 1:
                yield Party("replicas", tuple(ranks[i] for i in stage_map.ranks(stage)), on_host=False)


def subsets(stage_map: StageMap, ranks: Sequence[int]) -> list[Party]:
    """Return, for each group, a party of some of its processes, given by their ranks in the group."""
    return [Party("subset", tuple(group[i] for i in ranks), on_host=False) for group in stage_map.layout]


def control_routes(stage_map: StageMap) -> Iterator[Route]:
    """Yield the routes of everything that does not travel between stages."""
    for leader, *others in stage_map.layout:
        if leader != 0:
            yield Route("relay", 0, leader)
        for rank in others:
            yield Route("news", leader, rank)
            yield Route("reports", rank, leader)
    for ranks in stage_map.layout:
        reader = ranks[stage_map.reader]
        yield from (Route("batches", reader, rank) for rank in ranks if rank != reader)

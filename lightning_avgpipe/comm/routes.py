"""Routes and parties: the one-way connections between processes, and the sets of processes that run collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_avgpipe.comm.stage_map import StageMap

Direction = Literal["forward", "backward"]


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


# -- of the stages of a stage map ------------------------------------------------------------------------------------


def all_parties(stage_map: StageMap) -> Iterator[Party]:
    """Yield all parties of a run, in the order in which they connect."""
    layout = stage_map.layout
    yield Party("world", tuple(range(stage_map.world_size)))
    yield from stage_replicas(stage_map)
    if len(layout) == 1:
        return
    yield from (Party("group", ranks) for ranks in layout)
    yield Party("leaders", tuple(ranks[0] for ranks in layout))
    for position in range(stage_map.group_size):
        if stage_map.num_teams > 1:
            yield from (counterparts(stage_map, position, replica) for replica in range(stage_map.replicas))
        if stage_map.replicas > 1:
            yield from (replicas(stage_map, position, team) for team in range(stage_map.num_teams))


def counterparts(stage_map: StageMap, position: int, replica: int) -> Party:
    """Return the processes at a position of groups of different teams, which average their models.

    Processes that share devices exchange tensors on the host, since a communicator of devices cannot have a device
    twice.
    """
    ranks = [ranks[position] for ranks in stage_map.layout[replica :: stage_map.replicas]]
    return Party("teams", tuple(sorted(ranks)), on_host=stage_map.shares_devices)


def replicas(stage_map: StageMap, position: int, team: int) -> Party:
    """Return the processes at a position of the groups of one team, which train the same models."""
    count = stage_map.replicas
    ranks = [ranks[position] for ranks in stage_map.layout[team * count : (team + 1) * count]]
    return Party("replicas", tuple(sorted(ranks)), on_host=stage_map.shares_devices)


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

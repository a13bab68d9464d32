"""Parties: which processes meet, and which tell each other something, for the stages that they host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_avgpipe.comm.meetings import AVERAGING
from lightning_avgpipe.comm.routes import Party, Route
from lightning_avgpipe.comm.stage_map import StageMap


@dataclass(frozen=True)
class Parties:
    """All that meet, in the order in which they connect.

    Attributes:
        stage_map: who hosts what. Processes that share devices meet on the host, since no communicator of devices can
            have a device twice.
        survives: whether groups may leave, so that no connection may be of several.
    """

    stage_map: StageMap
    survives: bool = False

    def __iter__(self) -> Iterator[Party]:
        stage_map, layout = self.stage_map, self.stage_map.layout
        if not self.survives:
            yield Party("world", tuple(range(stage_map.world_size)))
        yield from self.of_stages()
        if len(layout) > 1 or self.survives:
            yield from (Party("group", ranks) for ranks in layout)
        if len(layout) > 1 and not self.survives:
            yield Party("leaders", tuple(ranks[0] for ranks in layout))
            for position in range(stage_map.group_size):
                if stage_map.num_teams > 1:
                    yield from (self.counterparts(position, replica) for replica in range(stage_map.replicas))
                if stage_map.replicas > 1:
                    yield from (self.replicas(position, team) for team in range(stage_map.num_teams))

    def counterparts(self, position: int, replica: int) -> Party:
        """The processes at a position of groups of different teams."""
        ranks = [ranks[position] for ranks in self.stage_map.layout[replica :: self.stage_map.replicas]]
        return Party(AVERAGING, tuple(sorted(ranks)), on_host=self.stage_map.shares_devices)

    def replicas(self, position: int, team: int) -> Party:
        """The processes at a position of the groups of one team."""
        count = self.stage_map.replicas
        ranks = [ranks[position] for ranks in self.stage_map.layout[team * count : (team + 1) * count]]
        return Party("replicas", tuple(sorted(ranks)), on_host=self.stage_map.shares_devices)

    def of_stages(self) -> Iterator[Party]:
        """The replicas of single stages."""
        for ranks in self.stage_map.layout:
            for stage, count in enumerate(self.stage_map.stage_replicas):
                if count > 1:
                    yield Party("replicas", tuple(ranks[i] for i in self.stage_map.ranks(stage)), on_host=False)


def subsets(stage_map: StageMap, ranks: Sequence[int]) -> list[Party]:
    """Some processes of each group, by their ranks in it."""
    return [Party("subset", tuple(group[i] for i in ranks), on_host=False) for group in stage_map.layout]


def control_routes(stage_map: StageMap, relays: bool) -> Iterator[Route]:
    """Of all that is not between stages."""
    for leader, *others in stage_map.layout:
        if leader != 0 and relays:
            yield Route("relay", 0, leader)
        for rank in others:
            yield Route("news", leader, rank)
            yield Route("reports", rank, leader)
    for ranks in stage_map.layout:
        reader = ranks[stage_map.reader]
        yield from (Route("batches", reader, rank) for rank in ranks if rank != reader)

"""Membership: which groups of processes take part. One that dies leaves, and the others go on without it.

The store of all processes has the list of those that have left, in order. It only grows, so its length says all:
whoever has read as much of it knows the same groups. What groups do together is tried by the list as it was when it
began; if it has grown meanwhile, all of them begin again (``comm/meetings.py``).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist

from lightning_avgpipe.comm.board import sendable
from lightning_avgpipe.comm.stage_map import StageMap

_KEY = "departures"


@dataclass(frozen=True)
class Departure:
    """A group that has left.

    Attributes:
        group: its number at the start.
        why: it has left.
    """

    group: int
    why: str


class Membership:
    """What this process knows of the groups.

    Args:
        stage_map: with the groups at the start.
        rank: of this process among all.
        min_groups: as many must be left.

    Attributes:
        departures: of groups that have left, in order.
        begun: whether groups may leave: not before the first iteration is done, in which they connect and agree.
    """

    def __init__(self, stage_map: StageMap, rank: int, min_groups: int) -> None:
        self.departures: tuple[Departure, ...] = ()
        self.begun = False
        self._stage_map = stage_map
        self._min_groups = min_groups
        self._store: dist.Store | None = None
        self._outlives = False
        self.group = self.group_of(rank)

    def begin(self, store: dist.Store, outlives: bool = False) -> None:
        """A run begins.

        Args:
            store: for one thread; it has what it had in earlier runs.
            outlives: whether it is there without rank 0.
        """
        self._store, self._outlives, self.begun = store, outlives, False

    @property
    def count(self) -> int:
        """Groups that have left."""
        return len(self.departures)

    def group_of(self, rank: int) -> int:
        """The group of a process, by its number at the start."""
        return self._stage_map.position(rank)[0]

    @property
    def peers(self) -> frozenset[int]:
        """The processes of the own group."""
        return frozenset(self._stage_map.layout[self.group])

    def groups(self, count: int | None = None) -> tuple[int, ...]:
        """The groups that were left after so many departures; None: after all that are known."""
        left = {departure.group for departure in self.departures[:count]}
        return tuple(number for number in range(self._stage_map.num_groups) if number not in left)

    def ranks(self, count: int | None = None) -> tuple[int, ...]:
        """The processes of these groups, ascending."""
        return tuple(sorted(rank for group in self.groups(count) for rank in self._stage_map.layout[group]))

    def ends_all(self, group: int) -> str:
        """Why all end if a group does; empty if the others may go on."""
        if not self.begun:
            return "Groups can go on without another from the end of the first iteration of training on"
        if group == 0 and not self._outlives:
            return (
                "Groups cannot go on without group 0: its rank 0 keeps the store through which they find each other. "
                "Resume from the last checkpoint"
            )
        if len(self.groups()) - 1 < self._min_groups:
            return f"min_groups={self._min_groups}, and {len(self.groups()) - 1} would be left"
        return ""

    def leave(self, group: int, why: str) -> str:
        """Let a group leave, unless it has; returns why it cannot, if its end is that of all, or nothing."""
        assert self._store is not None
        while True:
            self.read()
            if group not in self.groups():
                return ""
            if reason := self.ends_all(group):
                return reason
            new = (*self.departures, Departure(group, sendable(why)))
            self._store.compare_set(_KEY, _written(self.departures), _written(new))

    def read(self) -> None:
        """Take note of what the store has."""
        assert self._store is not None
        if self._store.check([_KEY]):
            found = json.loads(self._store.get(_KEY))
            if len(found) > self.count:
                self.departures = tuple(Departure(*entry) for entry in found)


def _written(departures: Collection[Departure]) -> str:
    return json.dumps([[d.group, d.why] for d in departures]) if departures else ""

"""Membership: which groups of processes take part. One that dies leaves, and the others go on without it.

The store of all processes has the list of those that have left or come back, in order. It only grows, so its length
says all: whoever has read as much of it knows the same groups. What groups do together is tried by the list as it was
when it began; if it has grown meanwhile, all of them begin again (``comm/meetings.py``).

::

    groups 0 1 2     group 1 dies     group 1, started anew, comes back     group 1 dies again
                     leave 1          leave 1, enter 1                      leave 1, enter 1, leave 1
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass

import torch.distributed as dist

from lightning_avgpipe.comm.board import sendable

_KEY = "changes"


@dataclass(frozen=True)
class Change:
    """A group has left, or come back.

    Attributes:
        group: its number at the start.
        why: it has left.
        enters: whether it has come back.
    """

    group: int
    why: str = ""
    enters: bool = False


class Membership:
    """What this process knows of the groups.

    Args:
        layout: the ranks of each group at the start.
        rank: of this process among all.
        min_groups: as many must be left.

    Attributes:
        layout: as given.
        group: of this process, by its number at the start.
        changes: groups that have left and come back, in order.
        begun: whether groups may leave: not before the first iteration is done, in which they connect and agree.
        apart: whether this process was started anew, and is with its own group only.
    """

    def __init__(self, layout: tuple[tuple[int, ...], ...], rank: int, min_groups: int) -> None:
        self.changes: tuple[Change, ...] = ()
        self.begun = self.apart = False
        self.layout = layout
        self._min_groups = min_groups
        self._store: dist.Store | None = None
        self._outlives = False
        self._entered = 0  # changes before this process was among those that take part
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
        """Times that groups have left or come back."""
        return len(self.changes)

    def group_of(self, rank: int) -> int:
        """The group of a process, by its number at the start."""
        return next(number for number, ranks in enumerate(self.layout) if rank in ranks)

    def groups(self, count: int | None = None) -> tuple[int, ...]:
        """The groups that were there after so many changes; None: after all that are known."""
        there = dict.fromkeys(range(len(self.layout)), True)
        there.update((change.group, change.enters) for change in self.changes[:count])
        return tuple(number for number, is_there in there.items() if is_there)

    def ranks(self, count: int | None = None) -> tuple[int, ...]:
        """The processes of these groups, ascending."""
        return tuple(sorted(rank for group in self.groups(count) for rank in self.layout[group]))

    def is_first(self, rank: int) -> bool:
        """Whether a process is the first one of its rank: its group has never left."""
        return all(change.group != self.group_of(rank) for change in self.changes)

    def ends_all(self, group: int) -> str:
        """Why all end if a group does; empty if the others may go on."""
        if self.apart:
            return f"The other groups go on without group {group}, which has not come back"
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
        while True:
            self.read()
            if group not in self.groups():
                return ""
            if reason := self.ends_all(group):
                return reason
            self._add(Change(group, sendable(why)))

    def read(self) -> str | None:
        """Take note of what the store has; returns why this process's group has left since it is there, or None."""
        assert self._store is not None
        found = _listed(self._store)
        if len(found) > self.count:
            self.changes = found
        left = (change for change in self.changes[self._entered :] if change.group == self.group and not change.enters)
        return next((change.why for change in left), None)

    # -- groups that come back ---------------------------------------------------------------------------------------

    def stand_apart(self) -> None:
        """This process was started anew: in its store, which its group has alone, all other groups have left."""
        others = (number for number in range(len(self.layout)) if number != self.group)
        self.changes, self.apart = tuple(map(Change, others)), True

    def enter(self, group: int, count: int) -> bool:
        """Let a group come back, after exactly so many changes; tells whether it has: not if another one has left.

        All that were there have agreed to it, and call this.
        """
        while True:
            self.read()
            if self.count > count:
                return _enters(self.changes, group, count)
            self._add(Change(group, enters=True))

    def join(self, store: dist.Store, count: int) -> bool | None:
        """From now on this process, which was started anew, is one of all, if these let its group come back.

        Args:
            store: of all processes; for one thread.
            count: changes before.
        Returns:
            Whether they have; None: they have not decided.
        """
        found = _listed(store)
        if len(found) <= count:
            return None
        if entered := _enters(found, self.group, count):
            self._store, self._entered, self.changes = store, count + 1, found
            self.begun, self.apart = True, False
        return entered

    def _add(self, change: Change) -> None:
        """Unless another process is faster."""
        assert self._store is not None
        self._store.compare_set(_KEY, _written(self.changes), _written((*self.changes, change)))


def _enters(changes: Sequence[Change], group: int, count: int) -> bool:
    return changes[count].enters and changes[count].group == group


def _listed(store: dist.Store) -> tuple[Change, ...]:
    return tuple(Change(*entry) for entry in json.loads(store.get(_KEY))) if store.check([_KEY]) else ()


def _written(changes: Collection[Change]) -> str:
    return json.dumps([astuple(change) for change in changes]) if changes else ""

"""Actions and schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.kinds import GRAPH, Kind


class Action(NamedTuple):
    """What a stage does with one micro-batch.

    Attributes:
        kind: forward, backward, or half of a backward.
        micro_batch: i, 0-based.
    """

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """For each stage the order of its actions: ``schedule[k]`` is the row of stage k.

    Only the order: times follow from the costs. Which weights an action uses and which stage receives a value are
    other questions, so that schedules with several weight versions need no other kind of row.

    Attributes:
        name: how it was built.
        num_stages: K.
        num_microbatches: M.
        rows: one row of actions per stage, shape ``(num_stages, any)``.
        warm_up: the warm-up that the rows were built from, shape ``(num_stages,)``; empty for rows made by hand.
        turns: where a process hosts several stages that take turns in an order of their own: for each such process,
            whose turn it is, by stage, one entry for each action. Empty: what is most urgent goes first.
        lines: of stages that pass messages on among themselves: the rows of one after those of the other. Line l treats
            the micro-batches i with ``i % lines == l``.
        segments: in how many a message goes on from a stage that runs G to the stage behind it; 1: as a whole.
    Raises:
        ScheduleError: another number of rows or warm-ups than of stages; turns that are not those of the rows.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    # Not read off the rows: with w = M - 1 and with w = M they are the same.
    warm_up: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    lines: int = 1
    segments: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) != self.num_stages:
            raise ScheduleError(f"{len(self.rows)} rows for {self.num_stages} stages; give one row per stage")
        if self.num_stages % self.lines:
            raise ScheduleError(f"{self.num_stages} stages are not {self.lines} lines of the same length")
        if self.warm_up and len(self.warm_up) != self.num_stages:
            raise ScheduleError(
                f"{len(self.warm_up)} warm-ups for {self.num_stages} stages; give one per stage, or none for rows "
                "made by hand"
            )
        found = Counter(stage for turns in self.turns for stage in turns)
        if self.turns and found != Counter({k: len(row) for k, row in enumerate(self.rows) if row}):
            raise ScheduleError(
                f"turns has {dict(sorted(found.items()))} entries of stages, but the rows of actions have "
                f"{ {k: len(row) for k, row in enumerate(self.rows)} }; give one entry for each action"
            )
        if self.turns and sum(len(set(turns)) for turns in self.turns) > self.num_stages:
            raise ScheduleError("turns has a stage on two processes; give each stage to one")

    @classmethod
    def of_orders(
        cls, name: str, num_microbatches: int, orders: Sequence[Sequence[tuple[int, Action]]], lines: int = 1
    ) -> Schedule:
        """From what each process does, one action after another.

        Args:
            name: how it was built.
            num_microbatches: M.
            orders: of each process the actions, each with its stage.
            lines: of stages.
        """
        num_stages = 1 + max(stage for order in orders for stage, _ in order)
        rows = tuple(
            tuple(action for order in orders for stage, action in order if stage == k) for k in range(num_stages)
        )
        turns = tuple(tuple(stage for stage, _ in order) for order in orders)
        return cls(name, num_stages, num_microbatches, rows, turns=turns, lines=lines)

    @cached_property
    def length(self) -> int:
        """Stages of each line."""
        return self.num_stages // self.lines

    def micro_batches(self, stage: int) -> range:
        """Those that a stage treats."""
        return range(stage // self.length, self.num_microbatches, self.lines)

    @cached_property
    def relays(self) -> frozenset[int]:
        """Stages that pass messages on unread, to the stage behind: they run G."""
        return frozenset(k for k, row in enumerate(self.rows) if any(action.kind is GRAPH for action in row))

    @property
    def devices(self) -> tuple[int, ...]:
        """Which process each stage is on, shape ``(K,)``, where they take turns; else each has its own."""
        if not self.turns:
            return tuple(range(self.num_stages))
        return tuple(next(d for d, turns in enumerate(self.turns) if k in turns) for k in range(self.num_stages))

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.rows)

    def __getitem__(self, stage: int) -> tuple[Action, ...]:
        return self.rows[stage]

    def __len__(self) -> int:
        return self.num_stages

    def __str__(self) -> str:
        width = len(str(self.num_stages - 1))
        lines = (f"stage {k:{width}d} | {' '.join(map(str, row))}" for k, row in enumerate(self.rows))
        return "\n".join(lines)

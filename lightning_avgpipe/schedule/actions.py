"""The actions of a stage, and schedules as rows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.kinds import Kind


class Action(NamedTuple):
    """One action of a stage on one micro-batch.

    Attributes:
        kind: kind of the action, such as forward, backward, or half of a backward.
        micro_batch: i, 0-based.
    """

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The order of the actions of each stage: ``schedule[k]`` is the row of stage k.

    A schedule holds only the order; times follow from costs. It does not say which weights an action uses, or which
    stage receives a value, so schedules with several weight versions have the same kind of rows.

    Attributes:
        name: name of the recipe or function that built the schedule.
        num_stages: K, number of stages.
        num_microbatches: M, number of micro-batches of an iteration.
        rows: one row of actions per stage, shape ``(num_stages, any)``.
        warm_up: warm-up that the rows were built from, shape ``(num_stages,)``; empty for rows made by hand.
        turns: for each process that hosts several stages and prescribes their order: the stage of each of its actions,
            one after another. Empty: the most urgent action goes first, see :func:`~.rules.urgency`.
        segments: number of segments in which a stage relays a message to the next one, see :attr:`Kind.relayed`.
    Raises:
        ScheduleError: the number of rows or warm-ups is not the number of stages, or ``turns`` does not fit the rows.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    # Cannot be derived from the rows: they are the same for w = M - 1 and for w = M.
    warm_up: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    segments: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) != self.num_stages:
            raise ScheduleError(f"{len(self.rows)} rows for {self.num_stages} stages; give one row per stage")
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
    def of_orders(cls, name: str, num_microbatches: int, orders: Sequence[Sequence[tuple[int, Action]]]) -> Schedule:
        """Make a schedule from the actions of each process, in their order.

        Args:
            name: name of the schedule.
            num_microbatches: M, number of micro-batches of an iteration.
            orders: for each process its actions in order, each with its stage.
        """
        num_stages = 1 + max(stage for order in orders for stage, _ in order)
        rows = tuple(
            tuple(action for order in orders for stage, action in order if stage == k) for k in range(num_stages)
        )
        turns = tuple(tuple(stage for stage, _ in order) for order in orders)
        return cls(name, num_stages, num_microbatches, rows, turns=turns)

    @cached_property
    def relays(self) -> frozenset[int]:
        """The stages that relay the messages which they receive to the next stage."""
        return frozenset(k for k, row in enumerate(self.rows) if any(action.kind.relayed for action in row))

    @property
    def devices(self) -> tuple[int, ...]:
        """The process of each stage, shape ``(K,)``: as ``turns`` says, otherwise one process per stage."""
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

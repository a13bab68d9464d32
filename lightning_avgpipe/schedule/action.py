"""Actions and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Action", "Schedule"]


class Action(NamedTuple):
    """What a stage does with one micro-batch: its forward, or its backward.

    Attributes:
        kind: ``"F"`` or ``"B"``.
        micro_batch: i, 0-based.
    """

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """For each stage the order of its actions; only the order, the times follow from the costs.

    Attributes:
        name: how it was built.
        num_stages: K.
        num_microbatches: M.
        rows: one row of actions per stage, shape ``(num_stages, any)``.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Forwards before the first backward on each stage, less the one that this backward belongs with.

        Shape ``(num_stages,)``; all micro-batches where a row has all forwards first.
        """
        counts = []
        for row in self.rows:
            before = next((i for i, action in enumerate(row) if action.kind == "B"), len(row))
            counts.append(before if before == self.num_microbatches else before - 1)
        return tuple(counts)

    def __str__(self) -> str:
        width = len(str(self.num_stages - 1))
        lines = (f"stage {k:{width}d} | {' '.join(map(str, row))}" for k, row in enumerate(self.rows))
        return "\n".join(lines)

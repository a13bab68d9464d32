"""A task: what an iteration has the stages of a process run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(frozen=True)
class Task:
    """One iteration's work, the same for all stages of a process.

    Attributes:
        run: ``run(i, *args[i])`` executes the step function on micro-batch i.
        args: arguments per micro-batch.
        finish: turns the result of micro-batch i on the last stage into the tensor to start its backward from;
            None if there is no backward. It may return None for a micro-batch that does not count.
        key: random numbers of this iteration, and of the first micro-batch.
        known: micro-batches for which the outputs of the frozen layers are kept.
    """

    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor | None] | None = None
    key: RandomKey = RandomKey(0)  # noqa: RUF009
    known: frozenset[int] = frozenset()

    @property
    def trains(self) -> bool:
        """Whether forwards keep what backwards need."""
        return self.finish is not None

    def key_of(self, micro_batch: int) -> RandomKey:
        """Random numbers of micro-batch i."""
        key = self.key
        return RandomKey(key.seed, key.iteration, key.pipeline, key.micro_batch + micro_batch)

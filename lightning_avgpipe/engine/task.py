"""Define the work that the stages of a process run in an iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(frozen=True)
class Task:
    """The work of one iteration, the same for all stages of a process.

    Attributes:
        run: ``run(i, *args[i])`` executes the step function on micro-batch i.
        args: arguments of the step, for each micro-batch.
        finish: return the tensor from which a backward starts, given i and the result of micro-batch i on the last
            stage; None if there is no backward. It may return None for a micro-batch that does not count.
        key: key of the random numbers of this iteration and its first micro-batch.
        known: micro-batches that begin with kept outputs.
        around: ``around(i)`` is the context in which ``run`` calls the step function; None: only ``run`` can call it.
    """

    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor | None] | None = None
    key: RandomKey = RandomKey(0)  # noqa: RUF009
    known: frozenset[int] = frozenset()
    around: Callable[[int], AbstractContextManager[None]] | None = None

    @property
    def trains(self) -> bool:
        """Whether forwards keep what backwards need."""
        return self.finish is not None

    def key_of(self, micro_batch: int) -> RandomKey:
        """Return the random key of micro-batch i."""
        key = self.key
        return RandomKey(key.seed, key.iteration, key.pipeline, key.micro_batch + micro_batch)

"""Train until a goal: when a curve reaches it, and a callback that then ends a Trainer's run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L

from lightning_avgpipe import AvgPipeStrategy

__all__ = ["UntilGoal", "reached"]


def reached(curve: Sequence[tuple[float, float]], goal: float, falling: bool = True) -> float | None:
    """Return where a curve first reaches a goal, interpolated between its points; None: it does not.

    Args:
        curve: how far the training was (samples, batches or epochs), and the value that it had there.
        goal: the value that is wanted.
        falling: whether smaller values are better.
    """
    before: tuple[float, float] | None = None
    for place, value in curve:
        if (value <= goal) if falling else (value >= goal):
            if before is None or value == before[1]:
                return place
            return before[0] + (place - before[0]) * (goal - before[1]) / (value - before[1])
        before = (place, value)
    return None


class UntilGoal(L.Callback):
    """Ends training when a loss is down to a goal, or is no number. It only looks at weights, so nothing drains.

    Args:
        goal: the loss that is wanted.
        loss: function of the module that returns its loss on validation samples; it sees the reference model.
        every: number of batches between two looks.
        limit: number of batches after which training is given up.

    Attributes:
        curve: batches so far, and the loss, at each look.
    """

    def __init__(self, goal: float, loss: Callable[[Any], float], every: int, limit: float = math.inf) -> None:
        self.goal, self.loss, self.every, self.limit = goal, loss, every, limit
        self.curve: list[tuple[int, float]] = []
        self._batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._batches += 1
        if self._batches % self.every:
            return
        strategy = trainer.strategy
        with strategy.reference() if isinstance(strategy, AvgPipeStrategy) else contextlib.nullcontext():
            loss = self.loss(module)
        self.curve.append((self._batches, loss))
        trainer.should_stop = loss <= self.goal or not math.isfinite(loss) or self._batches >= self.limit

"""Updates of stages on their own: each after its backwards of a batch, while the pipeline goes on.

::

    stage 0 | F0 F1 F2 F3 B0 B1 u F4 B2 F5 B3 u ..        M = 2, u: the stage's optimizers step
    stage 3 | F0 B0 F1 B1 u F2 B2 F3 B3 u ..

The batches from one drain to the next are one row of 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.schedule import BACKWARD
from lightning_avgpipe.weights.store import WeightStore

__all__ = ["StageUpdates"]


class StageUpdates(Observer):
    """Has each action use its weights, and stages step between their actions.

    Args:
        weights: that stages were made with.
        num_microbatches: M, of an update.
        step: of a stage's optimizers, which ends with its gradients cleared.
    """

    def __init__(self, weights: WeightStore, num_microbatches: int, step: Callable[[int], None]) -> None:
        self._weights = weights
        self._num_microbatches = num_microbatches
        self._step = step

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Do an action, and step after the last backward of a batch."""
        kind, micro_batch = work.action
        self._weights.act(work.stage, micro_batch, kind is BACKWARD)
        message = do()
        if kind is BACKWARD and (micro_batch + 1) % self._num_microbatches == 0:
            with self._weights.updating(work.stage):
                self._step(work.stage)
        return message

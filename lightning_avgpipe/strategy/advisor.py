"""A callback that ends a run of ``python -m lightning_avgpipe.advise`` after its first batch, with the advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_avgpipe.advise.request import Request
from lightning_avgpipe.advise.ways import advice
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.utils.lightning import Callback, _TunerExitException


class Advisor(Callback):
    """Writes the advice after the first batch of training, and ends the run.

    Args:
        request: request of the command.
        cluster: the connected processes.

    Attributes:
        done: whether the advice has been written.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request, self._cluster = request, cluster
        self.done = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the advice, and end the run."""
        plan: Plan = trainer.strategy.plan
        if self._cluster.world.rank == 0 and plan.units is not None and plan.forecast is not None:
            found = advice(plan.units, plan.forecast.num_microbatches, self._request.devices, self._request.megabits)
            Path(self._request.report).write_text(found)
        self._cluster.world.barrier("the end of advice")
        self.done = True
        raise _TunerExitException  # in all processes: Lightning ends the run as if it were done

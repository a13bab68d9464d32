"""The logger connector of a pipeline: on every rank it knows the metrics of rank 0, where the loss is."""

from __future__ import annotations

from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.lightning import _LoggerConnector


class SyncedLoggerConnector(_LoggerConnector):
    """A logger connector that on every rank knows the metrics of rank 0, where the loss is.

    Callbacks decide by metrics (early stopping, the best checkpoint, its file name), and all ranks must decide alike.
    """

    def __init__(self, original: _LoggerConnector, cluster: Cluster) -> None:
        super().__init__(original.trainer)
        vars(self).update(vars(original))
        self._original = original
        self._cluster = cluster
        self._synced: dict[str, Any] = {"callback": {}, "log": {}, "pbar": {}}

    def detach(self) -> _LoggerConnector:
        """Return the connector that this one replaced, with the state of this one."""
        state = {name: value for name, value in vars(self).items() if name in vars(self._original)}
        vars(self._original).update(state)
        return self._original

    def snapshot(self) -> Any:
        """Return the present metrics on rank 0 of each group; None elsewhere."""
        return super().metrics if self._cluster.rank == 0 else None

    def accept(self, metrics: Any) -> None:
        """Use these metrics, which are rank 0's, on the other ranks."""
        self._synced = metrics
        self._callback_metrics.update(metrics["callback"])  # nothing is logged here that would update these

    def sync(self) -> None:
        """Tell all ranks rank 0's present metrics, and its callback metrics. Every rank calls it."""
        snapshot = self.snapshot()  # may let metric objects communicate with those of other groups
        (metrics, before), _ = self._cluster.control.relay((snapshot, dict(self.callback_metrics)))
        self.accept(metrics)
        self._callback_metrics.update(before)

    @property
    def metrics(self) -> Any:
        """The metrics of rank 0."""
        return super().metrics if self._cluster.world.rank == 0 else self._synced

    def update_eval_epoch_metrics(self) -> Any:
        """Sync the metrics. All ranks call it at the end of a validation dataloader, and of a validation."""
        if not self.trainer.sanity_checking:
            self.sync()
        return super().update_eval_epoch_metrics()

    def on_epoch_end(self) -> None:
        """Sync the metrics. All ranks call it at the end of every epoch."""
        self.sync()
        super().on_epoch_end()

    def reset_results(self) -> None:
        """Forget the metrics. All ranks call it when a loop begins."""
        super().reset_results()
        self._synced = {"callback": {}, "log": {}, "pbar": {}}

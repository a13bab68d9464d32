"""The logger connector: on every rank it knows the metrics of rank 0, where the loss is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lightning_avgpipe.comm.cluster import Cluster


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
        """The connector that this one replaced, with the state of this one."""
        state = {name: value for name, value in vars(self).items() if name in vars(self._original)}
        vars(self._original).update(state)
        return self._original

    def snapshot(self) -> Any:
        """On rank 0, and where the last stages of other groups are, the metrics as of now."""
        return super().metrics if self._cluster.rank == 0 else None

    def accept(self, metrics: Any) -> None:
        """On the other ranks use rank 0's metrics from now on."""
        self._synced = metrics
        self._callback_metrics.update(metrics["callback"])  # here nothing is logged that would make it look there

    def sync(self) -> None:
        """Tell all ranks the metrics as of now, and those of before. Every rank calls it."""
        snapshot = self.snapshot()  # for which metric objects may talk to those of other groups
        (metrics, before), _ = self._cluster.channels.control.relay((snapshot, dict(self.callback_metrics)))
        self.accept(metrics)
        self._callback_metrics.update(before)

    @property
    def metrics(self) -> Any:
        """Rank 0's metrics."""
        return super().metrics if self._cluster.leads else self._synced

    def update_eval_epoch_metrics(self) -> Any:
        """Called by all ranks at the end of a validation dataloader, and of a validation."""
        if not self.trainer.sanity_checking:
            self.sync()
        return super().update_eval_epoch_metrics()

    def on_epoch_end(self) -> None:
        """Called by all ranks at the end of every epoch."""
        self.sync()
        super().on_epoch_end()

    def reset_results(self) -> None:
        """Called by all ranks when a loop starts anew."""
        super().reset_results()
        self._synced = {"callback": {}, "log": {}, "pbar": {}}

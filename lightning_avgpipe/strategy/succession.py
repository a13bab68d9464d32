"""Succession: what makes a process rank 0 for Lightning, when the groups before its own have left.

Callbacks and metrics are alike on all processes, and each group has whole checkpoints, so what is missing are loggers
and bars: on other processes they do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.patching import nothing


class Succession:
    """Of a run of the trainer.

    Args:
        trainer: of the run.
        cluster: of the processes.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        self._trainer = trainer
        self._cluster = cluster
        self._shows = False  # whether a bar is to be shown

    def begin(self) -> None:
        """Training is about to begin. Every process calls it."""
        self._cluster.when_leading = nothing if self._cluster.leads else self._take_over
        if self._cluster.apart:  # it is told when it is with the others
            return
        # which other processes would number by what they find in the folder, and when
        self.take_versions(self._cluster.world.broadcast(self.versions if self._cluster.leads else []))
        if self._cluster.leads and rank_zero_only.rank:  # type: ignore[attr-defined]  # since an earlier run
            self._take_over()

    @property
    def versions(self) -> list[Any]:
        """Of the loggers that write into folders."""
        return [logger.version for logger in self._local_loggers]

    def take_versions(self, versions: Sequence[Any]) -> None:
        """The loggers have those of the process that logs."""
        for logger, version in zip(self._local_loggers, versions, strict=True):
            logger._version = version

    def show(self) -> None:
        """An iteration has ended: from here on a bar can begin, if this process has taken over."""
        bar = self._trainer.progress_bar_callback
        if self._shows and isinstance(bar, (TQDMProgressBar, RichProgressBar)):  # others may not know how to begin here
            module = self._trainer.lightning_module
            bar.enable()
            bar.on_train_start(self._trainer, module)
            bar.on_train_epoch_start(self._trainer, module)
        self._shows = False

    def _take_over(self) -> None:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        self._shows = True
        for logger in self._local_loggers:
            if isinstance(logger, CSVLogger):  # it would begin with an empty file in the place of that one
                logger._version = f"{Path(logger.log_dir).name}-from-step-{self._trainer.global_step}"

    @property
    def _local_loggers(self) -> list[CSVLogger | TensorBoardLogger]:
        return [logger for logger in self._trainer.loggers if isinstance(logger, (CSVLogger, TensorBoardLogger))]

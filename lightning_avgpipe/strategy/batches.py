"""The batches of an iteration on their way to the device, one for each pipeline."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.bundles import BundledLoader
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.utils.lightning import move_data_to_device, pl


class Batches:
    """Brings the reader's batches to every process of a group.

    Args:
        trainer: trainer of the run.
        cluster: the connected processes.
        distributor: distributor of the run.

    Attributes:
        distributor: distributor of the run.
        dataloader_idx: index of the dataloader of the current batch.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster, distributor: Distributor) -> None:
        self.distributor = distributor
        self.dataloader_idx = 0
        self._trainer = trainer
        self._cluster = cluster
        self._beside: list[Any] = []  # the batches of pipelines 1.. for this iteration
        self._ahead: deque[list[Any]] = deque()  # the batches of all pipelines, for the next iterations

    def to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Return pipeline 0's batch on the device, after its transfer hooks, and keep those of the other pipelines.

        Every process calls it; the reader sends the batches to the others.
        """
        self.dataloader_idx = dataloader_idx
        loader = self._trainer.fit_loop._combined_loader
        if self._trainer.training and self._ahead:
            assert isinstance(loader, BundledLoader)
            loader.take()
            batch, *self._beside = self._ahead.popleft()
            return batch
        batch = self._moved(batch, device, dataloader_idx, 0)
        if self._trainer.training and isinstance(loader, BundledLoader):
            self._beside = [
                self._moved(self._converted(other), device, dataloader_idx, n)
                for n, other in enumerate(loader.take(), 1)
            ]
        return batch

    @property
    def waits_for_its_turn(self) -> bool:
        """Whether the next batch of training is on the device already."""
        return bool(self._ahead) and bool(self._trainer.training)

    def read_ahead(self) -> list[Any]:
        """Return the batches of a further iteration of training, on every rank's device; none at the end of the data.

        :meth:`to_device` gives the same batches again when Lightning's loop comes to them. Every process calls it.
        """
        loader = self._trainer.fit_loop._combined_loader
        assert isinstance(loader, BundledLoader)
        batches = loader.upcoming(len(self._ahead))
        if not batches:
            return []
        self._ahead.append([self._moved(self._converted(batch), None, 0, n) for n, batch in enumerate(batches)])
        return list(self._ahead[-1])

    def forget_ahead(self) -> None:
        """Drop the batches that were read ahead; they are moved to the device again when it is their turn."""
        self._ahead.clear()

    def _converted(self, batch: Any) -> Any:
        """Convert a batch as Lightning's loop converts pipeline 0's batch before its transfer."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)

    def _moved(self, batch: Any, device: torch.device | None, dataloader_idx: int, pipeline: int) -> Any:
        reads = self._cluster.reads
        if reads:
            module, device = self._trainer.lightning_module, device or self._cluster.device
            batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=dataloader_idx)
        if self._cluster.group.world_size > 1 and not self.distributor.early:
            batch = self.distributor.pass_on(batch)
        batch = batch if reads else move_data_to_device(batch, self._cluster.device)
        return self.distributor.seal(batch, pipeline)

    def hand_out(self, batches: Sequence[Any]) -> Any:
        """Give the next training step these batches, which are on the device, one for each pipeline.

        Returns:
            The batch of pipeline 0, which the step takes as its argument.
        """
        sealed = [self.distributor.seal(batch, n) for n, batch in enumerate(batches)]
        self._beside = sealed[1:]
        return sealed[0]

    def take(self, batch: Any) -> list[Any]:
        """Return all batches of this iteration, given that of pipeline 0; fewer than N at the end of the data."""
        beside, self._beside = self._beside, []
        return [batch, *beside]

    @contextlib.contextmanager
    def trying(self, batch: Any) -> Iterator[Any]:
        """Within this context steps are tried with copies of a training batch, as read from the dataloader.

        Returns:
            A copy on the device, after its transfer hooks. Every process asks for it.
        """
        beside = self._beside
        try:
            yield self._moved(self._converted(copy.deepcopy(batch)), None, 0, 0)
        finally:
            self._beside = beside

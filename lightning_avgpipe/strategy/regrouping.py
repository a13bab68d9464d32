"""Regrouping: training goes on in more groups of fewer stages, with what the groups before have trained.

::

    4 stages, one group         ranks 3 2 1 0      each batch passes all of them
    2 stages, two groups        ranks 1 0          a batch of its own for each, and a model;
                                      3 2          elastic averaging holds them together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.checkpoint_state import State
from lightning_avgpipe.strategy.data import beneath
from lightning_avgpipe.strategy.data_sharding import divisible
from lightning_avgpipe.strategy.progress import retotal


def check_divisible(trainer: pl.Trainer) -> None:
    """Check that Lightning can divide the training data among groups, as far as this process reads them.

    Raises:
        ConfigurationError: it cannot, and would say so when groups are made.
    """
    loader = trainer.fit_loop._combined_loader
    if loader is None or not trainer._accelerator_connector.use_distributed_sampler:
        return
    for dataloader in map(beneath, loader.flattened):
        if not isinstance(dataloader, DataLoader) or not divisible(dataloader):
            continue
        part: DistributedSampler[Any] = DistributedSampler(dataloader.dataset, num_replicas=2, rank=0)
        try:
            _get_dataloader_init_args_and_kwargs(dataloader, part, RunningStage.TRAINING)
        except (MisconfigurationException, TypeError) as error:
            raise ConfigurationError(
                f"AdaptiveFreezing(freed='groups') divides the data among groups, and Lightning cannot do so with this "
                f"{type(dataloader).__name__}: {error}. Leave batch_sampler out, or divide the data by "
                "trainer.strategy.group_number and trainer.strategy.num_groups, with use_distributed_sampler=False"
            ) from error


def leave(state: State, optimizers: Sequence[Optimizer], cluster: Cluster) -> dict[str, Any]:
    """What the run of other groups goes on with, on every process: as a checkpoint has it, without parallel models.

    Every process calls it.
    """
    checkpoint: dict[str, Any] = {"optimizer_states": [state.optimizer(optimizer) for optimizer in optimizers]}
    state.complete(checkpoint, models=False)
    return cluster.world.broadcast(checkpoint)


def begin_epoch(trainer: pl.Trainer) -> None:
    """The epoch begins with the dataloaders of the groups that there are now; nothing of it has been read."""
    loop = trainer.fit_loop
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
    loop.setup_data()
    assert loop._combined_loader is not None
    for dataloader in loop._combined_loader.flattened:
        _set_sampler_epoch(dataloader, loop.epoch_progress.current.processed)
    retotal(trainer)

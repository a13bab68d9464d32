"""Data sharding: each group of processes trains on its own part of the data, and evaluates on all of it.

::

    training      group 0    samples 0 2 4 ..      a distributed sampler, injected as with ddp but over groups
                  group 1    samples 1 3 5 ..
    evaluation    each       all samples           exact for every metric, since nothing is divided or repeated
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.lightning import RunningStage, pl, rank_zero_warn, sized_len
from lightning_avgpipe.utils.patching import replaced


@contextlib.contextmanager
def sharing(trainer: pl.Trainer, cluster: Cluster) -> Iterator[None]:
    """Within this context Lightning gives training dataloaders a distributed sampler over groups.

    It respects ``use_distributed_sampler=False`` and a sampler that is distributed already. For data that cannot be
    sampled it warns: there the user's code must know the group.
    """
    num_groups = cluster.stage_map.num_groups
    if num_groups == 1:
        yield
        return
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode != RunningStage.TRAINING or not trainer._accelerator_connector.use_distributed_sampler:
            return prepare(dataloader, shuffle, mode)
        with replaced(connector, "_requires_distributed_sampler", _divisible):
            found = prepare(dataloader, shuffle, mode)
        if not isinstance(getattr(found, "sampler", None), DistributedSampler):
            rank_zero_warn(
                f"{num_groups} groups of processes train on data of their own, but Lightning cannot "
                f"divide a {type(dataloader).__name__} with an iterable dataset or without sampler: each group reads "
                "all of it unless your code takes a part by trainer.strategy.group_number and "
                "trainer.strategy.num_groups"
            )
        return found

    with replaced(connector, "_prepare_dataloader", prepare_dataloader):
        yield


def _divisible(dataloader: DataLoader[Any]) -> bool:
    """Return whether a distributed sampler may divide a dataloader, and none does yet."""
    sampled = isinstance(dataloader.sampler, DistributedSampler)
    return not sampled and not isinstance(dataloader.dataset, IterableDataset)


def check_alike(dataloader: Any, cluster: Cluster, num_pipelines: int) -> None:
    """Check that a dataloader gives all groups the same number of iterations. Every process calls it.

    Raises:
        ConfigurationError: the numbers differ, so that a group would wait for the others at the end of the epoch.
    """
    if cluster.stage_map.num_groups == 1:
        return
    told = cluster.world.exchange_objects(sized_len(dataloader))
    lengths = [told[ranks[0]] for ranks in cluster.stage_map.layout]
    iterations = {None if length is None else math.ceil(length / num_pipelines) for length in lengths}
    if len(iterations) > 1:
        found = ", ".join("unknown" if length is None else str(length) for length in lengths)
        raise ConfigurationError(
            f"the groups have dataloaders of {found} batches; all groups must train equally often, with "
            f"{num_pipelines} batches an iteration. Give them parts of the same size, or leave it to "
            "use_distributed_sampler=True"
        )

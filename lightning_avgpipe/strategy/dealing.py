"""Dealing: what a group that has left had not trained on yet is dealt to the others, by the position in its sampler.

::

    4 iterations, groups 0 1 2      0 1 2 | 0 1 2 | 0 1 2 | 0 1 2      a distributed sampler's order, a batch each
    group 1 leaves in the second                ^ its updates did not count any more
    from the third on                               1 0 2 | 1 0 2..    what is left, in the same order, to 0 and 2
    from the next epoch on                                             the sampler divides among two
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.bundles import BundledLoader, recount
from lightning_avgpipe.strategy.data import beneath

_NOT_DIVIDED = (
    "the training data are not of one DataLoader with the distributed sampler that Lightning puts in, or there is a "
    "fraction as limit_train_batches"
)


def deal(shares: Sequence[Sequence[int]], begins: Sequence[int], number: int, groups: int) -> list[int]:
    """What is left, in the order of the shares, and the part of it of one of the groups that are left.

    Args:
        shares: of samples; shape ``(groups before, samples)``.
        begins: of each share what is left begins there.
        number: of the group.
        groups: that are left; each gets as many, so some samples may come twice.
    """
    longest = max(map(len, shares))
    left = [s[i] for i in range(longest) for s, begin in zip(shares, begins, strict=True) if begin <= i < len(s)]
    missing = -len(left) % groups
    return (left + (left * (missing // len(left) + 1))[:missing] if left else left)[number::groups]


class Dealing:
    """The training data of a run of the trainer. Every process calls its methods.

    Args:
        trainer: of the run.
        cluster: of the processes.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        self._trainer = trainer
        self._cluster = cluster
        self._shares: list[list[int]] = []  # of those that were left at the last deal of this epoch
        self._begun = 0  # iterations before it

    def why_not(self) -> str:
        """Why the data cannot be divided among other groups than before; empty if they can. Every process calls it."""
        own = self._own()
        reason = "" if own is not None else _NOT_DIVIDED
        return self._cluster.group.broadcast(reason, self._cluster.stage_map.reader)

    def _own(self) -> DataLoader[Any] | None:
        """On the process that reads, the dataloader if its data can be dealt."""
        loader = self._trainer.fit_loop._combined_loader
        whole = isinstance(self._trainer.limit_train_batches, int) or self._trainer.limit_train_batches == 1.0
        if not isinstance(loader, BundledLoader) or len(loader.flattened) != 1 or not whole:
            return None
        own = beneath(loader.flattened[0])
        if not self._cluster.reads or not isinstance(own, DataLoader):
            return None
        divided = type(own.batch_sampler) is BatchSampler and type(own.sampler) is DistributedSampler
        return own if divided else None

    def among_all(self) -> None:
        """An epoch is about to begin: divide its data among the groups that there are now. They can be divided."""
        loader, own = self._trainer.fit_loop._combined_loader, self._own()
        assert isinstance(loader, BundledLoader)
        mirrored, later = loader.flattened[0], 0
        self._shares, self._begun = [], 0
        if own is not None:
            self._divide(own)
            later = len(own)
        later = self._cluster.group.broadcast(later, self._cluster.stage_map.reader)
        limit = self._trainer.limit_train_batches
        loader.limits = min(later, limit) if isinstance(limit, int) else later
        loader.renewed = partial(self._renew, mirrored, own, later)

    def _divide(self, own: DataLoader[Any]) -> None:
        """From now on the sampler divides among the groups that there are."""
        number, groups = self._cluster.group_number, self._cluster.stage_map.num_groups
        sampler: Any = own.sampler
        epoch = sampler.epoch
        DistributedSampler.__init__(
            sampler, sampler.dataset, groups, number, sampler.shuffle, sampler.seed, sampler.drop_last
        )
        sampler.epoch = epoch
        batches: Any = own.batch_sampler
        batches.sampler = sampler

    def again(self, gone: Collection[int], before: int, averaged: int, count: int) -> str:
        """Deal among those that are left; returns what was done, for a message.

        Args:
            gone: numbers of the groups that have left, among those before.
            before: number of these.
            averaged: iterations of this epoch whose updates counted.
            count: N.
        """
        loader = self._trainer.fit_loop._combined_loader
        lasts = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        kept = "the others go on with the batches that they had, and those of the group are left out"
        if not isinstance(loader, BundledLoader) or len(loader.flattened) != 1:
            return kept
        mirrored, own = loader.flattened[0], self._own()
        dealt = None
        if own is not None:
            dealt = self._deal(own, gone, before, averaged, loader.iterations, count)
        lengths = self._cluster.group.broadcast(dealt, self._cluster.stage_map.reader)
        if lengths is None:
            return kept
        now, later = lengths
        if not self._cluster.reads:
            mirrored.resize(later if lasts else now)
        limit = self._trainer.limit_train_batches
        if not lasts:
            loader.begin_again()
        loader.limits = min(later, limit) if isinstance(limit, int) else later
        loader.renewed = partial(self._renew, mirrored, own, later)
        if lasts:
            return (
                "this was the last iteration of the epoch, which ends without its batch; from the next one on all data "
                "are divided among the others"
            )
        recount(self._trainer)
        return f"what it had not trained on yet is dealt to the others, {now} more batches to each in this epoch"

    def _deal(
        self, loader: DataLoader[Any], gone: Collection[int], before: int, averaged: int, done: int, count: int
    ) -> tuple[int, int] | None:
        """On the process that reads; gives the batches of the group in the rest of this epoch, and in later ones."""
        batches: Any = loader.batch_sampler
        sampler: Any = loader.sampler
        number, groups = self._cluster.group_number, self._cluster.stage_map.num_groups
        if not self._shares:
            if sampler.num_replicas != before:
                return None
            self._shares = _shares(sampler)
        each = count * batches.batch_size
        begins = [((averaged if n in gone else done) - self._begun) * each for n in range(before)]
        now = [deal(self._shares, begins, n, groups) for n in range(groups)]
        self._divide(loader)
        later = len(batches)
        self._shares, self._begun, batches.sampler = now, done, now[number]
        return len(batches), later

    def _renew(self, mirrored: Any, own: Any, length: int) -> Callable[[], None]:
        """Another epoch is about to begin; returns what is called when it has."""
        self._shares, self._begun = [], 0
        if self._cluster.reads:
            own.batch_sampler.sampler = own.sampler
        else:
            mirrored.resize(length)
        return partial(recount, self._trainer)


def _shares(sampler: DistributedSampler[Any]) -> list[list[int]]:
    """Of each group in this epoch."""
    rank, found = sampler.rank, []
    for group in range(sampler.num_replicas):
        sampler.rank = group
        found.append(list(sampler))
    sampler.rank = rank
    return found

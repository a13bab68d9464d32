"""The batches of training: a queue of bundles, one batch for every pipeline, from the dataloader to the device.

::

    dataloader    0  1  2  3  4  5  6          7 batches, N = 3 pipelines
    iteration    |   0   |   1   | 2|          4 ... of the last bundle only pipeline 0 has a batch
    Lightning     0        3       6           sees the batch of pipeline 0, and counts iterations

Bundles are taken in the order in which they were read. One that was read ahead is moved to the device then, and may be
put back: it stays in the queue, and is moved again when it is its turn.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch

from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.utils.lightning import (
    CombinedLoader,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
    convert_inf,
    move_data_to_device,
    pl,
)
from lightning_avgpipe.utils.patching import noop, replaced


@dataclass
class _Bundle:
    """The batches of an iteration.

    Attributes:
        items: batches as read, with their indices.
        moved: batches on the device; None: they are moved when it is their turn.
    """

    items: list[Any]
    moved: list[Any] | None = None


@dataclass
class _Epoch:
    """The position of reading in an epoch.

    Attributes:
        bundles: bundles that were read and not taken.
        given: number of these bundles that Lightning has; the others were read ahead.
        returned: batches that are read again, before any other.
        iterations: number of iterations that Lightning has a batch of.
        read: number of batches of these iterations.
        drawn: number of batches that the dataloader has given.
        began: whether the first batch was asked for.
        ended: whether the dataloader has no more.
        latest: the last batch that Lightning was given.
    """

    bundles: deque[_Bundle] = field(default_factory=deque)
    given: int = 0
    returned: deque[Any] = field(default_factory=deque)
    iterations: int = 0
    read: int = 0
    drawn: int = 0
    began: bool = False
    ended: bool = False
    latest: Any = None

    def give_back(self, items: Iterable[Any]) -> None:
        """Let these batches be read again, in this order."""
        self.returned.extendleft(reversed(list(items)))


class BundledLoader(CombinedLoader):
    """Yields the first batch of each bundle; :meth:`take` gives all when their iteration begins.

    Lightning may read ahead, so bundles are taken in the order in which they were read. Nothing is read beyond a
    bundle, so a dataloader that saves its state is never ahead of the training.

    Attributes:
        when_begun: called once, when the next epoch has begun.
    """

    _count: Callable[[], int]
    _any_ends: Callable[[bool], bool] | None
    _look: Callable[[Any], bool] | None
    _trainer: pl.Trainer
    _epoch: _Epoch
    when_begun: Callable[[], None]

    @classmethod
    def of(
        cls,
        loader: CombinedLoader,
        trainer: pl.Trainer,
        count: Callable[[], int],
        any_ends: Callable[[bool], bool] | None,
        look: Callable[[Any], bool] | None,
    ) -> BundledLoader:
        """Bundle the batches of a loader.

        Args:
            loader: loader that Lightning would use; must not be used otherwise from now on.
            trainer: trainer that is about to fit.
            count: returns N, which may change between iterations.
            any_ends: returns whether the epoch ends in any group of processes, given whether it ends here; called where
                lengths are not known.
            look: is shown the first batch before any other is read, and may change N; called again before each further
                bundle until it returns that it has seen enough.
        """
        kind = cls if type(loader) is CombinedLoader else type(cls.__name__, (cls, type(loader)), {})
        made: BundledLoader = object.__new__(kind)
        vars(made).update(vars(loader))
        made._trainer, made._count, made._any_ends, made._look = trainer, count, any_ends, look
        made.when_begun, made._epoch = noop, _Epoch()
        return made

    @property
    def _counts_iterations(self) -> bool:
        """Whether limits are numbers of iterations; else they are numbers of batches."""
        return isinstance(self._trainer.limit_train_batches, int)

    def __iter__(self) -> Any:
        self._epoch = _Epoch()
        begun, self.when_begun = self.when_begun, noop
        limits = self._limits
        if limits is not None and self._counts_iterations:
            self._limits = [limit * self._count() for limit in limits]
        try:
            return super().__iter__()
        finally:
            self._limits = limits
            begun()

    def __next__(self) -> Any:
        epoch = self._epoch
        if not epoch.began:
            # those that an earlier run has done
            epoch.iterations = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
            epoch.read = epoch.drawn = epoch.iterations * self._count()
        if self._look is not None:
            self._show(self._look)
        if self._ends(not self._reads(epoch.given)):
            raise StopIteration
        items = epoch.bundles[epoch.given].items
        epoch.read += len(items)
        epoch.given += 1
        epoch.iterations += 1
        epoch.began = True
        batch, _, dataloader_idx = items[0]
        epoch.latest = batch if self._look is not None else None
        return batch, epoch.iterations - 1, dataloader_idx

    def _show(self, look: Callable[[Any], bool]) -> None:
        """Show a batch to a function that may change N, and complete bundles that were read ahead."""
        epoch = self._epoch
        batch = epoch.latest
        if not epoch.began:
            item = self._next()
            if self._ends(item is None):
                return
            epoch.give_back([item])
            batch = item[0]
        if look(batch):
            self._look = epoch.latest = None
            for bundle in islice(epoch.bundles, epoch.given):
                before = len(bundle.items)
                self._complete(bundle.items)
                epoch.read += len(bundle.items) - before

    def relimit(self) -> None:
        """Adapt the bundle size and the number of batches of an epoch, after N has changed."""
        epoch = self._epoch
        while len(epoch.bundles) > epoch.given:
            epoch.give_back(epoch.bundles.pop().items)
        if self._iterator is not None and self._limits is not None and self._counts_iterations:
            ahead = [limit - epoch.iterations for limit in self._limits]
            self._iterator.limits = [epoch.read + iterations * self._count() for iterations in ahead]

    def _ends(self, here: bool) -> bool:
        if self._any_ends is None or self._most < math.inf:
            return here
        return self._any_ends(here)

    @property
    def _most(self) -> float:
        """The largest number of batches of an epoch, by limits and the dataloader's length; infinite if not known."""
        try:
            return super().__len__()
        except (TypeError, NotImplementedError):
            return math.inf

    def _next(self) -> Any:
        epoch = self._epoch
        if epoch.returned:
            return epoch.returned.popleft()
        if not epoch.ended and epoch.drawn < self._most:
            try:
                item = super().__next__()
                epoch.drawn += 1
                return item
            except StopIteration:
                epoch.ended = True
        return None

    def _complete(self, items: list[Any]) -> None:
        while len(items) < self._count() and (item := self._next()) is not None:
            items.append(item)

    def _reads(self, number: int) -> bool:
        """Read until there is a bundle with this number among those that are not taken; return whether there is."""
        bundles = self._epoch.bundles
        while number >= len(bundles):
            items: list[Any] = []
            self._complete(items)
            if not items:
                return False
            bundles.append(_Bundle(items))
        return True

    def upcoming(self, ahead: int) -> _Bundle | None:
        """Return the bundle that is so many after the one taken last; None at the end of the data.

        It is given again in its usual order.
        """
        return self._epoch.bundles[ahead - 1] if self._reads(ahead - 1) else None

    @property
    def is_moved(self) -> bool:
        """Whether the next bundle is on the device already."""
        bundles = self._epoch.bundles
        return bool(bundles) and bundles[0].moved is not None

    def put_back(self) -> None:
        """Let bundles that are on the device be moved again when it is their turn."""
        for bundle in self._epoch.bundles:
            bundle.moved = None

    def take(self) -> _Bundle:
        """Return the bundle of the iteration that begins."""
        epoch, count = self._epoch, self._count()
        bundle = epoch.bundles.popleft()
        epoch.given -= 1
        epoch.give_back(bundle.items[count:])  # read for pipelines that are gone by now
        epoch.read -= len(bundle.items[count:])
        del bundle.items[count:]
        return bundle

    def __len__(self) -> int:
        """Return the number of iterations of this epoch: those read, and what the rest gives with N as it is now."""
        return self._epoch.iterations + math.ceil((super().__len__() - self._epoch.read) / self._count())


def bundling(
    trainer: pl.Trainer,
    count: Callable[[], int],
    any_ends: Callable[[bool], bool] | None,
    look: Callable[[], Callable[[Any], bool] | None],
) -> AbstractContextManager[None]:
    """Return a context within which the training dataloader is read in bundles.

    Args:
        trainer: trainer that is about to fit.
        count: returns N.
        any_ends: see :meth:`BundledLoader.of`.
        look: returns the ``look`` of :meth:`BundledLoader.of`; called when the dataloader is asked for.
    """
    source = trainer.fit_loop._data_source
    request = source.dataloader

    def dataloader() -> BundledLoader:
        loader = request()
        if not isinstance(loader, CombinedLoader):
            loader = CombinedLoader(loader, "max_size_cycle")  # as Lightning does
        return BundledLoader.of(loader, trainer, count, any_ends, look())

    return replaced(source, "dataloader", dataloader)


def recount(trainer: pl.Trainer) -> None:
    """Tell Lightning how many iterations the epoch has, after N has changed."""
    loop = trainer.fit_loop
    loader = loop._combined_loader
    if isinstance(loader, BundledLoader):
        loader.relimit()
        loader.when_begun = partial(recount, trainer)  # the next epoch begins with another number
    if loop._combined_loader is None or loop.max_batches == float("inf"):
        return
    length = len(loop._combined_loader)
    loop.max_batches = length
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = length
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))
    for bar in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(bar, ProgressBar) and bar._trainer is not None:
            _retotal(bar)


def _retotal(bar: ProgressBar) -> None:
    """Show the number of batches of the running epoch; a bar of another kind reads it by itself."""
    total = bar.total_train_batches
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = convert_inf(total)
        bar.train_progress_bar.refresh()
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=total)


class Batches:
    """Brings the reader's batches to every process of a group.

    Attributes:
        dataloader_idx: index of the dataloader of the current batch.
    """

    def __init__(self, context: RunContext) -> None:
        self.dataloader_idx = 0
        self._trainer = context.trainer
        self._cluster = context.cluster
        self._distributor = context.distributor
        self._others: list[Any] = []  # the batches of pipelines 1.. for this iteration
        self._converts = False  # whether a batch is converted that Lightning's loop does not convert

    @property
    def _queue(self) -> BundledLoader | None:
        """The queue of bundles, while training reads from one."""
        loader = self._trainer.fit_loop._combined_loader
        return loader if isinstance(loader, BundledLoader) and self._trainer.training else None

    def to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Return pipeline 0's batch on the device, after its transfer hooks, and keep those of the other pipelines.

        Every process calls it; the reader sends the batches to the others.
        """
        self.dataloader_idx = dataloader_idx
        queue = self._queue
        if queue is None:
            return self._moved(batch, device, dataloader_idx, 0)
        bundle = queue.take()
        if bundle.moved is None:
            bundle.moved = [self._moved(batch, device, dataloader_idx, 0)]
            for n, (other, _, _) in enumerate(bundle.items[1:], 1):
                bundle.moved.append(self._moved(self._converted(other), device, dataloader_idx, n))
        batch, *self._others = bundle.moved
        return batch

    @property
    def waits_for_its_turn(self) -> bool:
        """Whether Lightning's loop is about to convert a batch of training that is on the device already."""
        return not self._converts and self._queue is not None and self._queue.is_moved

    def next(self, ahead: int) -> list[Any]:
        """Return the batches of a later iteration of training, on every rank's device; none at the end of the data.

        :meth:`to_device` gives the same batches again when Lightning's loop comes to them. Every process calls it.

        Args:
            ahead: number of iterations until then.
        """
        loader = self._trainer.fit_loop._combined_loader
        assert isinstance(loader, BundledLoader)
        bundle = loader.upcoming(ahead)
        if bundle is None:
            return []
        if bundle.moved is None:
            bundle.moved = [
                self._moved(self._converted(batch), None, 0, n) for n, (batch, _, _) in enumerate(bundle.items)
            ]
        return list(bundle.moved)

    def put_back(self) -> None:
        """Drop what was moved to the device ahead of its turn, and move it again then."""
        loader = self._trainer.fit_loop._combined_loader
        if isinstance(loader, BundledLoader):
            loader.put_back()

    def _converted(self, batch: Any) -> Any:
        """Convert a batch as Lightning's loop converts pipeline 0's batch before its transfer."""
        self._converts = True
        try:
            batch = self._trainer.precision_plugin.convert_input(batch)
            return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        finally:
            self._converts = False

    def _moved(self, batch: Any, device: torch.device | None, dataloader_idx: int, pipeline: int) -> Any:
        reads = self._cluster.reads
        if reads:
            module, device = self._trainer.lightning_module, device or self._cluster.device
            batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=dataloader_idx)
        if self._cluster.group.world_size > 1 and not self._distributor.early:
            batch = self._distributor.pass_on(batch)
        batch = batch if reads else move_data_to_device(batch, self._cluster.device)
        return self._distributor.seal(batch, pipeline)

    def take(self, batch: Any) -> list[Any]:
        """Return all batches of this iteration, given that of pipeline 0; fewer than N at the end of the data."""
        others, self._others = self._others, []
        return [batch, *others]

    def copied(self, batch: Any) -> Any:
        """Return a copy on the device, after its transfer hooks, of a training batch as read. All processes call it."""
        return self._moved(self._converted(copy.deepcopy(batch)), None, 0, 0)

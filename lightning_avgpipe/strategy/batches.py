"""The batches of training: a queue of bundles (one batch for each pipeline) between the dataloader and the device.

::

    dataloader    0  1  2  3  4  5  6          7 batches, N = 3 pipelines
    iteration    |   0   |   1   | 2|          in the last bundle only pipeline 0 has a batch
    Lightning     0        3       6           sees the batch of pipeline 0, and counts iterations

Bundles are taken in the order in which they were read. A bundle that is needed early is moved to the device at once.
It stays in the queue, and may be put back: then it is moved again when its iteration begins.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

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
        items: batches as read, each with its index and its dataloader's index.
        moved: batches on the device; None: they are moved when their iteration begins.
    """

    items: list[Any]
    moved: list[Any] | None = None


@dataclass
class _Epoch:
    """The position of reading in an epoch.

    Attributes:
        bundles: bundles that were read and not taken.
        given: number of these bundles that Lightning was given a batch of; the others were read ahead.
        returned: batches that were given back, and are read again before any other.
        iterations: number of iterations of which Lightning was given a batch.
        read: number of batches in these iterations.
        drawn: number of batches that the dataloader has yielded.
        began: whether Lightning was given a batch in this epoch.
        ended: whether the dataloader has ended.
        latest: the last batch that Lightning was given; None if no function looks at batches.
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
        """Give batches back, so that they are read again, in this order."""
        self.returned.extendleft(reversed(list(items)))


class BundledLoader(CombinedLoader):
    """A loader that yields the first batch of each bundle; :meth:`take` returns all batches of a bundle.

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
            loader: loader that Lightning would use; it must not be used directly from now on.
            trainer: trainer that is about to fit.
            count: returns the number of batches in a bundle, which may change between iterations.
            any_ends: returns whether the epoch ends in any group of processes, given whether it ends here. It is called
                only if the length of the epoch is unknown; None: there is one group.
            look: is called with the first batch before any other is read, and may change the size of bundles. It is
                called before each further bundle, with the batch before, until it returns True; None: nothing looks.
        """
        kind = cls if type(loader) is CombinedLoader else type(cls.__name__, (cls, type(loader)), {})
        made: BundledLoader = object.__new__(kind)
        vars(made).update(vars(loader))
        made._trainer, made._count, made._any_ends, made._look = trainer, count, any_ends, look
        made.when_begun, made._epoch = noop, _Epoch()
        return made

    @property
    def _counts_iterations(self) -> bool:
        """Whether Lightning's limits are numbers of iterations; otherwise they are numbers of batches."""
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
            # iterations of this epoch that an earlier run has completed
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
        """Show the last batch to ``look``; once it has seen enough, fill the bundles that Lightning has a batch of."""
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
        """Adapt the bundles that were read ahead, and the limits of the epoch, to a new size of bundles."""
        epoch = self._epoch
        while len(epoch.bundles) > epoch.given:
            epoch.give_back(epoch.bundles.pop().items)
        if self._iterator is not None and self._limits is not None and self._counts_iterations:
            ahead = [limit - epoch.iterations for limit in self._limits]
            self._iterator.limits = [epoch.read + iterations * self._count() for iterations in ahead]

    def _ends(self, here: bool) -> bool:
        """Return whether the epoch ends, given whether it ends in this group."""
        if self._any_ends is None or self._most < math.inf:
            return here
        return self._any_ends(here)

    @property
    def _most(self) -> float:
        """The largest number of batches in an epoch, by limits and the dataloader's length; infinite if unknown."""
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
        """Read until the bundles that are not taken include this number, from 0; return whether they do."""
        bundles = self._epoch.bundles
        while number >= len(bundles):
            items: list[Any] = []
            self._complete(items)
            if not items:
                return False
            bundles.append(_Bundle(items))
        return True

    def upcoming(self, ahead: int) -> _Bundle | None:
        """Return the bundle that is ``ahead`` bundles after the last one taken; None at the end of the data.

        It stays in the queue.
        """
        return self._epoch.bundles[ahead - 1] if self._reads(ahead - 1) else None

    def put_back(self) -> None:
        """Drop the copies of bundles on the device, so that each bundle is moved again when its iteration begins."""
        for bundle in self._epoch.bundles:
            bundle.moved = None

    def take(self) -> _Bundle:
        """Return the bundle of the iteration that begins."""
        epoch, count = self._epoch, self._count()
        bundle = epoch.bundles.popleft()
        epoch.given -= 1
        epoch.give_back(bundle.items[count:])  # read for pipelines that no longer exist
        epoch.read -= len(bundle.items[count:])
        del bundle.items[count:]
        return bundle

    def __len__(self) -> int:
        """Return the number of iterations of this epoch: those read, and the rest by the present bundle size."""
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
        count: see :meth:`BundledLoader.of`.
        any_ends: see :meth:`BundledLoader.of`.
        look: returns the ``look`` of :meth:`BundledLoader.of`; called when Lightning requests the dataloader.
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
    """Show the new number of batches of the running epoch in a progress bar that has stored the old one."""
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
        self._before_transfer = context.module._on_before_batch_transfer

    @property
    def _queue(self) -> BundledLoader | None:
        """The queue of bundles, while training reads from one."""
        loader = self._trainer.fit_loop._combined_loader
        return loader if isinstance(loader, BundledLoader) and self._trainer.training else None

    def before_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Run the hook before a batch's transfer, unless it is in the queue: for these batches :meth:`_moved_all` does.

        Lightning's loop calls this for each batch, and a batch in the queue may be on the device already.
        """
        return batch if self._queue is not None else self._before_transfer(batch, dataloader_idx)

    def to_device(self, batch: Any, dataloader_idx: int) -> Any:
        """Return pipeline 0's batch on the device, after its transfer hooks; :meth:`take` returns those of the others.

        Every process calls it; the reader sends the batches to the others.
        """
        self.dataloader_idx = dataloader_idx
        queue = self._queue
        if queue is None:
            return self._moved(batch, dataloader_idx, 0)
        batch, *self._others = self._moved_all(queue.take(), batch)
        return batch

    def next(self, ahead: int) -> list[Any]:
        """Return the batches of a later iteration of training on this process's device; none at the end of the data.

        :meth:`to_device` returns the same batches when Lightning's loop reaches them. Every process calls it.

        Args:
            ahead: position of the iteration after the current one, from 1.
        """
        loader = self._trainer.fit_loop._combined_loader
        assert isinstance(loader, BundledLoader)
        bundle = loader.upcoming(ahead)
        return [] if bundle is None else self._moved_all(bundle)

    def _moved_all(self, bundle: _Bundle, *converted: Any) -> list[Any]:
        """Return the batches of a bundle on the device, after all hooks that Lightning's loop calls before a step.

        Args:
            bundle: the bundle.
            converted: pipeline 0's batch, if the precision plugin has converted it.
        """
        if bundle.moved is None:
            others = (self._converted(batch) for batch, _, _ in bundle.items[len(converted) :])
            ready = itertools.chain(map(self._hooked, converted), others)
            bundle.moved = [self._moved(batch, 0, n) for n, batch in enumerate(ready)]
        return bundle.moved

    def put_back(self) -> None:
        """Drop batches that were moved to the device early; they are moved again when their iteration begins."""
        loader = self._trainer.fit_loop._combined_loader
        if isinstance(loader, BundledLoader):
            loader.put_back()

    def _converted(self, batch: Any) -> Any:
        """Convert a batch of training as Lightning does before its transfer."""
        return self._hooked(self._trainer.precision_plugin.convert_input(batch))

    def _hooked(self, batch: Any) -> Any:
        """Return a batch of training after the hook before its transfer, which runs on the reader only."""
        return self._before_transfer(batch, 0) if self._cluster.reads else batch

    def _moved(self, batch: Any, dataloader_idx: int, pipeline: int) -> Any:
        """Return a batch on the device, after its transfer hooks, which run on the reader only."""
        reads = self._cluster.reads
        if reads:
            module, device = self._trainer.lightning_module, self._cluster.device
            batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=dataloader_idx)
        if self._cluster.group.world_size > 1 and not self._distributor.sends_when_read:
            batch = self._distributor.pass_on(batch)
        batch = batch if reads else move_data_to_device(batch, self._cluster.device)
        return self._distributor.seal(batch, pipeline)

    def take(self, batch: Any) -> list[Any]:
        """Return the batches of all pipelines for this iteration, given pipeline 0's; fewer at the end of the data."""
        others, self._others = self._others, []
        return [batch, *others]

    def copied(self, batch: Any) -> Any:
        """Return a copy of a training batch, as read, on the device after its transfer hooks. All processes call it."""
        return self._moved(self._converted(copy.deepcopy(batch)), 0, 0)

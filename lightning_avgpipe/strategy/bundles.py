"""Bundles of batches: each iteration reads one for every pipeline from one dataloader.

::

    dataloader    0  1  2  3  4  5  6          7 batches, N = 3 pipelines
    iteration    |   0   |   1   | 2|          4 ... of the last bundle only pipeline 0 has a batch
    Lightning     0        3       6           sees the batch of pipeline 0, and counts iterations
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from lightning_avgpipe.strategy.progress import retotal
from lightning_avgpipe.utils.lightning import CombinedLoader, pl
from lightning_avgpipe.utils.patching import nothing, replaced


@dataclass
class _Epoch:
    """The position of reading in an epoch.

    Attributes:
        groups: groups that were read and not taken, each a list of batches with their indices.
        given: number of these groups that Lightning has; the others were read ahead.
        returned: batches that are read again, before any other.
        iterations: number of iterations that Lightning has a batch of.
        read: number of batches of these iterations.
        drawn: number of batches that the dataloader has given.
        began: whether the first batch was asked for.
        ended: whether the dataloader has no more.
        latest: the last batch that Lightning was given.
    """

    groups: deque[list[Any]] = field(default_factory=deque)
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
    """Yields the first batch of each group; :meth:`take` gives the others when their iteration begins.

    Lightning may read ahead, so groups are taken in the order in which they were read. Nothing is read beyond a group,
    so a dataloader that saves its state is never ahead of the training.

    Attributes:
        when_begun: called once, when the next epoch has begun.
    """

    _count: Callable[[], int]
    _any_ends: Callable[[bool], bool] | None
    _look: Callable[[Any], bool] | None
    _counts_iterations: bool
    _done: Callable[[], int]
    _epoch: _Epoch
    when_begun: Callable[[], None]

    @classmethod
    def of(
        cls,
        loader: CombinedLoader,
        count: Callable[[], int],
        counts_iterations: bool,
        any_ends: Callable[[bool], bool] | None = None,
        look: Callable[[Any], bool] | None = None,
        done: Callable[[], int] = int,
    ) -> BundledLoader:
        """Group the batches of a loader.

        Args:
            loader: loader that Lightning would use; must not be used otherwise from now on.
            count: returns N, which may change between iterations.
            counts_iterations: whether ``limits`` are numbers of iterations; else they are numbers of batches.
            any_ends: returns whether the epoch ends in any group of processes, given whether it ends here; called where
                lengths are not known.
            look: is shown the first batch before any other is read, and may change N; called again before each further
                group until it returns that it has seen enough.
            done: returns the number of iterations of this epoch that an earlier run has done; called before the first
                batch.
        """
        kind = cls if type(loader) is CombinedLoader else type(cls.__name__, (cls, type(loader)), {})
        made: BundledLoader = object.__new__(kind)
        vars(made).update(vars(loader))
        made._count, made._counts_iterations, made._any_ends = count, counts_iterations, any_ends
        made._look, made._done = look, done
        made.when_begun, made._epoch = nothing, _Epoch()
        return made

    def __iter__(self) -> Any:
        self._epoch = _Epoch()
        begun, self.when_begun = self.when_begun, nothing
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
            epoch.iterations = self._done()
            epoch.read = epoch.drawn = epoch.iterations * self._count()
        if self._look is not None:
            self._show(self._look)
        if self._ends(not self._reads(epoch.given)):
            raise StopIteration
        group = epoch.groups[epoch.given]
        epoch.read += len(group)
        epoch.given += 1
        epoch.iterations += 1
        epoch.began = True
        batch, _, dataloader_idx = group[0]
        epoch.latest = batch if self._look is not None else None
        return batch, epoch.iterations - 1, dataloader_idx

    def _show(self, look: Callable[[Any], bool]) -> None:
        """Show a batch to a function that may change N, and complete groups that were read ahead."""
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
            for group in islice(epoch.groups, epoch.given):
                before = len(group)
                self._complete(group)
                epoch.read += len(group) - before

    def relimit(self) -> None:
        """Adapt the group size and the number of batches of an epoch, after N has changed."""
        epoch = self._epoch
        while len(epoch.groups) > epoch.given:
            epoch.give_back(epoch.groups.pop())
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

    def _complete(self, group: list[Any]) -> None:
        while len(group) < self._count() and (item := self._next()) is not None:
            group.append(item)

    def _reads(self, number: int) -> bool:
        """Read until there is a group with this number among those that are not taken; return whether there is."""
        groups = self._epoch.groups
        while number >= len(groups):
            group: list[Any] = []
            self._complete(group)
            if not group:
                return False
            groups.append(group)
        return True

    def upcoming(self, ahead: int = 0) -> list[Any]:
        """Return the batches of all pipelines that follow the group taken last, or so many groups later.

        Empty at the end of the data. The batches are given again in their usual order.
        """
        return [batch for batch, _, _ in self._epoch.groups[ahead]] if self._reads(ahead) else []

    def take(self) -> list[Any]:
        """Return the batches of pipelines 1.. for the iteration that begins, in the order in which they were read."""
        epoch, count = self._epoch, self._count()
        group = epoch.groups.popleft()
        epoch.given -= 1
        epoch.give_back(group[count:])  # read for pipelines that are gone by now
        epoch.read -= len(group[count:])
        return [batch for batch, _, _ in group[1:count]]

    def __len__(self) -> int:
        """Return the number of iterations of this epoch: those read, and what the rest gives with N as it is now."""
        return self._epoch.iterations + math.ceil((super().__len__() - self._epoch.read) / self._count())


@contextlib.contextmanager
def bundling(
    trainer: pl.Trainer,
    count: Callable[[], int],
    any_ends: Callable[[bool], bool] | None = None,
    look: Callable[[], Callable[[Any], bool] | None] = lambda: None,
) -> Iterator[None]:
    """Within this context the training dataloader is read in groups.

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
        counts_iterations = isinstance(trainer.limit_train_batches, int)
        return BundledLoader.of(loader, count, counts_iterations, any_ends, look(), partial(_done, trainer))

    with replaced(source, "dataloader", dataloader):
        yield


def _done(trainer: pl.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


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
    retotal(trainer)

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

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_avgpipe.strategy.progress import retotal
from lightning_avgpipe.utils.patching import nothing, replaced


def _as_before() -> Callable[[], None]:
    return nothing


@dataclass
class _Epoch:
    """Where reading stands in an epoch.

    Attributes:
        groups: that were read and not taken, each of batches as the loader gives them, with their places.
        given: so many of them Lightning has; the others were read ahead.
        returned: batches that come once more, before any other.
        iterations: of which Lightning has the batch.
        read: batches of these.
        drawn: batches that the dataloader has given.
        began: whether the first batch was asked for.
        ended: whether the dataloader has no more.
        latest: batch that Lightning has.
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
        """They come once more, in this order."""
        self.returned.extendleft(reversed(list(items)))


class BundledLoader(CombinedLoader):
    """Yields the first batch of each group; the others wait beside it until their iteration begins.

    Lightning may read ahead, so groups are taken in the order in which they were read. Nothing is read beyond a group,
    so a dataloader that saves its state is not ahead of the training.

    Attributes:
        renewed: called once, before the next epoch begins; what it returns is called when it has.
    """

    _count: Callable[[], int]
    _any_ends: Callable[[bool], bool] | None
    _look: Callable[[Any], bool] | None
    _counts_iterations: bool
    _done: Callable[[], int]
    _epoch: _Epoch
    renewed: Callable[[], Callable[[], None]]

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
            loader: as Lightning would use it; not to be used otherwise from now on.
            count: N, which may change between iterations.
            counts_iterations: whether ``limits`` are numbers of iterations; else of batches.
            any_ends: whether this epoch ends, given whether it does here; asked where lengths are not known.
            look: is shown the first batch before any other is read, and may change N; again before each further group
                until it returns that it has seen enough.
            done: iterations of this epoch that a run before this one has done; asked when the first batch is.
        """
        kind = cls if type(loader) is CombinedLoader else type(cls.__name__, (cls, type(loader)), {})
        made: BundledLoader = object.__new__(kind)
        vars(made).update(vars(loader))
        made._count, made._counts_iterations, made._any_ends = count, counts_iterations, any_ends
        made._look, made._done = look, done
        made.renewed, made._epoch = _as_before, _Epoch()
        return made

    @property
    def iterations(self) -> int:
        """Of this epoch, that were read."""
        return self._epoch.iterations

    def begin_again(self) -> None:
        """In the midst of an epoch, with nothing read ahead: from now on read what the dataloader has now."""
        limits, self._limits = self._limits, None
        self._epoch = _Epoch(iterations=self.iterations, began=True)
        super().__iter__()
        self._limits = limits
        if self._counts_iterations:
            assert self._iterator is not None and limits is not None
            self._iterator.limits = [(limit - self.iterations) * self._count() for limit in limits]

    def __iter__(self) -> Any:
        self._epoch = _Epoch()
        begun, self.renewed = self.renewed(), _as_before
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
        """Let somebody look who may change N. A group that was read ahead is completed."""
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
        """N is another, and so is the number of batches of an epoch that has a number of iterations."""
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
        """Batches of an epoch, which a limit may end before the dataloader does; infinite if that is not known."""
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
        """Read so far; tells whether there is a group of this number among those that are not taken."""
        groups = self._epoch.groups
        while number >= len(groups):
            group: list[Any] = []
            self._complete(group)
            if not group:
                return False
            groups.append(group)
        return True

    def upcoming(self, ahead: int = 0) -> list[Any]:
        """The batches after those that were taken last, or so many groups later, with that of pipeline 0; none at the
        end.

        They come once more, in their turn.
        """
        return [batch for batch, _, _ in self._epoch.groups[ahead]] if self._reads(ahead) else []

    def take(self) -> list[Any]:
        """The batches of pipelines 1.. for the iteration that begins, in the order in which they were read."""
        epoch, count = self._epoch, self._count()
        group = epoch.groups.popleft()
        epoch.given -= 1
        epoch.give_back(group[count:])  # read for pipelines that are gone by now
        epoch.read -= len(group[count:])
        return [batch for batch, _, _ in group[1:count]]

    def __len__(self) -> int:
        """Iterations: those of this epoch that were read, and as many as the rest gives with N as it is now."""
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
        trainer: that is about to fit.
        count: N.
        any_ends: see :meth:`BundledLoader.of`.
        look: returns what looks, see there; asked when the dataloader is.
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
    """Tell Lightning how many iterations the epoch has, now that N is another."""
    loop = trainer.fit_loop
    loader = loop._combined_loader
    if isinstance(loader, BundledLoader):
        loader.relimit()
        if loader.renewed is _as_before:  # the next epoch has another number again
            loader.renewed = lambda: partial(recount, trainer)
    if loop._combined_loader is None or loop.max_batches == float("inf"):
        return
    length = len(loop._combined_loader)
    loop.max_batches = length
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = length
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))
    retotal(trainer)

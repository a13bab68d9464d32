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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_avgpipe.strategy.progress import retotal
from lightning_avgpipe.utils.patching import nothing, replaced


def _as_before() -> Callable[[], None]:
    return nothing


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
    _held: deque[list[Any]]
    _counts_iterations: bool
    _done: Callable[[], int]
    _beside: deque[list[Any]]
    _first: deque[Any]
    _returned: deque[Any]
    _latest: Any
    _groups: int
    _read: int
    _drawn: int
    _began: bool
    _ended: bool
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
        made.renewed = _as_before
        made._clear()
        return made

    @property
    def iterations(self) -> int:
        """Of this epoch, that were read."""
        return self._groups

    def begin_again(self) -> None:
        """In the midst of an epoch, with nothing read ahead: from now on read what the dataloader has now."""
        iterations, limits = self._groups, self._limits
        self._clear()
        self._limits = None
        super().__iter__()
        self._limits = limits
        self._groups, self._began = iterations, True
        if self._counts_iterations:
            assert self._iterator is not None and limits is not None
            self._iterator.limits = [(limit - iterations) * self._count() for limit in limits]

    def _clear(self) -> None:
        self._beside, self._returned, self._held = deque(), deque(), deque()
        self._first = deque()  # of the groups beside
        self._groups = self._read = self._drawn = 0
        self._began = False
        self._ended = False
        self._latest = None

    def __iter__(self) -> Any:
        self._clear()
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
        if not self._began:
            self._groups = self._done()
            self._read = self._drawn = self._groups * self._count()
        if self._look is not None:
            self._show(self._look)
        group = self._held.popleft() if self._held else self._next_group()
        if self._ends(not group):
            raise StopIteration
        self._read += len(group)
        self._groups += 1
        self._began = True
        self._beside.append(group[1:])
        self._first.append(group[0])
        batch, _, dataloader_idx = group[0]
        self._latest = batch if self._look is not None else None
        return batch, self._groups - 1, dataloader_idx

    def _show(self, look: Callable[[Any], bool]) -> None:
        """Let somebody look who may change N. A group that was read ahead is completed."""
        batch = self._latest
        if not self._began:
            item = self._next()
            if self._ends(item is None):
                return
            self._returned.appendleft(item)
            batch = item[0]
        if look(batch):
            self._look = self._latest = None
            for group in self._beside:
                before = len(group)
                while len(group) < self._count() - 1 and (item := self._next()) is not None:
                    group.append(item)
                self._read += len(group) - before

    def relimit(self) -> None:
        """N is another, and so is the number of batches of an epoch that has a number of iterations."""
        while self._held:
            self._returned.extendleft(reversed(self._held.pop()))
        if self._iterator is not None and self._limits is not None and self._counts_iterations:
            ahead = [limit - self._groups for limit in self._limits]
            self._iterator.limits = [self._read + iterations * self._count() for iterations in ahead]

    def _ends(self, here: bool) -> bool:
        if self._any_ends is None or self._sized:
            return here
        return self._any_ends(here)

    @property
    def _sized(self) -> bool:
        return self._most < math.inf

    @property
    def _most(self) -> float:
        """Batches of an epoch, which a limit may end before the dataloader does; infinite if that is not known."""
        try:
            return super().__len__()
        except (TypeError, NotImplementedError):
            return math.inf

    def _next(self) -> Any:
        if self._returned:
            return self._returned.popleft()
        if not self._ended and self._drawn < self._most:
            try:
                item = super().__next__()
                self._drawn += 1
                return item
            except StopIteration:
                self._ended = True
        return None

    def _next_group(self) -> list[Any]:
        group: list[Any] = []
        while len(group) < self._count() and (item := self._next()) is not None:
            group.append(item)
        return group

    def upcoming(self, ahead: int = 0) -> list[Any]:
        """The batches after those that were taken last, or so many groups later, with that of pipeline 0; none at the
        end.

        They come once more, in their turn.
        """
        while ahead >= len(self._beside) + len(self._held):
            if not (group := self._next_group()):
                return []
            self._held.append(group)
        if ahead < len(self._beside):
            return [self._first[ahead][0], *(batch for batch, _, _ in self._beside[ahead])]
        return [batch for batch, _, _ in self._held[ahead - len(self._beside)]]

    def take(self) -> list[Any]:
        """The batches of pipelines 1.. for the iteration that begins, in the order in which they were read."""
        group = self._beside.popleft()
        self._first.popleft()
        room = self._count() - 1
        self._returned.extendleft(reversed(group[room:]))  # read for pipelines that are gone by now
        self._read -= len(group[room:])
        return [batch for batch, _, _ in group[:room]]

    def __len__(self) -> int:
        """Iterations: those of this epoch that were read, and as many as the rest gives with N as it is now."""
        return self._groups + math.ceil((super().__len__() - self._read) / self._count())


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

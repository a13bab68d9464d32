"""The batch stream: from the process that reads batches to the others, each of which gets what it needs of them.

::

    reader      batch 0   batch 1   compute 0     batch 2   compute 1    ...
    others      ------->  batch 0   ---------->   batch 1 is there when compute 0 ends

Several dataloaders take turns (validation in the middle of an epoch), and some are left before their end, so every
item carries the number of its stream; the others keep what belongs to another stream for later.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.message import pack, unpack
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta

# (batch, rank) -> names of the tensors that the rank needs; None: all
Needs = Callable[[Any, int], frozenset[str] | None]


class _Unsent:
    """In the place of a tensor that the receiver does not need. No dataclass: those are trees, this is a leaf."""

    def __init__(self, meta: TensorMeta, name: str) -> None:
        self.meta = meta
        self.name = name


class _Closed:
    """Takes the place of items after the last one."""


_POSTED = 4  # receives; a sender that has to wait for one of them waits behind what else is on the links


@dataclass(frozen=True)
class Passed:
    """An item on its way.

    Attributes:
        requests: what processes have been asked to do from outside, as the reader knew when it passed the item on.
    """

    item: Any
    requests: frozenset[str]


class BatchStream(ABC):
    """One process's end of the batch stream. All processes begin the same streams in the same order.

    Args:
        agree: told of the requests that came with an item, at the same point of the program on all processes.
    """

    def __init__(self, agree: Callable[[frozenset[str]], None]) -> None:
        self._numbers = itertools.count()
        self._agree = agree

    def begin(self, instead_of: int | None = None) -> int:
        """A new stream of items, perhaps instead of one of which nothing more is wanted."""
        return next(self._numbers)

    @abstractmethod
    def pass_on(self, stream: int, item: Any = None, needs: Needs | None = None) -> Passed:
        """The reader passes an item and does not wait; the others get it, with absent tensors where they need none.

        Args:
            stream: what :meth:`begin` returned.
            item: any tree of tensors and picklable leaves; ignored on processes that do not read.
            needs: which tensors each process needs; None: all.
        """

    def accept(self, passed: Passed) -> Any:
        """The item, whose turn has come. The reader may have passed it on long before."""
        self._agree(passed.requests)
        return passed.item

    @abstractmethod
    def close(self) -> None:
        """Nothing more will come. Every process calls it."""


class BatchSource(BatchStream):
    """The reader's end.

    Args:
        outboxes: rank -> channel.
        requests: what processes have been asked to do by now.
    """

    def __init__(
        self,
        outboxes: Mapping[int, Outbox],
        agree: Callable[[frozenset[str]], None],
        requests: Callable[[], frozenset[str]],
    ) -> None:
        super().__init__(agree)
        self._outboxes = outboxes
        self._requests = requests

    def pass_on(self, stream: int, item: Any = None, needs: Needs | None = None) -> Passed:
        requests = self._requests()
        for rank, outbox in self._outboxes.items():
            wanted = None if needs is None else needs(item, rank)
            outbox.put(pack((stream, requests, _without(item, wanted))))
        return Passed(item, requests)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            for _ in range(_POSTED):
                outbox.put(pack((-1, frozenset(), _Closed)))


class BatchSink(BatchStream):
    """The end of a process that does not read.

    Args:
        inbox: from the reader.
        device: where absent tensors pretend to be.
        wait: returns as soon as a condition holds; bounded.
    """

    def __init__(
        self,
        inbox: Inbox,
        agree: Callable[[frozenset[str]], None],
        device: torch.device,
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        super().__init__(agree)
        self._inbox = inbox
        self._device = device
        self._wait = wait
        self._posted = self._closed = 0
        self._items: dict[int, deque[Passed]] = defaultdict(deque)
        self._given_up: set[int] = set()

    def begin(self, instead_of: int | None = None) -> int:
        if instead_of is not None:
            self._items.pop(instead_of, None)
            self._given_up.add(instead_of)
        return super().begin()

    def pass_on(self, stream: int, item: Any = None, needs: Needs | None = None) -> Passed:
        while not self._items[stream]:
            self._receive()
        return self._items[stream].popleft()

    def close(self) -> None:
        while self._closed < _POSTED:
            self._receive()

    def _receive(self) -> None:
        self._inbox.expect(_POSTED - self._closed - self._posted)
        self._wait(self._inbox.ready)
        stream, requests, item = unpack(self._inbox.get())
        self._posted = _POSTED - self._closed - 1
        if item is _Closed:
            self._closed += 1
        elif stream not in self._given_up:
            leaves, spec = tree.flatten(item)
            self._items[stream].append(Passed(tree.unflatten([self._filled(leaf) for leaf in leaves], spec), requests))

    def _filled(self, leaf: Any) -> Any:
        return Absent.of_batch(leaf.meta, self._device, leaf.name) if isinstance(leaf, _Unsent) else leaf


def _without(item: Any, wanted: frozenset[str] | None) -> Any:
    """The item without the numbers of tensors that are not wanted."""
    if wanted is None:
        return item
    named, spec = tree.flatten_with_names(item)
    leaves = [
        leaf if not isinstance(leaf, Tensor) or name in wanted else _Unsent(TensorMeta.of(leaf), name)
        for name, leaf in named
    ]
    return tree.unflatten(leaves, spec)

"""The batch stream: the process that reads batches sends to each other process the tensors which that process needs.

::

    reader      batch 0   batch 1   compute 0     batch 2   compute 1    ...
    others      ------->  batch 0   ---------->   batch 1 is there when compute 0 ends

Several dataloaders take turns (validation in the middle of an epoch), and some are left before their end, so every
item carries the number of its stream. The receivers keep items of another stream for later.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.control import ControlChannel
from lightning_avgpipe.comm.message import pack
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta

# (batch, rank) -> names of the tensors that the rank needs; None: all of them
Needs = Callable[[Any, int], frozenset[str] | None]

# Receives that are posted in advance. A sender that finds none waits until the announcement of the next one has passed
# the other traffic on the link.
_POSTED = 4


class _Unsent:
    """A leaf in the place of a tensor that the receiver does not need. A dataclass would be a tree, not a leaf."""

    def __init__(self, meta: TensorMeta, name: str) -> None:
        self.meta = meta
        self.name = name


class _Closed:
    """A marker that takes the place of items after the last one."""


@dataclass(frozen=True)
class Passed:
    """An item of a batch stream together with the requests that were known when the reader sent it.

    Attributes:
        item: any tree of tensors and other leaves.
        requests: requests from outside (such as to stop), as the reader knew them when it sent the item.
    """

    item: Any
    requests: frozenset[str]


class BatchStream:
    """One process's end of the batch stream. All processes begin the same streams in the same order.

    Args:
        control: knows the requests that go with an item, and agrees on them when its turn comes.
        device: device that absent tensors report.
        outboxes: on the reader, channel to each other rank, by rank; else None.
        inbox: on the other processes, channel from the reader; else None.
        doing: what a process does that waits for an item, for messages.
    """

    def __init__(
        self,
        control: ControlChannel,
        device: torch.device,
        outboxes: Mapping[int, Outbox] | None = None,
        inbox: Inbox | None = None,
        doing: str = "",
    ) -> None:
        self._control, self._device = control, device
        self._outboxes, self._inbox, self._doing = outboxes or {}, inbox, doing
        self._numbers = itertools.count()
        self._posted = self._closed = 0
        self._items: dict[int, deque[Passed]] = defaultdict(deque)
        self._given_up: dict[int, int] = {}  # stream -> the one that has begun in its place

    def begin(self, instead_of: int | None = None) -> int:
        """Begin a new stream of items and return its number.

        Args:
            instead_of: number of a stream that ends early: its further items are dropped.
        """
        number = next(self._numbers)
        if instead_of is not None and self._inbox is not None:
            self._items.pop(instead_of, None)
            self._given_up[instead_of] = number
        return number

    def pass_on(self, stream: int, item: Any = None, needs: Needs | None = None) -> Passed:
        """Send an item without waiting on the reader; wait for the next item of the stream on other processes.

        Tensors that a receiver does not need are absent in its item.

        Args:
            stream: number that :meth:`begin` returned.
            item: any tree of tensors and picklable leaves; ignored on processes that do not read.
            needs: function that returns which tensors a rank needs; None: every rank needs all of them.
        """
        if self._inbox is not None:
            while not self._items[stream]:
                self._receive(self._inbox)
            return self._items[stream].popleft()
        requests = self._control.requests()
        for rank, outbox in self._outboxes.items():
            wanted = None if needs is None else needs(item, rank)
            outbox.put(pack((stream, requests, _without(item, wanted))))
        return Passed(item, requests)

    def accept(self, passed: Passed) -> Any:
        """Return the item, and agree on its requests, when its turn comes; it may have been sent long before."""
        self._control.agree(passed.requests)
        return passed.item

    def close(self) -> None:
        """End the batch stream: no further item is sent. Every process calls it."""
        for outbox in self._outboxes.values():
            for _ in range(_POSTED):
                outbox.put(pack((-1, frozenset(), _Closed)))
        while self._inbox is not None and self._closed < _POSTED:
            self._receive(self._inbox)

    def _receive(self, inbox: Inbox) -> None:
        inbox.expect(_POSTED - self._closed - self._posted)
        stream, requests, item = self._control.hear(inbox, self._doing)
        self._posted = _POSTED - self._closed - 1
        # nothing more comes of a stream when the one in its place has come
        self._given_up = {old: new for old, new in self._given_up.items() if new > stream}
        if item is _Closed:
            self._closed += 1
        elif stream not in self._given_up:
            leaves, spec = tree.flatten(item)
            leaves = [
                Absent.of_batch(leaf.meta, self._device, leaf.name) if isinstance(leaf, _Unsent) else leaf
                for leaf in leaves
            ]
            self._items[stream].append(Passed(tree.unflatten(leaves, spec), requests))


def _without(item: Any, wanted: frozenset[str] | None) -> Any:
    """Return the item with placeholders for the tensors that are not wanted; None wants all."""
    if wanted is None:
        return item
    named, spec = tree.flatten_with_names(item)
    leaves = [
        leaf if not isinstance(leaf, Tensor) or name in wanted else _Unsent(TensorMeta.of(leaf), name)
        for name, leaf in named
    ]
    return tree.unflatten(leaves, spec)

"""The batch stream: the process that reads batches sends every other process the tensors that it needs.

::

    reader      batch 0   batch 1   compute 0     batch 2   compute 1    ...
    others      ------->  batch 0   ---------->   batch 1 is there when compute 0 ends

Dataloaders alternate (validation in the middle of an epoch), and some are abandoned before their end, so every item
carries the number of its stream. A receiver that waits for one stream keeps items of the others for later.
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

# Number of receives that are posted in advance. Without one, the sender must wait until the announcement of a receive
# arrives, which queues behind other traffic on the link.
_POSTED = 4


class _Unsent:
    """A leaf in place of a tensor that the receiver does not need. No dataclass: tree functions would flatten one."""

    def __init__(self, meta: TensorMeta, name: str) -> None:
        self.meta = meta
        self.name = name


class _Closed:
    """A marker that is sent in place of items after the last one."""


@dataclass(frozen=True)
class Passed:
    """An item of a batch stream together with the requests that were known when the reader sent it.

    Attributes:
        item: any tree of tensors and other leaves.
        requests: external requests (such as to stop) that the reader knew when it sent the item.
    """

    item: Any
    requests: frozenset[str]


class BatchStream:
    """One process's end of the batch stream. All processes begin the same streams in the same order.

    Args:
        control: control channel, which has the requests to send with an item, and handles them when the item is used.
        device: device that absent tensors report.
        outboxes: on the reader, channel to each other rank, by rank; else None.
        inbox: on the other processes, channel from the reader; else None.
        doing: what a process that waits for an item is doing, for messages.
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
        self._given_up: dict[int, int] = {}  # abandoned stream -> the stream that replaces it

    def begin(self, instead_of: int | None = None) -> int:
        """Begin a new stream of items and return its number.

        Args:
            instead_of: number of a stream that ends early; its remaining items are dropped.
        """
        number = next(self._numbers)
        if instead_of is not None and self._inbox is not None:
            self._items.pop(instead_of, None)
            self._given_up[instead_of] = number
        return number

    def pass_on(self, stream: int, item: Any = None, needs: Needs | None = None) -> Passed:
        """Return the stream's next item: the reader sends it, without waiting, and other processes wait for it.

        Tensors that a receiver does not need are replaced by placeholders in its item.

        Args:
            stream: number that :meth:`begin` returned.
            item: any tree of tensors and picklable leaves; ignored on processes that do not read.
            needs: function that returns the names of the tensors that a rank needs; None: every rank needs all of them.
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
        """Return an item whose turn has come, and handle its requests. The item may have been sent long before."""
        self._control.agree(passed.requests)
        return passed.item

    def close(self) -> None:
        """End the batch stream, and complete the receives that are posted in advance. Every process calls it."""
        for outbox in self._outboxes.values():
            for _ in range(_POSTED):
                outbox.put(pack((-1, frozenset(), _Closed)))
        while self._inbox is not None and self._closed < _POSTED:
            self._receive(self._inbox)

    def _receive(self, inbox: Inbox) -> None:
        inbox.expect(_POSTED - self._closed - self._posted)
        stream, requests, item = self._control.receive(inbox, self._doing)
        self._posted = _POSTED - self._closed - 1
        # once an item of the replacing stream has arrived, no more items of the abandoned one can
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

"""Collectives: what a set of processes does together on the host. Every wait is bounded, and looks for failures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes
from lightning_avgpipe.comm.network import Network
from lightning_avgpipe.comm.routes import Party
from lightning_avgpipe.comm.transfer import transfer

T = TypeVar("T")

_TAG = 0
_BLOCK, _SIZE = 1024, 8  # bytes of an exchange's first message, and of the number that it begins with


class Collectives:
    """A set of processes.

    Args:
        party: of the members.
        rank: of this process among all.
        network: connects them; not asked if there is only one.
        run: runs something that waits for the others, and says for errors what this process does meanwhile.
        moved: called when bytes went over a connection.

    All methods but ``ranks`` mean ranks among the members.
    """

    def __init__(
        self,
        party: Party,
        rank: int,
        network: Network,
        run: Callable[[Callable[[], object], str], None],
        moved: Callable[[], None],
    ) -> None:
        self._party = party
        self._rank = rank
        self._network = network
        self._run = run
        self._moved = moved

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.ranks.index(self._rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the members among all."""
        return self._party.ranks

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def process_group(self) -> Any:
        """What connects the members, while they are connected: that of torch, if the network is; None for one."""
        return None if self.world_size == 1 else self._network.group(self._party)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective, unless there is one process; while it waits, look whether another process has failed."""
        if self.world_size > 1:
            self._run(collective, f"waits for the other processes in {what}")

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all processes."""
        self.together(what, lambda: self.process_group.allreduce([torch.zeros(1)]).wait())

    def broadcast(self, item: T, source: int = 0) -> T:
        """Every process gets the source's item."""
        if self.world_size == 1:
            return item
        mine = _pickled(item)  # the source may be another process, if a collective is repeated
        found: list[Tensor] = []

        def exchange() -> None:
            size = torch.tensor([mine.numel()])
            self.process_group.broadcast(size, source).wait()
            found[:] = [mine if self.rank == source else torch.empty(int(size), dtype=torch.uint8)]
            self._broadcast(found[0], source)

        self.together("a broadcast", exchange)
        return item if found[0] is mine else _unpickled(found[0])  # type: ignore[no-any-return]

    def gather_objects(self, item: T) -> list[T]:
        """On rank 0 every process's item, by rank; elsewhere only one's own."""
        if self.world_size == 1:
            return [item]
        mine, items = _pickled(item), [item]

        def exchange() -> None:
            del items[1:]
            if self.rank != 0:
                self.peer(0).send(torch.tensor([mine.numel()]))
                self.peer(0).send(mine)
                return
            for peer in map(self.peer, range(1, self.world_size)):
                size = peer.receive(torch.empty(1, dtype=torch.int64))
                items.append(_unpickled(peer.receive(torch.empty(int(size), dtype=torch.uint8))))

        self.together("a gathering of objects", exchange)
        return items

    def exchange_objects(self, item: T) -> list[T]:
        """Every process's item, by rank, on all of them."""
        if self.world_size == 1:
            return [item]
        mine = _pickled(item)
        found: list[T] = []

        def exchange() -> None:
            found[:] = _items(mine, self._gathered(_first(mine)), self._gathered)

        self.together("an exchange of objects", exchange)
        return found

    def begin_exchange(self, item: T) -> Callable[[], list[T]]:
        """Begin :meth:`exchange_objects`, and go on meanwhile; what is returned ends it. All begin and end theirs."""
        if self.world_size == 1:
            return lambda: [item]
        what, mine = "an exchange of objects", _pickled(item)
        first = _first(mine)
        blocks = [torch.empty_like(first) for _ in self.ranks]
        try:
            work = self.process_group.allgather(blocks, first)
        except RuntimeError:  # a connection broke: whoever waits says which
            return partial(self.exchange_objects, item)

        def gathered(padded: Tensor) -> list[Tensor]:
            parts: list[Tensor] = []
            self.together(what, lambda: parts.extend(self._gathered(padded)))
            return parts

        def finish() -> list[T]:
            wait_for(self, work, what)
            return _items(mine, blocks, gathered)

        return finish

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in self.ranks]
        self.process_group.allgather(parts, mine).wait()
        return parts

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place, for a tensor on the host."""
        mine = tensor.clone()

        def exchange() -> None:
            self.process_group.allreduce([tensor.copy_(mine)]).wait()

        self.together("a sum", exchange)
        return tensor

    def peer(self, rank: int) -> Peer:
        """A member, to send to or receive from within :meth:`together`."""
        return Peer(self.process_group, rank, self._moved)

    def _broadcast(self, flat: Tensor, source: int) -> None:
        transfer(lambda part: self.process_group.broadcast(part, source), flat, self._moved)


@dataclass(frozen=True)
class Peer:
    """A member of a set of processes, as another one sees it.

    Attributes:
        process_group: connects them.
        rank: of it among the members.
        moved: called when bytes went over a connection.
    """

    process_group: Any
    rank: int
    moved: Callable[[], None]

    def send(self, tensor: Tensor) -> None:
        """Send to it; it receives."""
        flat = as_bytes(tensor.cpu().contiguous())
        transfer(lambda part: self.process_group.send([part], self.rank, _TAG), flat, self.moved)

    def receive(self, like: Tensor) -> Tensor:
        """What it sends, of this shape and type, on the host."""
        received = torch.empty(like.shape, dtype=like.dtype)
        transfer(lambda part: self.process_group.recv([part], self.rank, _TAG), as_bytes(received), self.moved)
        return received


def wait_for(members: Collectives, work: Any, what: str) -> None:
    """Wait for what a set of processes has begun, in this thread if it is over."""
    try:
        over = work.is_completed() and work.wait()
    except RuntimeError:  # a connection broke: it says so once more, where that is made out
        over = False
    if not over:
        members.together(what, work.wait)


def _pickled(item: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)


def _first(mine: Tensor) -> Tensor:
    """A block of a size that all know: how long an item is, and all of it, if it is small."""
    block = torch.zeros(_BLOCK, dtype=torch.uint8)
    block[:_SIZE] = torch.tensor([mine.numel()]).view(torch.uint8)
    block[_SIZE : _SIZE + mine.numel()] = mine[: _BLOCK - _SIZE]
    return block


def _items(mine: Tensor, blocks: Sequence[Tensor], gather: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Of all processes, from the blocks of all; if one does not hold its item, all gather as much as the longest."""
    sizes = [int(block[:_SIZE].view(torch.int64)) for block in blocks]
    parts = [block[_SIZE:] for block in blocks]
    if max(sizes) > _BLOCK - _SIZE:
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = gather(padded)
    return [_unpickled(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

"""Collectives: operations of a set of processes on the host. Every wait is bounded and ends when a process fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes, pickled
from lightning_avgpipe.comm.network import Connector
from lightning_avgpipe.comm.routes import Party
from lightning_avgpipe.comm.transfer import transfer

T = TypeVar("T")

_TAG = 0
_BLOCK, _SIZE = 1024, 8  # bytes of an exchange's first message, and of the length at its beginning


class Collectives:
    """The collective operations of a set of processes.

    Ranks are those among the members, except for ``ranks``.

    Args:
        party: members of the set.
        rank: rank of this process among all.
        network: network that connects the members; unused if there is only one.
        run: runs a function that waits for the other members; its second argument says, for errors, what this process
            does.
        moved: called when bytes went over a connection.
    """

    def __init__(
        self,
        party: Party,
        rank: int,
        network: Connector,
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
        """The rank of this process among the members."""
        return self.ranks.index(self._rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members among all processes."""
        return self._party.ranks

    @property
    def world_size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def process_group(self) -> Any:
        """The process group of the members, once they are connected; None for a single member."""
        return None if self.world_size == 1 else self._network.group(self._party)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective, unless there is one member; stop waiting for it when a process has failed."""
        if self.world_size > 1:
            self._run(collective, f"waits for the other processes in {what}")

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all members."""
        self.together(what, lambda: self.process_group.allreduce([torch.zeros(1, device="cpu")]).wait())

    def broadcast(self, item: T, source: int = 0) -> T:
        """Return the source's item, on every member."""
        if self.world_size == 1:
            return item
        data = _pickled(item) if self.rank == source else torch.empty(0, dtype=torch.uint8, device="cpu")

        def exchange() -> None:
            nonlocal data
            size = torch.tensor([data.numel()], device="cpu")
            self.process_group.broadcast(size, source).wait()
            data = data if self.rank == source else torch.empty(int(size), dtype=torch.uint8, device="cpu")
            transfer(lambda part: self.process_group.broadcast(part, source), data, self._moved)

        self.together("a broadcast", exchange)
        return item if self.rank == source else _unpickled(data)  # type: ignore[no-any-return]

    def gather_objects(self, item: T) -> list[T]:
        """Return the items of all members, by rank, on rank 0; on other ranks only their own."""
        if self.world_size == 1:
            return [item]
        mine, items = _pickled(item), [item]

        def exchange() -> None:
            if self.rank != 0:
                self.peer(0).send(torch.tensor([mine.numel()], device="cpu"))
                self.peer(0).send(mine)
                return
            for peer in map(self.peer, range(1, self.world_size)):
                size = peer.receive(torch.empty(1, dtype=torch.int64, device="cpu"))
                items.append(_unpickled(peer.receive(torch.empty(int(size), dtype=torch.uint8, device="cpu"))))

        self.together("a gathering of objects", exchange)
        return items

    def exchange_objects(self, item: T) -> list[T]:
        """Return the items of all members, by rank, on every member."""
        if self.world_size == 1:
            return [item]
        mine = _pickled(item)
        found: list[T] = []

        def exchange() -> None:
            found[:] = _items(mine, self._gathered(_first(mine)), self._gathered)

        self.together("an exchange of objects", exchange)
        return found

    def begin_exchange(self, item: T) -> Callable[[], list[T]]:
        """Begin :meth:`exchange_objects` without waiting. All members begin and end their exchanges in the same order.

        Returns:
            A function that waits for the exchange and returns the items of all members, by rank.
        """
        if self.world_size == 1:
            return lambda: [item]
        what, mine = "an exchange of objects", _pickled(item)
        first = _first(mine)
        blocks = [torch.empty_like(first) for _ in self.ranks]
        try:
            work = self.process_group.allgather(blocks, first)
        except RuntimeError:  # a connection broke; exchange_objects raises the error that explains it
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
        """Sum a host tensor over the members, in place, and return the tensor."""
        self.together("a sum", lambda: self.process_group.allreduce([tensor]).wait())
        return tensor

    def peer(self, rank: int) -> Peer:
        """Return a member, to send to or receive from within :meth:`together`."""
        return Peer(self.process_group, rank, self._moved)


@dataclass(frozen=True)
class Peer:
    """A member of a set of processes, to which another member sends and from which it receives.

    Attributes:
        process_group: process group of the members.
        rank: rank of the peer among the members.
        moved: called when bytes went over a connection.
    """

    process_group: Any
    rank: int
    moved: Callable[[], None]

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the peer, which must receive it, and wait until it is sent."""
        flat = as_bytes(tensor.cpu().contiguous())
        transfer(lambda part: self.process_group.send([part], self.rank, _TAG), flat, self.moved)

    def receive(self, like: Tensor) -> Tensor:
        """Receive a tensor of the shape and type of ``like`` from the peer, and return it on the host."""
        received = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        transfer(lambda part: self.process_group.recv([part], self.rank, _TAG), as_bytes(received), self.moved)
        return received


def wait_for(members: Collectives, work: Any, what: str) -> None:
    """Wait for a collective that has begun. One that is over already is completed in this thread."""
    try:
        over = work.is_completed() and work.wait()
    except RuntimeError:  # a connection broke; waiting again, below, raises the error that explains it
        over = False
    if not over:
        members.together(what, work.wait)


def _pickled(item: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickled(item)), dtype=torch.uint8)


def _first(mine: Tensor) -> Tensor:
    """Return a block of fixed size: the length of an item, and as much of the item as fits."""
    block = torch.zeros(_BLOCK, dtype=torch.uint8, device="cpu")
    block[:_SIZE] = torch.tensor([mine.numel()], device="cpu").view(torch.uint8)
    block[_SIZE : _SIZE + mine.numel()] = mine[: _BLOCK - _SIZE]
    return block


def _items(mine: Tensor, blocks: Sequence[Tensor], gather: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Return the items of all members from their blocks; if one does not fit its block, gather all items padded."""
    sizes = [int(block[:_SIZE].view(torch.int64)) for block in blocks]
    parts = [block[_SIZE:] for block in blocks]
    if max(sizes) > _BLOCK - _SIZE:
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        parts = gather(padded)
    return [_unpickled(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

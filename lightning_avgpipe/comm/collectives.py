"""Collectives: what a set of processes does together on the host. Every wait is bounded, and looks for failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.clock import ClockOffset, estimate_offset, host_now
from lightning_avgpipe.comm.codec import as_bytes
from lightning_avgpipe.comm.transfer import transfer

__all__ = ["Collectives"]

T = TypeVar("T")

_CLOCK_ROUNDS = 16


class Collectives(ABC):
    """A set of processes.

    Args:
        ranks: of the members among all processes, ascending.
        rank: of this process among the members.

    Attributes:
        ranks: as given.
        rank: as given. All methods mean such ranks.
        world_size: number of members.
        control: connects the members on the host; None if there is only one.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.world_size = len(self.ranks)
        self.control: dist.ProcessGroup | None = None

    @abstractmethod
    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective on the host; while it waits, look whether another process has failed."""

    @abstractmethod
    def moved(self) -> None:
        """Bytes went over a connection of this process."""

    def _send(self, tensor: Tensor, rank: int) -> None:
        flat = as_bytes(tensor.cpu().contiguous())
        transfer(lambda part: dist.isend(part, self.ranks[rank], group=self.control), flat, self.moved)

    def _receive(self, like: Tensor, rank: int) -> Tensor:
        received = torch.empty(like.shape, dtype=like.dtype)
        transfer(lambda part: dist.irecv(part, self.ranks[rank], group=self.control), as_bytes(received), self.moved)
        return received

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all processes."""
        self.together(what, lambda: dist.barrier(group=self.control))

    def broadcast(self, item: T, source: int = 0) -> T:
        """Every process gets the source's item."""
        if self.world_size == 1:
            return item
        box = [item]
        first = self.ranks[source]
        self.together("a broadcast", lambda: dist.broadcast_object_list(box, first, group=self.control))
        return box[0]

    def gather_objects(self, item: T) -> list[T]:
        """On rank 0 every process's item, by rank; elsewhere only one's own."""
        items: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [item]
        self.together(
            "a gathering of objects",
            lambda: dist.gather_object(item, items if self.rank == 0 else None, self.ranks[0], group=self.control),
        )
        return items if self.rank == 0 else [item]

    def exchange_objects(self, item: T) -> list[T]:
        """Every process's item, by rank, on all of them."""
        items: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [item]
        self.together("an exchange of objects", lambda: dist.all_gather_object(items, item, group=self.control))
        return items

    def clock(self) -> ClockOffset:
        """How far this process's clock is from that of rank 0. Every rank calls it."""
        rounds: list[tuple[float, float, float]] = []

        def exchange() -> None:
            reading = torch.empty((), dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                asked = host_now()
                dist.send(reading, self.ranks[0], group=self.control)
                dist.recv(reading, self.ranks[0], group=self.control)
                rounds.append((asked, float(reading), host_now()))

        def answer() -> None:
            for peer in self.ranks[1:]:
                for _ in range(_CLOCK_ROUNDS):
                    dist.recv(torch.empty((), dtype=torch.float64), peer, group=self.control)
                    dist.send(torch.tensor(host_now(), dtype=torch.float64), peer, group=self.control)

        self.together("an alignment of clocks", answer if self.rank == 0 else exchange)
        return estimate_offset(rounds) if rounds else ClockOffset()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place, for a tensor on the host."""
        self.together("a sum", lambda: dist.all_reduce(tensor, group=self.control))
        return tensor

    def collect(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On rank 0 the owners' tensors, those of other processes as copies on the host; elsewhere one's own.

        Args:
            tensors: the same names, shapes and types on every process.
            owner: name -> rank.
        """
        collected = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                source = owner(name)
                if source == 0 or tensor.numel() == 0:
                    continue
                if self.rank == source:
                    self._send(tensor, 0)
                elif self.rank == 0:
                    collected[name] = self._receive(tensor, source)

        self.together("a gathering of parameters", exchange)
        return collected

    def deliver(
        self, tensors: Mapping[str, Tensor], holders: Mapping[str, int], wanted: Mapping[int, Sequence[str]]
    ) -> dict[str, Tensor]:
        """What this process wants and others hold, as copies on the host.

        Args:
            tensors: the same names, shapes and types on every process.
            holders: name -> rank that holds it; what nobody holds is not delivered. The same on every process.
            wanted: rank -> names that it lacks. The same on every process.
        """
        delivered: dict[str, Tensor] = {}

        def exchange() -> None:
            for receiver, names in wanted.items():
                for name in names:
                    tensor = tensors[name]
                    if name not in holders or tensor.numel() == 0:
                        continue
                    if self.rank == holders[name]:
                        self._send(tensor, receiver)
                    elif self.rank == receiver:
                        delivered[name] = self._receive(tensor, holders[name])

        self.together("a delivery of parameters", exchange)
        return delivered

    def spread(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On every process all owners' tensors; those of other processes as copies on the host."""
        spread = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                if tensor.numel() == 0:
                    continue
                mine = owner(name) == self.rank
                copy = tensor.detach().cpu().contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
                source = self.ranks[owner(name)]
                transfer(
                    lambda part, source=source: dist.broadcast(part, source, group=self.control, async_op=True),  # type: ignore[misc]
                    as_bytes(copy),
                    self.moved,
                )
                if not mine:
                    spread[name] = copy

        self.together("a spreading of parameters", exchange)
        return spread

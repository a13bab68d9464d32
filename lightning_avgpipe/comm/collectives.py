"""Collectives: operations of a set of processes. Every wait is bounded and ends when a process fails.

Objects and small tensors are exchanged on the host (:class:`Collectives`). Tensors of devices are summed or copied
between processes that host the same stages in several groups (:class:`TensorCollectives`)::

    group 0     stage 0 on rank 1     stage 1 on rank 0
    group 1     stage 0 on rank 3     stage 1 on rank 2
                ranks 1 and 3         ranks 0 and 2

Groups that train different models average them; groups that train the same models sum their gradients.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.codec import TensorForm, as_bytes, pickled
from lightning_avgpipe.comm.message import Message, compressed, decompressed
from lightning_avgpipe.comm.topology import Party
from lightning_avgpipe.comm.transfer import transfer
from lightning_avgpipe.comm.waits import Running
from lightning_avgpipe.utils.random_streams import RandomKey

if TYPE_CHECKING:
    from lightning_avgpipe.comm.cluster import Cluster

T = TypeVar("T")

_TAG = 0
_BLOCK, _SIZE = 1024, 8  # bytes of the first message of an exchange, and of the length at its beginning
BUCKET_BYTES = 64 * 1024**2  # size from which a message takes no further tensor
_PART = 8 * 1024**2  # elements that are gathered at once, to limit the memory for the terms of other processes


class Collectives:
    """The collective operations of a set of processes on the host.

    Ranks are relative to the members, except in ``ranks``.

    Args:
        party: members of the set.
        cluster: cluster of this process, which connects the members.

    Attributes:
        party: as given.
        ranks: ranks of the members among all processes.
        rank: rank of this process among the members.
        world_size: number of members.
    """

    def __init__(self, party: Party, cluster: Cluster) -> None:
        self.party, self.ranks = party, party.ranks
        self.rank, self.world_size = party.ranks.index(cluster.process.rank), len(party.ranks)
        self._cluster = cluster

    @property
    def process_group(self) -> Any:
        """The process group of the members, once they are connected; None for a single member."""
        return None if self.world_size == 1 else self._cluster.process.network.group(self.party)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective, unless there is only one member. If a process fails, the wait ends with an error."""
        if self.world_size > 1:
            self.begin(what, collective).finish()

    def begin(self, what: str, collective: Callable[[], object]) -> Running:
        """Start a collective in a thread of its own. Until it is over, the members must not start another one."""

        def connected() -> None:
            self._cluster.ensure_connected()
            collective()

        return self._cluster.waits.begin(connected, f"waits for the other processes in {what}")

    def _moved(self) -> None:
        """Note that bytes have moved over a connection."""
        self._cluster.waits.arrivals.moved()

    def wait_for(self, work: Any, what: str) -> None:
        """Wait for a collective that has been started. No thread is needed for one that is already over."""
        try:
            over = work.is_completed() and work.wait()
        except RuntimeError:  # a connection broke; waiting again, below, raises the error that explains it
            over = False
        if not over:
            self.together(what, work.wait)

    def peer(self, rank: int) -> Peer:
        """Return a member, to send to or receive from within :meth:`together`."""
        return Peer(self.process_group, rank, self._moved)

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all members."""
        if self.world_size > 1:
            self.begin_barrier(what).finish()

    def begin_barrier(self, what: str) -> Running:
        """Start a barrier without waiting for it; see :meth:`begin`."""
        return self.begin(what, lambda: self.process_group.allreduce([torch.zeros(1, device="cpu")]).wait())

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a host tensor over the members, in place, and return the tensor."""
        self.together("a sum", lambda: self.process_group.allreduce([tensor]).wait())
        return tensor

    def count(self, is_so: bool) -> int:
        """Return, on every member, the number of members that passed True."""
        return int(self.sum(torch.tensor(int(is_so), device="cpu"))) if self.world_size > 1 else int(is_so)

    # -- objects -----------------------------------------------------------------------------------------------------

    def broadcast(self, item: T, source: int = 0, what: str = "a broadcast") -> T:
        """Return the source's item, on every member."""
        if self.world_size == 1:
            return item
        data = _pickled(item) if self.rank == source else _bytes(0)

        def exchange() -> None:
            nonlocal data
            size = torch.tensor([data.numel()], device="cpu")
            self.process_group.broadcast(size, source).wait()
            data = data if self.rank == source else _bytes(int(size))
            transfer(lambda part: self.process_group.broadcast(part, source), data, self._moved)

        self.together(what, exchange)
        return item if self.rank == source else _unpickled(data)  # type: ignore[no-any-return]

    def gather_objects(self, item: T) -> list[T]:
        """Return the items of all members, by rank, on rank 0; on other ranks only their own."""
        if self.world_size == 1:
            return [item]
        items = [item]

        def exchange() -> None:
            if self.rank != 0:
                self.peer(0).send_object(item)
                return
            items.extend(peer.receive_object() for peer in map(self.peer, range(1, self.world_size)))

        self.together("a gathering of objects", exchange)
        return items

    def exchange_objects(self, item: T, what: str = "an exchange of objects") -> list[T]:
        """Return the items of all members, by rank, on every member."""
        return [item] if self.world_size == 1 else self._exchange(_pickled(item), what)

    def begin_exchange(self, item: T, what: str = "an exchange of objects") -> Callable[[], list[T]]:
        """Start :meth:`exchange_objects` without waiting. All members start and end their exchanges in the same order.

        Returns:
            A function that waits for the exchange and returns the items of all members, by rank.
        """
        if self.world_size == 1:
            return lambda: [item]
        mine = _pickled(item)
        blocks = [_bytes(_BLOCK) for _ in self.ranks]
        try:
            work = self.process_group.allgather(blocks, _block(mine))
        except RuntimeError:  # a connection broke; a new exchange raises the error that explains it
            return partial(self._exchange, mine, what)

        def finish() -> list[T]:
            self.wait_for(work, what)
            return self._exchange(mine, what, blocks)

        return finish

    def _exchange(self, mine: Tensor, what: str, blocks: list[Tensor] | None = None) -> list[Any]:
        """Return the items of all members. If one does not fit in its block, all are gathered again in longer blocks.

        Args:
            mine: pickled item of this process.
            what: name of the exchange, for messages.
            blocks: blocks of all members; None: they have not been gathered yet.
        """
        found = blocks or []

        def exchange() -> None:
            found[:] = found or self._gathered(_block(mine))
            if (longest := max(map(_length, found))) > _BLOCK:
                found[:] = self._gathered(_block(mine, longest))

        if not found or max(map(_length, found)) > _BLOCK:
            self.together(what, exchange)
        return [_unpickled(block[_SIZE : _length(block)]) for block in found]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in self.ranks]
        self.process_group.allgather(parts, mine).wait()
        return parts


@dataclass(frozen=True)
class Peer:
    """A member of a set of processes, as seen by a member that sends to it and receives from it.

    Attributes:
        process_group: process group of the members.
        rank: rank of the peer among the members.
        moved: called when bytes have moved over a connection.
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

    def send_object(self, item: Any) -> None:
        """Send an object to the peer, which must receive it, and wait until it is sent."""
        data = _pickled(item)
        self.send(torch.tensor([data.numel()], device="cpu"))
        self.send(data)

    def receive_object(self) -> Any:
        """Receive an object from the peer."""
        size = self.receive(torch.empty(1, dtype=torch.int64, device="cpu"))
        return _unpickled(self.receive(_bytes(int(size))))


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _pickled(item: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickled(item)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _block(mine: Tensor, length: int = _BLOCK) -> Tensor:
    """Return a block of ``length`` bytes: a prefix with the length that the item needs, and as much of it as fits."""
    block = torch.zeros(length, dtype=torch.uint8, device="cpu")
    block[:_SIZE] = torch.tensor([_SIZE + mine.numel()], device="cpu").view(torch.uint8)
    block[_SIZE : _SIZE + mine.numel()] = mine[: length - _SIZE]
    return block


def _length(block: Tensor) -> int:
    """Return the length, including the prefix, that the item of a block needs."""
    return int(block[:_SIZE].view(torch.int64))


# -- tensors of devices ----------------------------------------------------------------------------------------------


class TensorCollectives:
    """Collectives of the processes that host the same stages, on tensors of their devices, in few large messages.

    Args:
        members: processes of the group, connected on host and device, or, if ``on_host``, on the host only. The first
            one is in the first group.
        group_number: number that tells the models of this process's group from those of others; None: the rank among
            members.

    Attributes:
        members: as given.
        group_number: as given.
        on_host: whether tensors are exchanged on the host, as is necessary for processes that share a device.
        count: number of groups.
        present: number of groups that took part in the last finished sum; all of them, unless groups may be absent.
    """

    def __init__(self, members: Collectives, group_number: int | None = None) -> None:
        self.members, self.on_host, self.count = members, members.party.on_host, members.world_size
        self.group_number, self.present = members.rank if group_number is None else group_number, self.count

    def begin(self, ensemble: Any) -> None:
        """Prepare to train the models of an ensemble. Groups that start together have nothing to exchange for this.

        Args:
            ensemble: this process's part of the models of its group.
        """

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the groups, in place. All processes get the same bits.

        Args:
            tensors: tensors of the same shapes and types on all processes.
        """
        self.begin_sum(tensors)()

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start a sum without waiting. All processes start their sums in the same order.

        Args:
            tensors: as for :meth:`sum`; they must not be read or written until the sum has ended.
        Returns:
            A function that waits for the sums and puts them into the tensors.
        """

        def all_reduce(flat: Tensor) -> Any:
            return dist.all_reduce(flat, group=self.members.process_group, async_op=True)

        return self._begin(tensors, f"a sum over {self.members.party.what}", all_reduce)

    @torch.no_grad()
    def begin_choice(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy integers of the first group to all groups, without waiting, as a sum to which others add zero.

        Args and result are those of :meth:`begin_sum`.
        """
        for tensor in tensors if self.group_number else ():
            tensor.zero_()
        return self.begin_sum(tensors)

    @torch.no_grad()
    def begin_rounded_sum(self, tensors: Mapping[str, Tensor], wire: Format, key: RandomKey) -> Callable[[], None]:
        """Start a sum of rounded tensors: each process receives those of all groups, and adds them in the same order.

        Each tensor is rounded once. With G groups a process receives G - 1 times the size of the rounded tensors; an
        exact sum takes 2 (G - 1) / G times the size of the tensors.

        Args:
            tensors: as for :meth:`begin_sum`, by name; the name selects the random numbers for rounding.
            wire: format in which they travel.
            key: key of the random numbers for rounding, the same on all processes.
        Returns:
            A function that waits for the sums and puts them into the tensors.
        """
        key = replace(key, pipeline=self.group_number)
        messages = [compressed(Message(0, (tensor,)), wire, key, name) for name, tensor in tensors.items()]
        parts = [part.contiguous() for message in messages for part in message.tensors if part is not None]
        forms = [TensorForm.of(part) for part in parts]
        mine = torch.cat([as_bytes(part) for part in parts])
        mine = mine.cpu() if self.on_host else mine
        terms = [torch.empty_like(mine) for _ in range(self.count)]
        work = dist.all_gather(terms, mine, group=self.members.process_group, async_op=True)

        @torch.no_grad()
        def end() -> None:
            self.members.wait_for(work, f"a sum over {self.members.party.what}")
            for number, term in enumerate(terms):
                flats = zip(forms, term.split([form.nbytes for form in forms]), strict=True)
                arrived = (form.from_bytes(flat.clone()) for form, flat in flats)  # clones are aligned in memory
                for tensor, message in zip(tensors.values(), messages, strict=True):
                    rounded = message._replace(tensors=tuple(next(arrived) for _ in message.tensors))
                    (found,) = decompressed(rounded).tensors
                    assert found is not None
                    tensor.add_(found.to(tensor.device)) if number else tensor.copy_(found)

        return end

    def copy(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy the source group's tensors into those of the other groups. ``tensors`` is as for :meth:`sum`."""

        def broadcast(flat: Tensor) -> Any:
            group = self.members.process_group
            return dist.broadcast(as_bytes(flat), self.members.ranks[source], group=group, async_op=True)

        self._begin(tensors, f"a copy from member {source} of the {self.members.party.what}", broadcast)()

    @torch.no_grad()
    def _begin(self, tensors: Sequence[Tensor], what: str, collective: Callable[[Tensor], Any]) -> Callable[[], None]:
        by_type: dict[tuple[torch.dtype, bool], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.numel():
                by_type[_kind(tensor)].append(tensor)
        ordered = [tensor for same in by_type.values() for tensor in same]
        exchanges = [Bucket(bucket, self.on_host, collective) for bucket in buckets(ordered, BUCKET_BYTES)]

        @torch.no_grad()
        def end() -> None:
            for exchange in exchanges:
                self.members.wait_for(exchange.work, what)
                exchange.put()

        return end


class Bucket:
    """A bucket of tensors that is being exchanged as one message, in the background."""

    def __init__(self, tensors: Sequence[Tensor], on_host: bool, collective: Callable[[Tensor], Any]) -> None:
        self._tensors = tensors
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        # as real numbers, which every backend supports
        self._sent = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._exchanged = self._sent.cpu() if on_host else self._sent
        self.work = collective(self._exchanged)

    def put(self) -> None:
        """Copy the result of the collective into the tensors."""
        if self._exchanged is not self._sent:
            self._sent.copy_(self._exchanged)
        parts = self._flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def buckets(tensors: Sequence[Tensor], nbytes: int) -> list[list[Tensor]]:
    """Divide tensors into buckets, each of which travels as one message, by their shapes and types only.

    Args:
        tensors: tensors in the order in which they travel; those of a bucket have the same type, and are all on the
            host or all on the device.
        nbytes: size from which a bucket takes no further tensor.
    """
    found: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not found or size >= nbytes or _kind(found[-1][0]) != _kind(tensor):
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return found


def _kind(tensor: Tensor) -> tuple[torch.dtype, bool]:
    """Return the properties that all tensors of one message share."""
    return tensor.dtype, tensor.is_cpu


def sum_in_order(
    mine: Sequence[Tensor],
    sources: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the sum of all terms, with the same bits on all processes. All of them must call it.

    Each process adds all terms by itself, in a fixed order::

        process 0   a        a b c d   a + b + c + d
        process 1   b, d  -> a b c d   a + b + c + d
        process 2   c        a b c d   a + b + c + d

    The bits of the result depend neither on which process has which term nor on the number of processes. All
    directions of all links are in use at the same time. With three or more processes, each receives all terms of the
    others.

    Args:
        mine: this process's terms in their order, at least one; flat, of the same length and type on all processes.
        sources: for each term, in the order in which terms are added, the rank within the group of the process that has
            it.
        group: process group; each of its processes has at least one term.

    Returns:
        The sum: flat, of the length of a term.
    """
    if len(sources) == group.size() == 2:  # a + b is b + a, and gloo's all-gather often takes half as long again
        total = mine[0].clone()
        dist.all_reduce(total, group=group)
        return total
    most = max(map(sources.count, sources))
    places = [(source, sources[:i].count(source)) for i, source in enumerate(sources)]
    total = torch.empty_like(mine[0])
    for rows in zip(total.split(_PART), *(term.split(_PART) for term in mine), strict=True):
        own = total.new_zeros(most, rows[0].numel())
        torch.stack(rows[1:], out=own[: len(mine)])
        terms = own.new_empty(group.size(), *own.shape)
        dist.all_gather([as_bytes(term) for term in terms], as_bytes(own), group=group)
        rows[0].copy_(reduce(torch.add, (terms[place] for place in places)))
    return total

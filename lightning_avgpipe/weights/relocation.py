"""Relocation: what processes hold under a name moves to the processes that are to hold it, in buckets.

::

    old     a: 0    b: 0    c: 1           a goes from rank 0 to rank 1, with its gradient and its optimizer states
    new     a: 1    b: 0    c: 0, 1        c from rank 1 to rank 0, and stays on rank 1; b stays where it is

All processes know both ownerships, so nobody asks and nobody waits for more than what comes. In each round every
process meets one other, so rounds of different pairs run at the same time.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.message import Message, pack, unpack
from lightning_avgpipe.weights.ownership import Owners

_BUCKET_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Arrival:
    """What has come under a name: any tree of tensors, on the host until somebody takes it.

    Attributes:
        message: with the tensors of the tree.
        forms: of these tensors where they came from.
    """

    message: Message
    forms: tuple[TensorForm, ...]

    def on(self, device: torch.device) -> Any:
        """The tree; what was on a device at the sender is on this one, what was on the host stays there."""
        placed = tuple(
            tensor if tensor is None or form.on_host else tensor.to(device)
            for tensor, form in zip(self.message.tensors, self.forms, strict=True)
        )
        return unpack(Message(0, placed, (), self.message.entries))


@dataclass(frozen=True)
class Relocation:
    """The way from one ownership to another.

    Attributes:
        old: who holds what now; what nobody holds has no ranks, or is missing.
        new: who is to hold it; what is missing stays where it is.
    """

    old: Owners
    new: Owners

    @cached_property
    def moves(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """(source, target) -> names, in the order in which they go. Every process goes through it in this order."""
        found: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, targets in self.new.items():
            for target in targets:
                if self.old.get(name) and target not in self.old[name]:
                    found[self.old[name][0], target].append(name)
        size = 1 + max(itertools.chain.from_iterable(found), default=0)
        # in each round a + b is the same (modulo the number of processes), so nobody is in two pairs
        order = sorted(found, key=lambda pair: (sum(pair) % size, min(pair), pair))
        return {pair: tuple(found[pair]) for pair in order}

    def leaving(self, rank: int) -> list[str]:
        """Names of what a process is not to hold, whether it does now or not."""
        return [name for name, ranks in self.new.items() if rank not in ranks]

    def carry_out(
        self, processes: Collectives, held: Callable[[str], Any], bucket_bytes: int = _BUCKET_BYTES
    ) -> dict[str, Arrival]:
        """Send what is here and wanted elsewhere. All processes call it; nobody gives anything up yet.

        Args:
            processes: whose ranks the owners are.
            held: name -> what is here under it, any tree of tensors and picklable leaves.
            bucket_bytes: of tensors that travel together; one that is larger travels alone.
        Returns:
            Name -> what has come to this process.
        Raises:
            PeerError: another process has failed, or takes too long.
        """
        arrived: dict[str, Arrival] = {}
        rank = processes.rank

        def exchange() -> None:
            for (source, target), names in self.moves.items():
                if rank == source:
                    for bucket in _buckets(names, held, bucket_bytes):
                        _send(processes.peer(target), bucket)
                elif rank == target:
                    missing = set(names)
                    while missing:
                        came = _receive(processes.peer(source))
                        arrived.update(came)
                        missing.difference_update(came)

        if self.moves:
            processes.together("a relocation of weights and their states", exchange)
        return arrived


def holders(processes: Collectives, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Who holds what, ranks ascending. Every process calls it with the names of what it holds."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, theirs in enumerate(processes.exchange_objects(list(names))):
        for name in theirs:
            found[name] = (*found.get(name, ()), rank)
    return found


def gather(processes: Collectives, held: Mapping[str, Any], owners: Owners) -> dict[str, Any]:
    """On rank 0 what the owners hold, on the host if it has come from elsewhere; on other processes nothing is added.

    Every process calls it. Arguments as of :meth:`Relocation.carry_out`.
    """
    arrived = Relocation(owners, dict.fromkeys(owners, (0,))).carry_out(processes, held.__getitem__)
    return {**held, **{name: arrival.on(torch.device("cpu")) for name, arrival in arrived.items()}}


_Packed = tuple[str, Message, tuple[TensorForm, ...]]


def _buckets(names: Sequence[str], held: Callable[[str], Any], limit: int) -> Iterator[list[_Packed]]:
    """Neighbours together, as long as their tensors are no larger than the limit."""
    bucket: list[_Packed] = []
    nbytes = 0
    for name in names:
        message = pack(held(name))
        forms = tuple(TensorForm.of(tensor) for tensor in message.tensors if tensor is not None)
        size = sum(form.nbytes for form in forms)
        if bucket and nbytes + size > limit:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((name, message, forms))
        nbytes += size
    if bucket:
        yield bucket


def _send(target: Peer, bucket: Sequence[_Packed]) -> None:
    """First what it is, then the numbers of all tensors in one piece."""
    text = pickle.dumps([(name, message.entries, forms) for name, message, forms in bucket])
    parts = [
        as_bytes(form.on_wire(tensor).cpu())
        for _, message, forms in bucket
        for tensor, form in zip(message.tensors, forms, strict=True)
        if tensor is not None
    ]
    content = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    target.send(torch.tensor([len(text), content.numel()]))
    target.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if content.numel():
        target.send(content)


def _receive(source: Peer) -> dict[str, Arrival]:
    lengths = source.receive(torch.empty(2, dtype=torch.int64)).tolist()
    text, content = (torch.empty(length, dtype=torch.uint8) for length in lengths)
    described = pickle.loads(source.receive(text).numpy().tobytes())
    if content.numel():
        content = source.receive(content)
    numbers = [form.nbytes for _, _, forms in described for form in forms]
    # each in memory of its own, unless it came alone: a view would keep the whole bucket
    parts = iter(content.split(numbers) if len(numbers) == 1 else [part.clone() for part in content.split(numbers)])
    return {
        name: Arrival(Message(0, tuple(form.from_bytes(next(parts)) for form in forms), (), entries), forms)
        for name, entries, forms in described
    }

"""Relocation: data of a parameter or buffer moves to its new owners, in buckets.

::

    old     a: 0    b: 0    c: 1           a moves from rank 0 to rank 1, with its gradient and its optimizer states
    new     a: 1    b: 0    c: 0, 1        c is copied from rank 1 to rank 0; b stays where it is

All processes know the old and new owners, so there are no requests, and a process waits only for what it receives. In
each round every process exchanges with at most one other, so different pairs run at the same time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.codec import Packet, TensorForm
from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.message import Message, pack, unpack
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.tensors import tensor_bytes
from lightning_avgpipe.weights.ownership import Owners, fill_parameter, give_up

T = TypeVar("T")

_BUCKET_BYTES = 64 * 1024**2
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Arrival:
    """The data received for a name, whose tensors stay on the host until :meth:`on` is called.

    Attributes:
        item: tree of tensors and other leaves.
        on_host: for each tensor of the tree, whether it was on the host at the sender.
    """

    item: Any
    on_host: Sequence[bool]

    def on(self, device: torch.device) -> Any:
        """Return the tree. Tensors that were on a device at the sender move to ``device``, others stay on the host."""
        stays = iter(self.on_host)
        return tree.map_tensors(lambda tensor: tensor if next(stays) else tensor.to(device), self.item)


@dataclass(frozen=True)
class Relocation:
    """The change from one ownership to another.

    Attributes:
        old: ranks that hold each name now; a name that no process holds has no ranks, or is missing.
        new: ranks that are to hold each name; a missing name stays where it is.
    """

    old: Owners
    new: Owners

    @cached_property
    def moves(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """The names to send from source to target, by (source, target), in the order of transfers on all processes."""
        found: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, targets in self.new.items():
            for target in targets:
                if self.old.get(name) and target not in self.old[name]:
                    found[self.old[name][0], target].append(name)
        size = 1 + max(itertools.chain.from_iterable(found), default=0)
        # in each round a + b is the same (modulo the number of processes), so no process is in two pairs
        order = sorted(found, key=lambda pair: (sum(pair) % size, min(pair), pair))
        return {pair: tuple(found[pair]) for pair in order}

    def carry_out(
        self, processes: Collectives, held: Callable[[str], Any], bucket_bytes: int = _BUCKET_BYTES
    ) -> dict[str, Arrival]:
        """Send data to its new owners. All processes call it; none drops its own data yet.

        Args:
            processes: processes to whose ranks the owners refer.
            held: returns this process's data of a name, any tree of tensors and picklable leaves.
            bucket_bytes: most bytes of tensors that travel together; a larger tensor travels by itself.

        Returns:
            The data that this process received, by name.

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
    """Return the ranks that hold each name, ascending. Every process calls it with the names that it holds."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, theirs in enumerate(processes.exchange_objects(list(names))):
        for name in theirs:
            found[name] = (*found.get(name, ()), rank)
    return found


def gather(
    processes: Collectives, held: Mapping[str, Any], owners: Owners, device: torch.device = _HOST
) -> dict[str, Any]:
    """Return this process's data and, on rank 0, also that of the owners. Every process calls it.

    Args:
        processes: processes to whose ranks the owners refer.
        held: this process's data by name, any tree of tensors and picklable leaves.
        owners: ranks that hold each name that rank 0 is to get.
        device: device of received tensors that were on a device at the sender.
    """
    arrived = Relocation(owners, dict.fromkeys(owners, (0,))).carry_out(processes, held.__getitem__)
    return {**held, **{name: arrival.on(device) for name, arrival in arrived.items()}}


class Lending:
    """The lending of tensors to rank 0 while it runs a function. Every process creates one.

    Args:
        processes: rank 0 and the processes that lend.
        tensors: tensors of the same names on all processes.
        here: names of those that this process lends.
        device: device of fetched tensors that are on a device at the process that lends them.

    Attributes:
        held: ranks that lend each name.
    """

    def __init__(
        self,
        processes: Collectives,
        tensors: Mapping[str, Tensor],
        here: Collection[str],
        device: torch.device = _HOST,
    ) -> None:
        self.held = holders(processes, here)
        self._processes, self._tensors, self._device = processes, tensors, device

    def run(self, function: Callable[[], T]) -> T | None:
        """On rank 0, run a function and return its result; on other ranks, lend until it has ended, and return None."""
        if self._processes.rank:
            while (names := self._asked(None)) is not None:
                self._gathered(names)
            return None
        result = function()
        self._asked(None)
        return result

    def fetch(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors that some process lends. Only the function that rank 0 runs may call it."""
        return self._gathered(self._asked([*names]) or ())

    def _asked(self, names: list[str] | None) -> list[str] | None:
        """Return on every process the names for which rank 0 asks; None if it will not ask again."""
        return self._processes.broadcast(names, what="the lending of weights to rank 0")

    def _gathered(self, names: Collection[str]) -> dict[str, Tensor]:
        own = {name: self._tensors[name].detach() for name in names}
        return gather(self._processes, own, {name: self.held[name] for name in names}, self._device)


def _buckets(names: Sequence[str], held: Callable[[str], Any], limit: int) -> Iterator[dict[str, Any]]:
    """Yield buckets of the data of successive names, each with at most ``limit`` bytes of tensors or one name."""
    bucket: dict[str, Any] = {}
    nbytes = 0
    for name in names:
        item = held(name)
        size = sum(map(tensor_bytes, tree.tensors(item)))
        if bucket and nbytes + size > limit:
            yield bucket
            bucket, nbytes = {}, 0
        bucket[name] = item
        nbytes += size
    if bucket:
        yield bucket


def _send(target: Peer, bucket: Mapping[str, Any]) -> None:
    """Send a bucket: first its description, then the bytes of all tensors in one piece."""
    message = pack(bucket)
    tensors = [tensor for tensor in message.tensors if tensor is not None]
    forms, on_host = [*map(TensorForm.of, tensors)], [tensor.is_cpu for tensor in tree.tensors(bucket)]
    target.send_object((message.descriptions, forms, on_host))
    packet = Packet.of([*enumerate(forms)], on_host=True)
    if packet.nbytes:
        target.send(packet.packed(Message(0, tuple(tensor.cpu() for tensor in tensors))))


def _receive(source: Peer) -> dict[str, Arrival]:
    descriptions, forms, on_host = source.receive_object()
    packet = Packet.of([*enumerate(forms)], on_host=True)
    tensors: list[Tensor | None] = [None] * len(forms)
    content = torch.empty(packet.nbytes, dtype=torch.uint8, device="cpu")
    # each tensor is copied unless it came alone, since a view would keep the whole bucket alive
    packet.unpack(source.receive(content) if packet.nbytes else content, tensors, copies=len(tensors) > 1)
    bucket, stays = unpack(Message(0, tuple(tensors), (), descriptions)), iter(on_host)
    return {name: Arrival(item, [next(stays) for _ in tree.tensors(item)]) for name, item in bucket.items()}


# -- the data of a parameter or buffer, which moves with its name ------------------------------------------------------


class MovableData(Protocol):
    """One kind of data that processes hold for each parameter or buffer, by name."""

    def held(self, name: str) -> Any:
        """Return this process's data of a name: any tree of tensors and picklable leaves."""

    def put(self, name: str, item: Any) -> None:
        """Store another process's data of a name."""

    def drop(self, names: Collection[str]) -> None:
        """Drop this process's data of names that only other processes keep."""


def relocate(
    relocation: Relocation, processes: Collectives, kinds: Sequence[MovableData], device: torch.device
) -> None:
    """Carry out a relocation: send and receive, drop what leaves, and store what has arrived. All processes call it.

    Args:
        relocation: old and new owners.
        processes: processes to whose ranks the owners refer.
        kinds: all data that moves with a name, in the order in which it is stored; the same on all processes.
        device: device of received tensors that were on a device at the sender.
    """
    arrived = relocation.carry_out(processes, lambda name: [kind.held(name) for kind in kinds])
    leaving = [name for name, ranks in relocation.new.items() if processes.rank not in ranks]
    for kind in reversed(kinds) if leaving else ():
        kind.drop(leaving)
    for name in list(arrived):
        for kind, item in zip(kinds, arrived.pop(name).on(device), strict=True):
            kind.put(name, item)


class ModuleTensors:
    """The parameters and buffers of a module, with gradients.

    Args:
        module: module, or a copy of it that is divided in the same way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())

    def held(self, name: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Return contents, gradient, and scales of 4-bit weights. Sparse gradients, soon cleared, do not move."""
        tensor = self._parameters[name] if name in self._parameters else self._module.get_buffer(name)
        gradient = None if tensor.grad is None or tensor.grad.is_sparse else tensor.grad
        scales = getattr(tensor, "quant_state", None)
        return tensor.data, gradient, None if scales is None else scales.as_dict(packed=True)

    @torch.no_grad()
    def put(self, name: str, item: tuple[Tensor, Tensor | None, dict[str, Tensor] | None]) -> None:
        """Fill a parameter that has no contents, or overwrite a buffer."""
        contents, gradient, scales = item
        if name in self._parameters:
            fill_parameter(self._module, name, self._parameters[name], contents)
            self._parameters[name].grad = gradient
            if scales is not None:
                from bitsandbytes.functional import QuantState

                quantized: Any = self._parameters[name]
                quantized.quant_state = QuantState.from_dict(scales, contents.device)
            return
        buffer = self._module.get_buffer(name)
        if buffer.shape == contents.shape and buffer.dtype == contents.dtype:
            buffer.copy_(contents)
        else:  # the sender's buffer has another shape or type
            path, _, leaf = name.rpartition(".")
            self._module.get_submodule(path)._buffers[leaf] = contents

    def drop(self, names: Collection[str]) -> None:
        """Move parameters to meta. Buffers are kept: they are small, and stale ones do no harm."""
        give_up(self._module, [name for name in names if name in self._parameters])


class OptimizerStates:
    """The optimizer states of parameters.

    Args:
        optimizers: optimizers over all parameters, on every process.
        parameters: returns the current parameters by name; only their states move.
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = parameters

    def held(self, name: str) -> list[dict[str, Any] | None]:
        """Return the state of a parameter in each optimizer; None for an optimizer that has none."""
        parameter = self._parameters().get(name)
        return [
            dict(optimizer.state[parameter]) if parameter is not None and parameter in optimizer.state else None
            for optimizer in self._optimizers
        ]

    def put(self, name: str, item: Sequence[dict[str, Any] | None]) -> None:
        """Store the states that another process had."""
        parameter = self._parameters().get(name)
        for optimizer, state in zip(self._optimizers, item, strict=True):
            if state is not None and parameter is not None:
                optimizer.state[parameter] = state

    def drop(self, names: Collection[str]) -> None:
        """Delete the states of parameters that leave."""
        parameters = self._parameters()
        for optimizer in self._optimizers:
            for name in names:
                if name in parameters:
                    optimizer.state.pop(parameters[name], None)

"""The codec of messages: frames, which announce a message on a wire, or hold a small one.

::

    frame     | lengths, numbers, micro-batch | channel and structure, if new | small tensors of the host, aligned |
    after it    the rest of a frame that is too long, then packets: all other tensors but large ones in one for the
                host and one for the device, and each large one by itself, of which no copy is made

Both ends number the structures of messages (shapes, types and everything else but numbers) as they see them, so that
a structure which repeats is neither pickled nor sent again, and it says which packets there are. These have a tag of
their structure's: the receiver can be ready for them before the frame is there.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route

# A receive is posted for so many bytes before the size of the frame is known. On Linux gloo accepts a shorter one; its
# transport elsewhere reads on until all have come, so frames are filled up there.
_ACCEPTS_SHORTER = sys.platform == "linux"
CAPACITY = 256 * 1024 if _ACCEPTS_SHORTER else 1024
# bytes of the frame and of what is pickled in it, numbers of structure and channel, micro-batch
_PREFIX = struct.Struct("<qqqqq")
_NEW, _UNNUMBERED = -1, -2
_MAX_NUMBERED = 1024
FRAMES, REST, _FIRST_NUMBERED = 0, 1, 2  # tags
MOST_TAGS = _FIRST_NUMBERED + _MAX_NUMBERED  # of one wire
_LARGE = 256 * 1024  # bytes from which a copy costs more than a transfer
_PASSING = 64 * 1024  # bytes of a frame, if others may pass the message on: a larger one travels in pieces
_ALIGNMENT = 64


class TensorForm(NamedTuple):
    """What must be known of a tensor before its numbers come.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        on_host: whether it lives on the host at the sender.
        order: its dimensions as they lie in memory; None if that is their order, or if there are gaps.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Describe a tensor.

        A transposed one arrives transposed, without a copy: kernels may round otherwise for another layout.
        """
        order = None
        if not tensor.is_contiguous():
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
            if not tensor.permute(order).is_contiguous():
                order = None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, order)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be sent."""
        return 0 in self.shape

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """Shape in which the numbers travel."""
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor as it travels."""
        return tensor if self.order is None else tensor.permute(self.order)

    def from_wire(self, tensor: Tensor) -> Tensor:
        """The tensor as it was."""
        order = self.order
        return tensor if order is None else tensor.permute(sorted(range(len(order)), key=order.__getitem__))

    def from_bytes(self, flat: Tensor) -> Tensor:
        """The tensor whose numbers these are, in their memory."""
        return self.from_wire(flat.view(self.dtype).view(self.wire_shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view in bytes: any type can be sent, also those that a backend does not know."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Packet:
    """Tensors of a message that travel together, one after the other.

    Attributes:
        places: number of the tensor in the message, where it begins, in bytes, and its form.
        nbytes: of all of it.
        on_host: whether its tensors live on the host.
    """

    places: tuple[tuple[int, int, TensorForm], ...]
    nbytes: int
    on_host: bool

    @classmethod
    def of(cls, forms: Sequence[tuple[int, TensorForm]], on_host: bool) -> Packet:
        """A packet of some tensors, by their numbers."""
        places, nbytes = [], 0
        for number, form in forms:
            begin = _aligned(nbytes)
            places.append((number, begin, form))
            nbytes = begin + form.nbytes
        return cls(tuple(places), nbytes, on_host)

    def packed(self, message: Message) -> Tensor:
        """The bytes of the tensors, where these live; one alone is not copied."""
        parts = self._parts(message)
        if len(parts) == 1:
            return parts[0]
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=parts[0].device)
        self.fill(flat, message)
        return flat

    def fill(self, flat: Tensor, message: Message) -> None:
        """Copy the bytes of the tensors."""
        for part, (_, begin, form) in zip(self._parts(message), self.places, strict=True):
            flat[begin : begin + form.nbytes] = part

    def _parts(self, message: Message) -> list[Tensor]:
        tensors: Sequence[Any] = message.tensors  # those of a packet are there
        return [as_bytes(form.on_wire(tensors[number])) for number, _, form in self.places]

    def unpack(self, flat: Tensor, tensors: list[Tensor | None], copies: bool = False) -> None:
        """Put tensors into their places in a message; in this memory, or in memory of their own."""
        for number, begin, form in self.places:
            part = flat[begin : begin + form.nbytes]
            # views count what is written into any of them, which autograd would take for writes into all: so no view
            tensors[number] = form.from_bytes(part.clone() if copies else part).data


@functools.lru_cache(_MAX_NUMBERED)
def packets(forms: tuple[TensorForm | None, ...], segments: int) -> tuple[Packet, tuple[Packet, ...]]:
    """How tensors travel: those in the frame, and the packets after it."""
    inner: list[tuple[int, TensorForm]] = []
    together: dict[bool, list[tuple[int, TensorForm]]] = {True: [], False: []}
    alone: list[Packet] = []
    room = (CAPACITY if segments == 1 else min(CAPACITY, _PASSING)) - _aligned(_PREFIX.size)
    for number, form in enumerate(forms):
        if form is None or form.is_empty:
            continue
        if form.on_host and form.nbytes <= room:
            inner.append((number, form))
            room -= _aligned(form.nbytes)
        elif form.nbytes < _LARGE:
            together[form.on_host].append((number, form))
        else:
            alone.append(Packet.of([(number, form)], form.on_host))
    return Packet.of(inner, True), (*(Packet.of(some, on_host) for on_host, some in together.items() if some), *alone)


# forms of the tensors, and the bare message: without its numbers
_Structure = tuple[tuple[TensorForm | None, ...], Message]


class FrameWriter:
    """Makes frames at the sending end of a wire."""

    def __init__(self) -> None:
        self._numbers: dict[_Structure, int] = {}
        self._channels: dict[Route, int] = {}

    def write(self, route: Route, message: Message) -> tuple[list[Tensor], tuple[Packet, ...], int]:
        """What to send first for a message of a channel: the frame and, if it is too long, the rest of it.

        Returns:
            These, the packets that come after them, and with which tag.
        """
        forms = tuple(None if tensor is None else TensorForm.of(tensor) for tensor in message.tensors)
        structure = forms, replace(message, micro_batch=0, tensors=())
        inner, following = packets(forms, message.segments)
        number = self._number(structure)
        new = route not in self._channels
        channel = self._channels.setdefault(route, len(self._channels))
        text = pickle.dumps((route if new else None, structure if number < 0 else None)) if new or number < 0 else b""
        begin = _aligned(_PREFIX.size + len(text))
        size = begin + inner.nbytes
        frame = np.zeros(size if _ACCEPTS_SHORTER else max(size, CAPACITY), dtype=np.uint8)
        prefix = _PREFIX.pack(size, len(text), number, channel, message.micro_batch)
        frame[: len(prefix) + len(text)] = np.frombuffer(prefix + text, dtype=np.uint8)
        whole = torch.from_numpy(frame)
        inner.fill(whole[begin:], message)
        frames = [whole] if size <= CAPACITY else [whole[:CAPACITY], whole[CAPACITY:]]
        return frames, following, _tag(number)

    def _number(self, structure: _Structure) -> int:
        try:
            number = self._numbers.get(structure)
        except TypeError:  # an unhashable leaf: sent in full every time
            return _UNNUMBERED
        if number is None and len(self._numbers) < _MAX_NUMBERED:
            self._numbers[structure] = len(self._numbers)
            return _NEW
        return _UNNUMBERED if number is None else number


@dataclass(frozen=True)
class Opened:
    """What a frame says.

    Attributes:
        route: of the channel.
        partial: the message, with the tensors that came in the frame.
        packets: that come after it.
        tag: with which they do.
    """

    route: Route
    partial: Message
    packets: tuple[Packet, ...]
    tag: int

    def message(self, flats: Sequence[Tensor]) -> Message:
        """The message, with the packets that came."""
        tensors = list(self.partial.tensors)
        for packet, flat in zip(self.packets, flats, strict=True):
            packet.unpack(flat, tensors)
        return replace(self.partial, tensors=tuple(tensors))


class FrameReader:
    """Takes frames apart at the receiving end of a wire.

    Args:
        device: of this process.

    Attributes:
        usual: tag, packets and segments of the latest structure that has repeated and has packets.
    """

    def __init__(self, device: torch.device) -> None:
        self.usual: tuple[int, tuple[Packet, ...], int] | None = None
        self._device = device
        self._structures: list[_Structure] = []
        self._channels: list[Route] = []

    @staticmethod
    def missing(frame: Tensor) -> int:
        """Bytes that come after the frame."""
        size: int = _PREFIX.unpack_from(frame.numpy().data)[0]
        return max(0, size - CAPACITY)

    def read(self, frame: Tensor, rest: Tensor | None) -> Opened:
        """Take a frame apart.

        Args:
            frame: as received, of :data:`CAPACITY` bytes.
            rest: what comes after it.
        """
        whole = frame if rest is None else torch.cat((frame, rest))
        raw = whole.numpy()
        _, length, number, channel, micro_batch = _PREFIX.unpack_from(raw.data)
        route, structure = None, None
        if length:
            route, structure = pickle.loads(raw[_PREFIX.size : _PREFIX.size + length].data)
        if route is not None:
            self._channels.append(route)
        if structure is None:
            structure = self._structures[number]
        elif number == _NEW:
            self._structures.append(structure)
        forms, bare = structure
        inner, following = packets(forms, bare.segments)
        tensors: list[Tensor | None] = [
            torch.empty(form.shape, dtype=form.dtype, device="cpu" if form.on_host else self._device)
            if form is not None and form.is_empty else None
            for form in forms
        ]  # fmt: skip
        inner.unpack(whole[_aligned(_PREFIX.size + length) :], tensors, copies=True)
        if number >= 0 and following:
            self.usual = _tag(number), following, bare.segments
        partial = replace(bare, micro_batch=micro_batch, tensors=tuple(tensors))
        return Opened(self._channels[channel], partial, following, _tag(number))


def _tag(number: int) -> int:
    """With which packets follow: each structure has one of its own, so that they may be awaited before the frame."""
    return REST if number < 0 else _FIRST_NUMBERED + number


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

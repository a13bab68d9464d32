"""The codec of messages: a frame announces a message on a wire, or holds all of a small one.

::

    frame     | lengths, numbers, micro-batch | channel and structure, if new | small tensors of the host, aligned |
    after it    the rest of a frame that is too long, then packets: one of the remaining small tensors of the host, one
                of those of the device, and one for each large tensor, which is sent without a copy

Both ends number the structures of messages (shapes, types, and everything else except the elements of tensors) in the
order in which they appear, so that a repeated structure is neither pickled nor sent again. A structure determines its
packets and their tag, so the receiver can post the receives before the frame arrives.
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
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.errors import UnsendableError
from lightning_avgpipe.utils.tensors import memory_order

# A receive of CAPACITY bytes is posted before the size of the frame is known. On Linux gloo accepts a shorter message;
# elsewhere its transport waits for all bytes, so frames are padded.
_ACCEPTS_SHORTER = sys.platform == "linux"
CAPACITY = 256 * 1024 if _ACCEPTS_SHORTER else 1024
# size of the frame and of the pickle in it, in bytes; numbers of the structure, the channel and the micro-batch
_PREFIX = struct.Struct("<qqqqq")
_NEW, _UNNUMBERED = -1, -2
_MAX_NUMBERED = 1024
FRAMES, REST, _FIRST_NUMBERED = 0, 1, 2  # tags
MOST_TAGS = _FIRST_NUMBERED + _MAX_NUMBERED  # number of tags of one wire
_LARGE = 256 * 1024  # bytes from which a copy costs more than a transfer of its own
_PASSING = 64 * 1024  # most bytes of a frame whose message may be forwarded: the rest can be forwarded in pieces
_ALIGNMENT = 64


class TensorForm(NamedTuple):
    """The form of a tensor: what the receiver must know before the elements arrive.

    Attributes:
        shape: shape of the tensor.
        dtype: type of its elements.
        on_host: whether it lives on the host at the sender.
        order: dimensions in the order in which they lie in memory; None if the tensor is contiguous, or its memory has
            gaps.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor.

        A transposed tensor arrives transposed, without a copy, because kernels may round differently for another
        memory layout.
        """
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, memory_order(tensor))

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has no elements to send."""
        return 0 in self.shape

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape in which the elements travel."""
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)

    @property
    def nbytes(self) -> int:
        """The size of the elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def on_wire(self, tensor: Tensor) -> Tensor:
        """Return a view of the tensor with its dimensions in the order in which they travel."""
        return tensor if self.order is None else tensor.permute(self.order)

    def from_wire(self, tensor: Tensor) -> Tensor:
        """Return a view of a received tensor with its dimensions in their original order."""
        order = self.order
        return tensor if order is None else tensor.permute(sorted(range(len(order)), key=order.__getitem__))

    def from_bytes(self, flat: Tensor) -> Tensor:
        """Return a received tensor as a view of its bytes."""
        return self.from_wire(flat.view(self.dtype).view(self.wire_shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor in bytes, so that every type can be sent, even one that the backend lacks.

    A tensor with a pending conjugation or negation is copied to resolve it.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Packet:
    """Tensors of a message that travel together, in one piece of memory.

    Attributes:
        places: for each tensor its index in the message, its first byte in the packet, and its form.
        nbytes: size of the packet, in bytes.
        on_host: whether its tensors live on the host.
    """

    places: tuple[tuple[int, int, TensorForm], ...]
    nbytes: int
    on_host: bool

    @classmethod
    def of(cls, forms: Sequence[tuple[int, TensorForm]], on_host: bool) -> Packet:
        """Make a packet of some tensors, given by their indices and forms."""
        places, nbytes = [], 0
        for number, form in forms:
            begin = aligned(nbytes)
            places.append((number, begin, form))
            nbytes = begin + form.nbytes
        return cls(tuple(places), nbytes, on_host)

    def packed(self, message: Message) -> Tensor:
        """Return the bytes of the tensors, on their device. The bytes of a single tensor are a view, not a copy."""
        parts = self._parts(message)
        if len(parts) == 1:
            return parts[0]
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=parts[0].device)
        self.fill(flat, message)
        return flat

    def fill(self, flat: Tensor, message: Message) -> None:
        """Copy the bytes of the tensors into ``flat``."""
        for part, (_, begin, form) in zip(self._parts(message), self.places, strict=True):
            flat[begin : begin + form.nbytes] = part

    def _parts(self, message: Message) -> list[Tensor]:
        tensors: Sequence[Any] = message.tensors  # none of a packet's tensors is None
        return [as_bytes(form.on_wire(tensors[number])) for number, _, form in self.places]

    def unpack(self, flat: Tensor, tensors: list[Tensor | None], copies: bool = False) -> None:
        """Put the tensors of a received packet into a message's list of tensors, as views of ``flat`` or as copies."""
        for number, begin, form in self.places:
            part = flat[begin : begin + form.nbytes]
            # Views of one tensor share a version counter, so autograd would take a write into one for a write into all
            # of them; .data has a counter of its own.
            tensors[number] = form.from_bytes(part.clone() if copies else part).data


@functools.lru_cache(_MAX_NUMBERED)
def _packets(forms: tuple[TensorForm | None, ...], segments: int) -> tuple[Packet, tuple[Packet, ...]]:
    inner: list[tuple[int, TensorForm]] = []
    together: dict[bool, list[tuple[int, TensorForm]]] = {True: [], False: []}
    alone: list[Packet] = []
    room = (CAPACITY if segments == 1 else min(CAPACITY, _PASSING)) - aligned(_PREFIX.size)
    for number, form in enumerate(forms):
        if form is None or form.is_empty:
            continue
        if form.on_host and form.nbytes <= room:
            inner.append((number, form))
            room -= aligned(form.nbytes)
        elif form.nbytes < _LARGE:
            together[form.on_host].append((number, form))
        else:
            alone.append(Packet.of([(number, form)], form.on_host))
    return Packet.of(inner, True), (*(Packet.of(some, on_host) for on_host, some in together.items() if some), *alone)


@dataclass(frozen=True)
class Structure:
    """The structure of a message: everything except its micro-batch and the elements of its tensors.

    Attributes:
        forms: forms of the tensors.
        rest: the fields of a message after its tensors.
        number: number of the structure at both ends; negative if it is new to the receiver, or is not numbered.
    """

    forms: tuple[TensorForm | None, ...]
    rest: tuple[Any, ...]
    number: int = -1

    @functools.cached_property
    def whole(self) -> Packet:
        """The packet of all tensors that have elements."""
        return Packet.of([(i, f) for i, f in enumerate(self.forms) if f is not None and not f.is_empty], on_host=True)

    @functools.cached_property
    def packets(self) -> tuple[Packet, tuple[Packet, ...]]:
        """The packet of tensors that travel in the frame, and the packets that follow it."""
        return _packets(self.forms, self.segments)

    @property
    def segments(self) -> int:
        """The minimum number of pieces in which large tensors travel."""
        return self.message(0, ()).segments

    @property
    def tag(self) -> int:
        """The tag of the packets. A numbered structure has a tag of its own, so its receives can be posted early."""
        return REST if self.number < 0 else _FIRST_NUMBERED + self.number

    def message(self, micro_batch: int, tensors: Sequence[Tensor | None]) -> Message:
        """Return a message of this structure."""
        return Message(micro_batch, tuple(tensors), *self.rest)

    def completed(self, partial: Message, flats: Sequence[Tensor]) -> Message:
        """Return the message of a frame that has been read, completed by the packets that came after it."""
        if not flats:
            return partial
        (_, packets), tensors = self.packets, list(partial.tensors)
        for packet, flat in zip(packets, flats, strict=True):
            packet.unpack(flat, tensors)
        return partial._replace(tensors=tuple(tensors))

    def bare(self, device: torch.device) -> list[Tensor | None]:
        """Return the message's list of tensors, with only those that have no elements filled in."""
        return [
            torch.empty(form.shape, dtype=form.dtype, device="cpu" if form.on_host else device)
            if form is not None and form.is_empty else None
            for form in self.forms
        ]  # fmt: skip


class Head(NamedTuple):
    """The head of a message: everything that the receiver learns before the elements of the tensors.

    Attributes:
        structure: structure of the message.
        channel: number of the channel.
        text: pickle of the channel and the structure, as far as they are new to the receiver; empty if neither is.
    """

    structure: Structure
    channel: int
    text: bytes


class Numbering:
    """The numbers of structures and channels at the sending end of a connection."""

    def __init__(self) -> None:
        self._structures: dict[Any, Structure] = {}
        self._channels: dict[Route, int] = {}

    def head(self, route: Route, message: Message) -> Head:
        """Return the head of a message of a channel. Messages must be sent in the order of these calls.

        The elements of the tensors need not have been computed yet.

        Raises:
            UnsendableError: the message has something that cannot be pickled; then the message must not be sent.
        """
        forms = tuple(None if tensor is None else TensorForm.of(tensor) for tensor in message.tensors)
        rest: tuple[Any, ...] = message[2:]  # all fields after its tensors
        key = forms, rest
        try:
            found = self._structures.get(key)
            has_room = len(self._structures) < _MAX_NUMBERED
            structure = found or Structure(forms, rest, _NEW if has_room else _UNNUMBERED)
        except TypeError:  # an unhashable leaf: sent in full every time
            structure = Structure(forms, rest, _UNNUMBERED)
        new, text = route not in self._channels, b""
        if new or structure.number < 0:
            text = pickled((route if new else None, key if structure.number < 0 else None))
        if structure.number == _NEW:
            self._structures[key] = replace(structure, number=len(self._structures))
        return Head(structure, self._channels.setdefault(route, len(self._channels)), text)


class ReceivedStructures:
    """The numbered structures and channels at the receiving end of a connection."""

    def __init__(self) -> None:
        self._structures: list[Structure] = []
        self._channels: list[Route] = []

    def find(self, number: int, channel: int, text: Any) -> tuple[Route, Structure]:
        """Return the channel and structure of a message, given the numbers and the text of its head."""
        route, key = pickle.loads(text) if len(text) else (None, None)
        if route is not None:
            self._channels.append(route)
        if key is None:
            return self._channels[channel], self._structures[number]
        forms, rest = key
        structure = Structure(forms, rest, number)
        if number == _NEW:
            self._structures.append(replace(structure, number=len(self._structures)))
        return self._channels[channel], structure


def frame_of(head: Head, message: Message) -> list[Tensor]:
    """Return what to send first for a message: its frame and, if that exceeds the capacity, the rest of it."""
    (inner, _), text = head.structure.packets, head.text
    begin = aligned(_PREFIX.size + len(text))
    size = begin + inner.nbytes
    frame = np.zeros(size if _ACCEPTS_SHORTER else max(size, CAPACITY), dtype=np.uint8)
    prefix = _PREFIX.pack(size, len(text), head.structure.number, head.channel, message.micro_batch)
    frame[: len(prefix) + len(text)] = np.frombuffer(prefix + text, dtype=np.uint8)
    whole = torch.from_numpy(frame)
    inner.fill(whole[begin:], message)
    return [whole] if size <= CAPACITY else [whole[:CAPACITY], whole[CAPACITY:]]


def pickled(item: Any) -> bytes:
    """Pickle an object for another process.

    Raises:
        UnsendableError: the object cannot be pickled; the message says which part of it.
    """
    try:
        return pickle.dumps(item)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnsendableError(f"an object that must be sent to another process cannot be pickled: {error}") from error


def bytes_after(frame: Tensor) -> int:
    """Return how many bytes come after a received frame of :data:`CAPACITY` bytes."""
    size: int = _PREFIX.unpack_from(frame.numpy().data)[0]
    return max(0, size - CAPACITY)


def read_frame(
    frame: Tensor, rest: Tensor | None, known: ReceivedStructures, device: torch.device
) -> tuple[Route, Structure, Message]:
    """Read a frame, and return the channel, the structure, and the message with the tensors that came in the frame.

    Args:
        frame: frame as received, of :data:`CAPACITY` bytes.
        rest: bytes that came after the frame; None if there are none.
        known: numbered structures and channels of the connection.
        device: device of tensors on this end.
    """
    whole = frame if rest is None else torch.cat((frame, rest))
    raw = whole.numpy()
    _, length, number, channel, micro_batch = _PREFIX.unpack_from(raw.data)
    route, structure = known.find(number, channel, raw[_PREFIX.size : _PREFIX.size + length].data)
    inner, _ = structure.packets
    tensors = structure.bare(device)
    inner.unpack(whole[aligned(_PREFIX.size + length) :], tensors, copies=True)
    return route, structure, structure.message(micro_batch, tensors)


def aligned(nbytes: int) -> int:
    """Return the first aligned offset that is not smaller than ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

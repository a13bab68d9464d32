"""The codec of messages: frames, which announce a message on a wire, or hold a small one.

::

    frame     | lengths, structure's number, micro-batch, place | structure, if new | small tensors, each aligned |
    after it    the rest of a structure that is too long, then large tensors one by one

Both ends number the structures of messages (shapes, types and everything else but numbers) as they see them, so that
a structure which repeats is neither pickled nor sent again. What follows the frame has the structure's number as its
tag: the receiver can be ready for it before the frame is there.
"""

from __future__ import annotations

import math
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_avgpipe.comm.message import Message

# A receive is posted for so many bytes before the size of the frame is known. On Linux gloo accepts a shorter one; its
# transport elsewhere reads on until all have come, so frames are filled up there.
_ACCEPTS_SHORTER = sys.platform == "linux"
CAPACITY = 65536 if _ACCEPTS_SHORTER else 1024
# bytes of the structure, bytes of inner tensors, the structure's number, micro-batch, place
_PREFIX = struct.Struct("<qqqqq")
_NEW, _UNNUMBERED = -1, -2
_NOWHERE = -1  # a message without a place
_MAX_NUMBERED = 256
MOST_TAGS = 1 + _MAX_NUMBERED  # of one channel
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


# the last five are the message's
_Structure = tuple[tuple[TensorForm | None, ...], tuple[bool, ...], Any, bool, int, int]


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view in bytes: any type can be sent, also those that a backend does not know."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class FrameWriter:
    """Makes frames at the sending end of a channel."""

    def __init__(self) -> None:
        self._numbers: dict[_Structure, int] = {}

    def write(
        self, message: Message, inner: bool, place: int | None = None
    ) -> tuple[list[Tensor], Sequence[TensorForm | None], int | None]:
        """What to send first.

        Args:
            message: to be sent.
            inner: whether its tensors are on the host, so that small ones can be in the frame.
            place: among the messages of the link between devices; None: it does not travel there.
        Returns:
            The frame and, if the structure is too long for it, the rest of that; the forms of the tensors; and with
            which tag these follow, or None if they are in the frame.
        """
        forms = tuple(None if t is None else TensorForm.of(t) for t in message.tensors)
        structure = (
            forms, message.requires_grad, message.entries, message.abandoned, message.forward_only, message.segments,
        )  # fmt: skip
        number = self._number(structure)
        text = pickle.dumps(structure) if number < 0 else b""
        parts = [] if not inner else [
            (form, t) for form, t in zip(forms, message.tensors, strict=True)
            if form is not None and t is not None and not form.is_empty
        ]  # fmt: skip
        size = _aligned(_PREFIX.size + len(text))
        nbytes = sum(_aligned(t.numel() * t.element_size()) for _, t in parts)
        if not inner or size + nbytes > CAPACITY:
            parts, nbytes = [], 0
        used = size + nbytes if parts else min(_PREFIX.size + len(text), CAPACITY)
        frame = np.zeros(used if _ACCEPTS_SHORTER else CAPACITY, dtype=np.uint8)
        first = text[: CAPACITY - _PREFIX.size]
        frame[: _PREFIX.size + len(first)] = np.frombuffer(
            _PREFIX.pack(len(text), nbytes, number, message.micro_batch, _NOWHERE if place is None else place) + first,
            dtype=np.uint8,
        )
        whole = torch.from_numpy(frame)
        position = size
        for form, tensor in parts:
            flat = as_bytes(form.on_wire(tensor))
            whole[position : position + flat.numel()] = flat
            position += _aligned(flat.numel())
        rest = text[len(first) :]
        frames = [whole, *([torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [])]
        return frames, forms, None if parts else _tag(number)

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
        micro_batch: of the message.
        forms: of its tensors.
        requires_grad: of the message.
        entries: of the message.
        abandoned: of the message.
        forward_only: of the message.
        segments: of the message.
        tensors: those that were in the frame, in order; None if they come after it.
        tag: with which they do.
        place: as given to the writer.
    """

    micro_batch: int
    forms: tuple[TensorForm | None, ...]
    requires_grad: tuple[bool, ...]
    entries: Any
    abandoned: bool
    forward_only: int
    segments: int
    tensors: list[Tensor] | None
    tag: int
    place: int | None


class FrameReader:
    """Takes frames apart at the receiving end of a channel.

    Attributes:
        usual: tag, forms and segments of the latest structure that has repeated, with tensors after the frame.
    """

    def __init__(self) -> None:
        self.usual: tuple[int, tuple[TensorForm | None, ...], int] | None = None
        self._structures: list[_Structure] = []

    @staticmethod
    def missing(frame: Tensor) -> int:
        """Bytes of the structure that come after the frame."""
        length: int = _PREFIX.unpack_from(frame.numpy().data)[0]
        return max(0, _PREFIX.size + length - CAPACITY)

    def read(self, frame: Tensor, rest: Tensor | None) -> Opened:
        """Take a frame apart.

        Args:
            frame: as received, of :data:`CAPACITY` bytes.
            rest: what comes after it.
        """
        raw = frame.numpy()
        length, nbytes, number, micro_batch, place = _PREFIX.unpack_from(raw.data)
        if number < 0:
            text = raw[_PREFIX.size : _PREFIX.size + length].tobytes()
            structure: _Structure = pickle.loads(text if rest is None else text + rest.numpy().tobytes())
            if number == _NEW:
                self._structures.append(structure)
        else:
            structure = self._structures[number]
        forms, requires_grad, entries, abandoned, forward_only, segments = structure
        tensors = None
        if nbytes:
            tensors, position = [], _aligned(_PREFIX.size + length)
            for form in forms:
                if form is not None and not form.is_empty:
                    tensor = torch.empty(form.wire_shape, dtype=form.dtype)  # memory of its own, as if sent alone
                    flat = tensor.reshape(-1).view(torch.uint8)
                    flat.copy_(frame[position : position + flat.numel()])
                    position += _aligned(flat.numel())
                    tensors.append(tensor)
        tag = _tag(number)
        if tensors is None and tag and any(form is not None for form in forms):
            self.usual = tag, forms, segments
        return Opened(
            micro_batch, forms, requires_grad, entries, abandoned, forward_only, segments, tensors, tag,
            None if place == _NOWHERE else place,
        )  # fmt: skip


def _tag(number: int) -> int:
    """With which tensors follow: each structure has one of its own, so that they may be awaited before the frame."""
    return max(0, number + 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

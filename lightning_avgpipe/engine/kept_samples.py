"""Kept samples: what is kept of each, on the host up to a bound, then in files that are mapped into memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import TensorForm, as_bytes

_SEGMENT_BYTES = 256 * 1024**2
_ALIGNMENT = 64
_SPARE = 0.1  # of a disk, which stays free

Key = tuple[int, bytes]  # samples of the micro-batch, and the digest


@dataclass(frozen=True)
class Form:
    """What micro-batches of one size and of samples of one shape have in common."""

    entries: Any
    described: bytes  # the same, to compare
    shared: tuple[Tensor | None, ...]  # by tensor; None: each sample has a row of its own


class FormName(NamedTuple):
    """Of a form: nodes that have run, samples of the micro-batch, and what its tensors are."""

    depth: int
    size: int
    tensors: tuple[TensorForm, ...]


class _Row(NamedTuple):
    """What is kept of one tensor for one sample."""

    tensor: Tensor
    in_file: bool


class _Rows:
    """Memory for rows of tensors: on the host up to a bound, then in files that are mapped into it."""

    def __init__(self, limit: float, folder: str | None) -> None:
        self._left = limit
        self._folder = folder
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._free: dict[int, list[Tensor]] = {}  # places in files, by size

    def put(self, row: Tensor) -> _Row | None:
        """A copy of what is on the host; None if there is no room."""
        size = row.numel() * row.element_size()
        if size <= self._left:
            self._left -= size
            return _Row(row.clone(memory_format=torch.contiguous_format), False)
        place = self._place(size)
        return None if place is None else _Row(place.view(row.dtype).view(row.shape).copy_(row), True)

    def drop(self, row: _Row) -> None:
        """Another one may take its place."""
        flat = as_bytes(row.tensor)
        if row.in_file:
            self._free.setdefault(flat.numel(), []).append(flat)
        else:
            self._left += flat.numel()

    def _place(self, size: int) -> Tensor | None:
        free = self._free.get(size)
        if free:
            return free.pop()
        if not self._has_room(size):
            return None
        begin = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._segment[begin : begin + size]

    def _has_room(self, size: int) -> bool:
        if self._used + size <= self._segment.numel():
            return True
        total = max(size, _SEGMENT_BYTES)
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:  # which is gone when nobody maps it any more
            disk = shutil.disk_usage(file.name)
            if disk.free - total < _SPARE * disk.total:
                return False
            self._segment = torch.from_file(file.name, shared=True, size=total, dtype=torch.uint8)
        self._used = 0
        return True


class Kept(NamedTuple):
    """A sample."""

    form: FormName
    rows: tuple[_Row | None, ...]

    @property
    def tensors(self) -> list[Tensor | None]:
        """Its own rows."""
        return [None if row is None else row.tensor for row in self.rows]


class KeptSamples:
    """What is kept of samples.

    Args:
        limit: bytes on the host; what is beyond goes into files.
        folder: for these files; None: where temporary files go.

    Attributes:
        known: samples by key.
        forms: that they have.
        were_read: whether any was.
    """

    def __init__(self, limit: float, folder: str | None) -> None:
        self._limit = limit
        self._folder = folder
        self.clear()

    def clear(self) -> None:
        """Keep nothing."""
        self._rows = _Rows(self._limit, self._folder)
        self.known: dict[Key, Kept] = {}
        self.forms: dict[FormName, Form] = {}
        self.were_read = False

    def keep(self, key: Key, name: FormName, parts: Sequence[Tensor | None]) -> bool:
        """Keep a sample, if there is room, in the place of what is kept of it."""
        self._drop(key)
        kept = Kept(name, tuple(None if part is None else self._rows.put(part) for part in parts))
        self.known[key] = kept
        if any(row is None and part is not None for row, part in zip(kept.rows, parts, strict=True)):
            self._drop(key)  # others stay
            return False
        return True

    def _drop(self, key: Key) -> None:
        kept = self.known.pop(key, None)
        for row in () if kept is None else kept.rows:
            if row is not None:
                self._rows.drop(row)

    def drop_others(self, depths: Collection[int]) -> None:
        """Keep samples behind these depths only."""
        for key in [key for key, kept in self.known.items() if kept.form.depth not in depths]:
            self._drop(key)

    def tidy(self, depth: int) -> set[int]:
        """Forget forms that no sample has, but for those of one depth; returns it and the depths of samples."""
        used = {kept.form.depth for kept in self.known.values()} | {depth}
        self.forms = {name: form for name, form in self.forms.items() if name.depth in used}
        return used

    def read(self, keys: Sequence[Key], device: torch.device) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors of a micro-batch of samples of one form, and what the nodes before returned."""
        kept = [self.known[key] for key in keys]
        name, form, tensors = kept[0].form, self.forms[kept[0].form], []
        for i, shared in enumerate(form.shared):
            if shared is not None:
                tensors.append(shared.to(device, copy=True))
            else:
                value = torch.stack([row.tensor for row in (sample.rows[i] for sample in kept) if row is not None])
                tensors.append(_ordered(value.to(device), name.tensors[i].order))
        self.were_read = True
        return tuple(tensors), form.entries


def _ordered(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same numbers, with dimensions in this order in memory: kernels may round by it."""
    if order is None:
        return tensor
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return tensor.permute(order).contiguous().permute(inverse)

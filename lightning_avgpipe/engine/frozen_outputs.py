"""Outputs of a frozen prefix, kept by sample: what the same layers would give for the same sample once more.

::

    micro-batch    samples 4 7 0 2      all known: the forward begins behind the frozen layers
                   samples 4 7 9 2      9 is not: the frozen layers run, and 9 is kept

A sample is known by a digest of its part of the batch, as far as the frozen layers read it, so no dataset needs to
number its samples, and one that was augmented is another sample. Whatever the layers compute although they need not is
compared with what is kept. Once an epoch micro-batches are computed for that alone.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils import tree

_log = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * 1024**2
_ALIGNMENT = 64
_SPARE = 0.1  # of a disk, which stays free
_FEWEST_HITS = 0.5  # of the samples of a second epoch


def digests(data: Any, size: int, names: Collection[str] | None) -> list[bytes]:
    """What tells the samples of a micro-batch from others.

    Args:
        data: the micro-batch, a tree.
        size: number of samples. Tensors with another first dimension, and what is no tensor, belong to every sample.
        names: of the tensors that count; None: all.
    """
    shared, each = hashlib.blake2b(digest_size=16), [hashlib.blake2b(digest_size=16) for _ in range(size)]
    for name, leaf in tree.flatten_with_names(data)[0]:
        if not isinstance(leaf, Tensor):
            shared.update(pickle.dumps((name, leaf)))
        elif names is None or name in names:
            divided = leaf.ndim > 0 and leaf.shape[0] == size
            shape = tuple(leaf.shape[1:] if divided else leaf.shape)
            shared.update(f"{name} {shape} {leaf.dtype}".encode())
            host = leaf.detach().cpu().contiguous()
            for part, found in zip(host, each, strict=True) if divided else [(host, shared)]:
                found.update(as_bytes(part).numpy().data)
    tail = shared.digest()
    return [found.digest() + tail for found in each]


class _Blocks:
    """Memory for tensors: on the host up to a bound, then in files that are mapped into it."""

    def __init__(self, limit: float, folder: str | None) -> None:
        self._left = limit
        self._folder = folder
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def put(self, tensor: Tensor) -> Tensor | None:
        """A copy on the host; None if there is no room."""
        source = tensor.detach()
        size = source.numel() * source.element_size()
        if size <= self._left:
            self._left -= size
            return source.to("cpu", copy=True).contiguous()
        if size == 0 or not self._has_room(size):
            return None
        begin = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        place = self._segment[begin : begin + size].view(source.dtype).view(source.shape)
        return place.copy_(source)

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


@dataclass(frozen=True)
class _Form:
    """What micro-batches of one size and of samples of one shape have in common."""

    entries: Any
    described: bytes  # the same, to compare
    shared: tuple[Tensor | None, ...]  # by tensor; None: each sample has a row of its own
    orders: tuple[tuple[int, ...] | None, ...]  # of dimensions in memory: kernels may round by it


@dataclass
class _Kept:
    """A sample: row ``row`` of what a micro-batch gave."""

    form: tuple[Any, ...]
    parts: tuple[Tensor | None, ...]
    row: int


# samples with their form and rows, and these forms
_News = tuple[list[tuple[tuple[int, bytes], Any, list[Tensor | None]]], dict[Any, _Form]]


class FrozenOutputs:
    """Of one pipeline, on the process with the first stage that trains.

    Args:
        limit: bytes on the host; what is beyond goes into files.
        folder: for these files; None: where temporary files go.

    Attributes:
        why_not: why nothing is kept any more; empty if it is.
        hits: samples that were read, since the start.
    """

    def __init__(self, limit: float, folder: str | None = None) -> None:
        self._limit = limit
        self._folder = folder
        self._shares = False
        self.hits = 0
        self._begin(None)

    def _begin(self, prefix: Any) -> None:
        self._prefix = prefix
        self._blocks = _Blocks(self._limit, self._folder)
        self._kept: dict[tuple[int, bytes], _Kept] = {}
        self._forms: dict[Any, _Form] = {}
        self._keys: dict[int, list[bytes]] = {}  # of micro-batches whose forwards are to come
        self.why_not = ""
        self._due = True  # a comparison, before anything is read
        self._has_read = False
        self._fresh: list[tuple[int, bytes]] = []  # that replicas are not told of yet
        self._known = self._seen = 0  # samples of this epoch
        self._expected = 0  # samples that were kept when it began

    def follow(self, prefix: Any, shares: bool = False) -> None:
        """From now on the prefix is this one, anything that is equal for equal ones; None: there is none.

        Args:
            shares: whether replicas of the stage are told what is kept.
        """
        self._shares = shares
        if prefix != self._prefix:
            self.forget()
            self._prefix = prefix

    def forget(self) -> None:
        """Keep nothing of what was kept."""
        self._begin(self._prefix)

    def begin_epoch(self) -> None:
        """What is kept is compared once more. If the samples of an epoch are all new, nothing is kept any more."""
        self._due = True
        if self._known < _FEWEST_HITS * min(self._seen, self._expected):
            self._give_up(
                f"of {self._seen} samples of an epoch {self._known} had come before: the dataloader augments at random "
                "or has new samples in each epoch"
            )
        if self._seen:
            _log.info(
                "of %d samples of the last epoch outputs of frozen layers were kept for %d", self._seen, self._known
            )
        self._known, self._seen, self._expected = 0, 0, len(self._kept)

    def look_up(self, samples: Mapping[int, list[bytes]]) -> frozenset[int]:
        """An iteration begins.

        Args:
            samples: micro-batch -> digests; none: nothing of it is to be kept.
        Returns:
            The micro-batches whose forwards may begin behind the frozen layers.
        """
        self._keys = {} if self.why_not else dict(samples)
        if self.why_not:
            return frozenset()
        known = {i: [(len(keys), key) in self._kept for key in keys] for i, keys in samples.items()}
        self._seen += sum(map(len, known.values()))
        self._known += sum(map(sum, known.values()))
        # samples of one micro-batch that are kept in different forms (padded to other lengths) have other digests
        found = frozenset(i for i, here in known.items() if here and all(here))
        return frozenset() if self._due else found

    def read(self, micro_batch: int, device: torch.device, forward_only: int) -> Message:
        """What the frozen layers gave for these samples."""
        keys = self._keys.pop(micro_batch)
        kept = [self._kept[len(keys), key] for key in keys]
        form = self._forms[kept[0].form]
        tensors = []
        for i, shared in enumerate(form.shared):
            rows = [sample.parts[i] for sample in kept]
            if shared is not None:
                tensors.append(shared.to(device, copy=True))
                continue
            value = torch.stack([part[s.row] for part, s in zip(rows, kept, strict=True) if part is not None])
            tensors.append(_ordered(value.to(device), form.orders[i]))
        self._has_read = True
        self.hits += len(keys)
        return Message(micro_batch, tuple(tensors), (False,) * len(tensors), form.entries, forward_only=forward_only)

    def fill(self, micro_batch: int, tensors: Sequence[Tensor], entries: Any) -> None:
        """Keep what the frozen layers have given, and compare it with what is kept of the same samples.

        Raises:
            VerificationError: it is something else, and has been used.
        """
        keys = self._keys.pop(micro_batch, None)
        if keys is None:
            return None
        size = len(keys)
        divided = tuple(t.ndim > 0 and t.shape[0] == size for t in tensors)
        forms = tuple(TensorForm.of(t) for t in tensors)
        name = size, forms
        described = pickle.dumps(entries)
        form = self._forms.get(name)
        if form is None:
            shared = tuple(None if own else t.detach().cpu().clone() for t, own in zip(tensors, divided, strict=True))
            form = self._forms[name] = _Form(entries, described, shared, tuple(f.order for f in forms))
        elif described != form.described:
            return self._differ("what the frozen layers return besides tensors")
        for tensor, one in zip(tensors, form.shared, strict=True):
            if one is not None and not torch.equal(tensor.detach().cpu(), one):
                return self._differ(f"a tensor of shape {tuple(tensor.shape)}, which is not one row for each sample,")
        there = {row: self._kept[size, key] for row, key in enumerate(keys) if (size, key) in self._kept}
        for row, known in there.items():
            for tensor, part, own in zip(tensors, known.parts, divided, strict=True):
                if own and part is not None and (known.form != name or not _same(tensor[row], part[known.row])):
                    return self._differ("what the frozen layers give for the same sample", tensor[row], part[known.row])
        self._due = self._due and len(there) < size
        missing = [(row, key) for row, key in enumerate(keys) if row not in there]
        if missing:
            self._keep(name, missing, tensors, divided)
        return None

    def _keep(
        self, name: Any, missing: Sequence[tuple[int, bytes]], tensors: Sequence[Tensor], divided: Sequence[bool]
    ) -> None:
        """Keep these rows of tensors, as far as there is room.

        Args:
            name: of the form of what the layers have given.
            missing: rows, and the keys of their samples.
            tensors: that the layers have given.
            divided: which of them have a row for each sample.
        """
        size = name[0]
        rows = torch.tensor([row for row, _ in missing])
        parts = tuple(
            self._blocks.put(t if len(missing) == size else t[rows.to(t.device)]) if own else None
            for t, own in zip(tensors, divided, strict=True)
        )
        if any(own and part is None for part, own in zip(parts, divided, strict=True)):
            return  # no room: others stay
        for row, (_, key) in enumerate(missing):
            self._kept[size, key] = _Kept(name, parts, row)
        self._fresh += [(size, key) for _, key in missing] if self._shares else []

    def fresh(self) -> _News:
        """What was kept since the last call."""
        keys, self._fresh = self._fresh, []
        found = [(key, self._kept[key]) for key in keys]
        rows = [(key, kept.form, [None if p is None else p[kept.row] for p in kept.parts]) for key, kept in found]
        return rows, {kept.form: self._forms[kept.form] for _, kept in found}

    def accept(self, news: _News) -> None:
        """Keep what a replica has kept."""
        rows, forms = news
        if self.why_not:
            return
        for name, form in forms.items():
            if self._forms.setdefault(name, form).described != form.described:
                return self._differ("what the frozen layers return besides tensors")
        for key, name, row in rows:
            parts = tuple(None if part is None else self._blocks.put(part[None]) for part in row)
            if any(there is not None and part is None for part, there in zip(parts, row, strict=True)):
                return None  # no room
            self._kept.setdefault(key, _Kept(name, parts, 0))
        return None

    def _differ(self, what: str, now: Tensor | None = None, before: Tensor | None = None) -> None:
        apart = ""
        if now is not None and before is not None and now.shape == before.shape:
            apart = f", by up to {float((now.detach().cpu().double() - before.double()).abs().max()):.3g}"
        found = (
            f"{what} is not what it was before{apart}: it depends on more than the sample (on others beside it, on "
            "chance, on time), or frozen weights have changed"
        )
        if self._has_read:
            raise VerificationError(
                f"{found}. Kept outputs of frozen layers were used in the epochs before; train without the cache"
            )
        self._give_up(found)

    def _give_up(self, why: str) -> None:
        _log.warning("outputs of frozen layers are not kept any more: %s", why)
        self.forget()
        self.why_not = why


def _ordered(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same numbers, with dimensions in this order in memory."""
    if order is None:
        return tensor
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return tensor.permute(order).contiguous().permute(inverse)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bytes(one.detach().cpu().contiguous()), as_bytes(other.contiguous()))

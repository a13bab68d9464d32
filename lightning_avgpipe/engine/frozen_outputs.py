"""Outputs of a frozen prefix, kept by sample: what the same layers would give for the same sample once more.

::

    micro-batch    samples 4 7 0 2      all known: the forward begins behind the frozen layers
                   samples 4 7 9 2      9 is not: the frozen layers run, and 9 is kept

    more frozen    3 -> 5 layers        what is kept of 3 is read, 3 and 4 run, and what they give takes its place

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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_NEWS_BYTES = 64 * 1024**2  # which replicas are told after one iteration
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


@dataclass(frozen=True)
class _Form:
    """What micro-batches of one size and of samples of one shape have in common."""

    entries: Any
    described: bytes  # the same, to compare
    shared: tuple[Tensor | None, ...]  # by tensor; None: each sample has a row of its own
    orders: tuple[tuple[int, ...] | None, ...]  # of dimensions in memory: kernels may round by it


class _Name(NamedTuple):
    """Of a form: nodes that have run, samples of the micro-batch, and what its tensors are."""

    depth: int
    size: int
    tensors: tuple[TensorForm, ...]


@dataclass(frozen=True)
class _Kept:
    """A sample."""

    form: _Name
    rows: tuple[_Row | None, ...]


_Key = tuple[int, bytes]  # samples of the micro-batch, and the digest
# samples with their form and rows, and these forms
_News = tuple[list[tuple[_Key, _Name, list[Tensor | None]]], dict[_Name, _Form]]


class FrozenOutputs:
    """Of one pipeline, on the process with the first stage that trains.

    What is kept is kept behind some *depth*, a number of nodes. When more is frozen it is read there, what is frozen by
    now runs on from it, and its place is taken by what that gives.

    Args:
        limit: bytes on the host; what is beyond goes into files.
        folder: for these files; None: where temporary files go.

    Attributes:
        why_not: why nothing is kept any more; empty if it is.
        hits: samples that were read, since the start.
        shares: whether some replica will have news after this iteration.
    """

    def __init__(self, limit: float, folder: str | None = None) -> None:
        self._limit = limit
        self._folder = folder
        self._depth = 0
        self._described: Callable[[int], Any] = _nothing
        self._tellers: Sequence[int] = ()
        self.hits = 0
        self.shares = False
        self._begin()

    def _begin(self) -> None:
        self._rows = _Rows(self._limit, self._folder)
        self._kept: dict[_Key, _Kept] = {}
        self._forms: dict[_Name, _Form] = {}
        self._depths: dict[int, Any] = {}  # behind which something is or will be kept, and what is known to come before
        self._keys: dict[int, list[bytes]] = {}  # of micro-batches whose forwards are to come
        self._begins: dict[int, int] = {}  # of these, the depths at which some are read
        self._readers: Counter[_Key] = Counter()  # how many of them read a sample
        self._wanted: dict[int, set[int]] = {}  # of all, depths at which nothing has come yet
        self._grows = False  # whether something will be kept in this iteration
        self.why_not = ""
        self._due: set[int] = set()  # depths with a comparison to come in this epoch
        self._compared: set[int] = set()  # those with one ever; before it nothing is read there
        self._has_read = False
        self._fresh: list[_Key] = []  # that replicas are not told of yet
        self._known = self._seen = 0  # samples of this epoch
        self._expected = 0  # samples that were kept when it began

    def follow(self, depth: int, described: Callable[[int], Any], tellers: Sequence[int] = (0,)) -> None:
        """From now on so many nodes are frozen. What was kept behind fewer stays, if forwards may begin there.

        Args:
            depth: nodes, from the first.
            described: of a depth up to this one, anything that is equal for equal nodes; None: no forward may begin
                there.
            tellers: ranks of the processes that tell each other what they keep, with this one.
        """
        same = {d: before for d, before in self._depths.items() if d <= depth and before == described(d) is not None}
        for key in [key for key, kept in self._kept.items() if kept.form.depth not in same]:
            self._drop(key)
        joined, self._tellers = tuple(tellers) != tuple(self._tellers), tellers
        self.shares = False
        self._depth, self._described = depth, described
        if not self._kept and depth not in same:
            return self.forget()
        done = same.keys() - self._due
        self._depths = {**same, depth: described(depth)}
        self._compared &= same.keys()
        self._tidy()
        self._due = self._depths.keys() - done
        self._expected = min(self._expected, len(self._kept))
        if len(tellers) < 2:
            self._fresh = []
        elif joined:  # some of them have nothing yet
            self._fresh = [*self._kept]
        return None

    def _tidy(self) -> None:
        """Forget depths behind which nothing is kept any more."""
        used = {kept.form.depth for kept in self._kept.values()} | {self._depth}
        self._forms = {name: form for name, form in self._forms.items() if name.depth in used}
        self._depths = {depth: described for depth, described in self._depths.items() if depth in used}

    def forget(self) -> None:
        """Keep nothing of what was kept."""
        depth = self._depth
        self._begin()
        self._depths = {depth: self._described(depth)} if depth else {}
        self._due = {*self._depths}

    def stop(self) -> None:
        """Nothing is frozen any more, or others keep what it gives."""
        self._depth, self._described = 0, _nothing
        self.forget()

    def begin_epoch(self) -> None:
        """What is kept is compared once more. If the samples of an epoch are all new, nothing is kept any more."""
        self._tidy()
        self._due = {*self._depths}
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
            The micro-batches whose forwards may begin behind frozen layers, all of them or some.
        """
        self._keys = {} if self.why_not else dict(samples)
        self._wanted = {i: {*self._depths} for i in self._keys}
        self._grows, self._begins, compares = False, {}, set[int]()
        for i, keys in self._keys.items():
            here = [self._kept[len(keys), key] for key in keys if (len(keys), key) in self._kept]
            self._seen += len(keys)
            self._known += len(here)
            # samples of one micro-batch that are kept in different forms (padded to other lengths) have other digests
            depths = {kept.form.depth for kept in here}
            if len(here) == len(keys) and len(depths) == 1:
                # before the first comparison ever nothing is read; then one micro-batch is left for the next one
                if depths & self._due and not depths <= self._compared & compares:
                    compares |= depths
                else:
                    (self._begins[i],) = depths
            self._grows |= len(here) < len(keys) or depths != {self._depth}
        self._readers = Counter((len(self._keys[i]), key) for i in self._begins for key in {*self._keys[i]})
        return frozenset(self._begins)

    @property
    def has_news(self) -> bool:
        """Whether there may be something, after this iteration, that replicas are not told of yet."""
        return bool(self._fresh) or self._grows

    def begins(self, micro_batch: int) -> int:
        """Of a micro-batch that was found: the depth at which it is read."""
        return self._begins[micro_batch]

    def taps(self, micro_batch: int, begins: int = 0) -> frozenset[int]:
        """The depths behind ``begins`` at which :meth:`fill` wants what is there."""
        return frozenset(depth for depth in self._wanted.get(micro_batch, ()) if depth > begins)

    def read(self, micro_batch: int, device: torch.device, forward_only: int) -> Message:
        """What the frozen layers gave for these samples."""
        keys = self._keys[micro_batch]
        kept = [self._kept[len(keys), key] for key in keys]
        form = self._forms[kept[0].form]
        tensors = []
        for i, shared in enumerate(form.shared):
            if shared is not None:
                tensors.append(shared.to(device, copy=True))
                continue
            value = torch.stack([row.tensor for row in (sample.rows[i] for sample in kept) if row is not None])
            tensors.append(_ordered(value.to(device), form.orders[i]))
        self._has_read = True
        self.hits += len(keys)
        return Message(micro_batch, tuple(tensors), (False,) * len(tensors), form.entries, forward_only=forward_only)

    def fill(self, micro_batch: int, depth: int, tensors: Sequence[Tensor], entries: Any) -> None:
        """Keep what the frozen layers have given, and compare it with what is kept of the same samples.

        Args:
            micro_batch: its number.
            depth: nodes that have run; behind fewer than are frozen by now it is only compared.
            tensors: the values that are alive there.
            entries: what these nodes returned.
        Raises:
            VerificationError: it is something else, and has been used.
        """
        if depth not in self.taps(micro_batch):
            return None
        self._wanted[micro_batch].discard(depth)
        keys = self._keys[micro_batch]
        size = len(keys)
        divided = tuple(t.ndim > 0 and t.shape[0] == size for t in tensors)
        host = [t.detach().cpu() for t in tensors]
        name = _Name(depth, size, tuple(TensorForm.of(t) for t in tensors))
        described = pickle.dumps(entries)
        form = self._forms.get(name)
        if form is None:
            shared = tuple(None if own else t.clone() for t, own in zip(host, divided, strict=True))
            form = _Form(entries, described, shared, tuple(f.order for f in name.tensors))
        elif described != form.described:
            return self._differ("what the frozen layers return besides tensors")
        for tensor, one in zip(host, form.shared, strict=True):
            if one is not None and not torch.equal(tensor, one):
                return self._differ(f"a tensor of shape {tuple(tensor.shape)}, which is not one row for each sample,")
        there = {row: self._kept[size, key] for row, key in enumerate(keys) if (size, key) in self._kept}
        there = {row: known for row, known in there.items() if known.form.depth == depth}
        for row, known in there.items():
            for tensor, part, own in zip(host, known.rows, divided, strict=True):
                if own and part is not None and (known.form != name or not _same(tensor[row], part.tensor)):
                    return self._differ("what the frozen layers give for the same sample", tensor[row], part.tensor)
        if len(there) == size:
            self._due.discard(depth)
            self._compared.add(depth)
        elif depth == self._depth:
            self._forms[name] = form
            for row, key in enumerate(keys):
                # what another one of this iteration reads stays as it is
                if row not in there and self._readers[size, key] <= (micro_batch in self._begins):
                    parts = [t[row] if own else None for t, own in zip(host, divided, strict=True)]
                    if self._keep((size, key), name, parts) and len(self._tellers) > 1:
                        self._fresh.append((size, key))
        return None

    def _keep(self, key: _Key, name: _Name, parts: Sequence[Tensor | None]) -> bool:
        """Keep a sample, if there is room, in the place of what is kept of it."""
        self._drop(key)
        rows = [None if part is None else self._rows.put(part) for part in parts]
        if any(row is None and part is not None for row, part in zip(rows, parts, strict=True)):
            for row in rows:
                if row is not None:
                    self._rows.drop(row)
            return False  # others stay
        self._kept[key] = _Kept(name, tuple(rows))
        return True

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        for row in () if kept is None else kept.rows:
            if row is not None:
                self._rows.drop(row)

    def fresh(self) -> _News:
        """What was kept since the last call, or as much of it as is sent at once."""
        rows: list[tuple[_Key, _Name, list[Tensor | None]]] = []
        size = 0
        while self._fresh and size < _NEWS_BYTES:
            kept = self._kept.get(key := self._fresh.pop())
            if kept is not None:
                parts = [None if row is None else row.tensor for row in kept.rows]
                rows.append((key, kept.form, parts))
                size += sum(part.numel() * part.element_size() for part in parts if part is not None)
        return rows, {name: self._forms[name] for _, name, _ in rows}

    def accept(self, news: _News) -> None:
        """Keep what a replica has kept."""
        rows, forms = news
        if self.why_not:
            return
        for name, form in forms.items():
            if self._forms.setdefault(name, form).described != form.described:
                return self._differ("what the frozen layers return besides tensors")
            if name.depth not in self._depths:
                self._depths[name.depth] = self._described(name.depth)
                self._due.add(name.depth)
        for key, name, parts in rows:
            if key not in self._kept or self._kept[key].form.depth < name.depth:
                self._keep(key, name, parts)
        return None

    def _differ(self, what: str, now: Tensor | None = None, before: Tensor | None = None) -> None:
        apart = ""
        if now is not None and before is not None and now.shape == before.shape:
            apart = f", by up to {float((now.detach().cpu().double() - before.double()).abs().max()):.3g}"
        found = (
            f"{what} is not what it was before{apart}: it depends on more than the sample (on others beside it, on "
            "chance, on time), or frozen weights have changed"
        )
        if self._has_read or self._begins:
            raise VerificationError(f"{found}. Kept outputs of frozen layers are used by now; train without the cache")
        self._give_up(found)

    def _give_up(self, why: str) -> None:
        _log.warning("outputs of frozen layers are not kept any more: %s", why)
        self.forget()
        self.why_not = why


def _nothing(depth: int) -> None:
    """There are no frozen nodes yet."""


def _ordered(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same numbers, with dimensions in this order in memory."""
    if order is None:
        return tensor
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return tensor.permute(order).contiguous().permute(inverse)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bytes(one.detach().cpu().contiguous()), as_bytes(other.contiguous()))

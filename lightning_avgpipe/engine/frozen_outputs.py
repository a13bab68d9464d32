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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.kept_samples import Form, FormName, KeptSamples, Key
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils import tree

_log = logging.getLogger(__name__)

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


# samples with their form and rows, and these forms
_News = tuple[list[tuple[Key, FormName, list[Tensor | None]]], dict[FormName, Form]]


@dataclass
class _Depth:
    """A number of nodes behind which something is or will be kept."""

    described: Any  # what is known to come before
    is_due: bool = True  # a comparison is to come in this epoch
    is_compared: bool = False  # ever; before it nothing is read there


@dataclass
class _Epoch:
    """Its samples, and how many of them had come before."""

    expected: int = 0  # samples that were kept when it began
    seen: int = 0
    known: int = 0


@dataclass
class _Iteration:
    """The micro-batches whose forwards are to come."""

    keys: dict[int, list[Key]] = field(default_factory=dict)
    wanted: dict[int, set[int]] = field(default_factory=dict)  # depths at which nothing has come yet
    begins: dict[int, int] = field(default_factory=dict)  # the depths at which some are read
    readers: Counter[Key] = field(default_factory=Counter)  # how many of them read a sample
    grows: bool = False  # whether something will be kept


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
    """

    def __init__(self, limit: float, folder: str | None = None) -> None:
        self._samples = KeptSamples(limit, folder)
        self._described: Callable[[int], Any]
        self._depth = self.hits = 0
        self._tellers: Sequence[int] = ()
        self.stop()

    def forget(self) -> None:
        """Keep nothing of what was kept."""
        self._samples.clear()
        self._depths = {self._depth: _Depth(self._described(self._depth))} if self._depth else {}
        self._now, self._epoch = _Iteration(), _Epoch()
        self.why_not = ""
        self._fresh: list[Key] = []  # that replicas are not told of yet

    def follow(self, depth: int, described: Callable[[int], Any], tellers: Sequence[int] = (0,)) -> None:
        """From now on so many nodes are frozen. What was kept behind fewer stays, if forwards may begin there.

        Args:
            depth: nodes, from the first.
            described: of a depth up to this one, anything that is equal for equal nodes; None: no forward may begin
                there.
            tellers: ranks of the processes that tell each other what they keep, with this one.
        """
        same = {d: of for d, of in self._depths.items() if d <= depth and of.described == described(d) is not None}
        self._samples.drop_others(same)
        joined, self._tellers = tuple(tellers) != tuple(self._tellers), tellers
        self._depth, self._described = depth, described
        if not self._samples.known and depth not in same:
            return self.forget()
        self._depths = {depth: _Depth(described(depth)), **same}
        self._tidy()
        self._epoch.expected = min(self._epoch.expected, len(self._samples.known))
        if len(tellers) < 2:
            self._fresh = []
        elif joined:  # some of them have nothing yet
            self._fresh = [*self._samples.known]
        return None

    def _tidy(self) -> None:
        """Forget depths behind which nothing is kept any more."""
        used = self._samples.tidy(self._depth)
        self._depths = {depth: of for depth, of in self._depths.items() if depth in used}

    def stop(self) -> None:
        """Nothing is frozen any more, or others keep what it gives."""
        self._depth, self._described = 0, lambda depth: None
        self.forget()

    def begin_epoch(self) -> None:
        """What is kept is compared once more. If the samples of an epoch are all new, nothing is kept any more."""
        self._tidy()
        for of in self._depths.values():
            of.is_due = True
        seen, known = self._epoch.seen, self._epoch.known
        if known < _FEWEST_HITS * min(seen, self._epoch.expected):
            self._give_up(
                f"of {seen} samples of an epoch {known} had come before: the dataloader augments at random or has new "
                "samples in each epoch"
            )
        elif seen:
            _log.info("of %d samples of the last epoch outputs of frozen layers were kept for %d", seen, known)
        self._epoch = _Epoch(len(self._samples.known))

    def look_up(self, samples: Mapping[int, list[bytes]]) -> frozenset[int]:
        """An iteration begins.

        Args:
            samples: micro-batch -> digests; none: nothing of it is to be kept.
        Returns:
            The micro-batches whose forwards may begin behind frozen layers, all of them or some.
        """
        there = {} if self.why_not else samples
        now = self._now = _Iteration({i: [(len(found), one) for one in found] for i, found in there.items()})
        compares = set[int]()
        for i, keys in now.keys.items():
            now.wanted[i] = {*self._depths}
            here = [self._samples.known[key].form.depth for key in keys if key in self._samples.known]
            self._epoch.seen += len(keys)
            self._epoch.known += len(here)
            # samples of one micro-batch that are kept in different forms (padded to other lengths) have other digests
            if len(here) == len(keys) and len({*here}) == 1:
                of = self._depths[here[0]]
                # before the first comparison ever nothing is read; then one micro-batch is left for the next one
                if of.is_due and not (of.is_compared and here[0] in compares):
                    compares.add(here[0])
                else:
                    now.begins[i] = here[0]
            now.grows |= len(here) < len(keys) or {*here} != {self._depth}
        now.readers = Counter(key for i in now.begins for key in {*now.keys[i]})
        return frozenset(now.begins)

    @property
    def has_news(self) -> bool:
        """Whether there may be something, after this iteration, that replicas are not told of yet."""
        return bool(self._fresh) or self._now.grows

    def begins(self, micro_batch: int) -> int:
        """Of a micro-batch that was found: the depth at which it is read."""
        return self._now.begins[micro_batch]

    def taps(self, micro_batch: int, begins: int = 0) -> frozenset[int]:
        """The depths behind ``begins`` at which :meth:`fill` wants what is there."""
        return frozenset(depth for depth in self._now.wanted.get(micro_batch, ()) if depth > begins)

    def read(self, micro_batch: int, device: torch.device, forward_only: int) -> Message:
        """What the frozen layers gave for these samples."""
        keys = self._now.keys[micro_batch]
        tensors, entries = self._samples.read(keys, device)
        self.hits += len(keys)
        return Message(micro_batch, tensors, (False,) * len(tensors), entries, forward_only=forward_only)

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
        self._now.wanted[micro_batch].discard(depth)
        keys = self._now.keys[micro_batch]
        divided = tuple(t.ndim > 0 and t.shape[0] == len(keys) for t in tensors)
        host = [t.detach().cpu() for t in tensors]
        name, described = FormName(depth, len(keys), tuple(map(TensorForm.of, tensors))), pickle.dumps(entries)
        form = self._samples.forms.get(name)
        if form is None:
            form = Form(entries, described, tuple(None if d else t.clone() for t, d in zip(host, divided, strict=True)))
        elif described != form.described:
            return self._differ("what the frozen layers return besides tensors")
        for tensor, one in zip(host, form.shared, strict=True):
            if one is not None and not torch.equal(tensor, one):
                return self._differ(f"a tensor of shape {tuple(tensor.shape)}, which is not one row for each sample,")
        there = {row: known for row, key in enumerate(keys) if (known := self._samples.known.get(key)) is not None}
        there = {row: known for row, known in there.items() if known.form.depth == depth}
        for row, known in there.items():
            for tensor, part, own in zip(host, known.tensors, divided, strict=True):
                if own and part is not None and (known.form != name or not _same(tensor[row], part)):
                    return self._differ("what the frozen layers give for the same sample", tensor[row], part)
        if len(there) == len(keys):
            self._depths[depth].is_due, self._depths[depth].is_compared = False, True
        elif depth == self._depth:
            self._samples.forms[name] = form
            for row, key in enumerate(keys):
                # what another one of this iteration reads stays as it is
                if row not in there and self._now.readers[key] <= (micro_batch in self._now.begins):
                    parts = [t[row] if own else None for t, own in zip(host, divided, strict=True)]
                    if self._samples.keep(key, name, parts) and len(self._tellers) > 1:
                        self._fresh.append(key)
        return None

    def fresh(self) -> _News:
        """What was kept since the last call, or as much of it as is sent at once."""
        rows: list[tuple[Key, FormName, list[Tensor | None]]] = []
        size = 0
        while self._fresh and size < _NEWS_BYTES:
            if (kept := self._samples.known.get(key := self._fresh.pop())) is not None:
                rows.append((key, kept.form, kept.tensors))
                size += sum(part.nbytes for part in kept.tensors if part is not None)
        return rows, {name: self._samples.forms[name] for _, name, _ in rows}

    def accept(self, news: _News) -> None:
        """Keep what a replica has kept."""
        rows, forms = news
        if self.why_not:
            return
        for name, form in forms.items():
            if self._samples.forms.setdefault(name, form).described != form.described:
                return self._differ("what the frozen layers return besides tensors")
            if name.depth not in self._depths:
                self._depths[name.depth] = _Depth(self._described(name.depth))
        for key, name, parts in rows:
            if key not in self._samples.known or self._samples.known[key].form.depth < name.depth:
                self._samples.keep(key, name, parts)
        return None

    def _differ(self, what: str, now: Tensor | None = None, before: Tensor | None = None) -> None:
        apart = ""
        if now is not None and before is not None and now.shape == before.shape:
            apart = f", by up to {float((now.detach().cpu().double() - before.double()).abs().max()):.3g}"
        found = (
            f"{what} is not what it was before{apart}: it depends on more than the sample (on others beside it, on "
            "chance, on time), or frozen weights have changed"
        )
        if self._samples.were_read or self._now.begins:
            raise VerificationError(f"{found}. Kept outputs of frozen layers are used by now; train without the cache")
        self._give_up(found)

    def _give_up(self, why: str) -> None:
        _log.warning("outputs of frozen layers are not kept any more: %s", why)
        self.forget()
        self.why_not = why


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bytes(one.detach().cpu().contiguous()), as_bytes(other.contiguous()))

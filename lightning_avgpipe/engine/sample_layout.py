"""Find the samples of a batch: in dimension 0 of its tensors, or one by one in its lists.

::

    (Tensor[8, 3], Tensor[8])                      8 samples: both tensors are split
    (8 x Tensor[3, h, w], 8 x {"boxes": ...})      8 samples: both lists are split
    {"ids": Tensor[8, t], "positions": [1, t]}     8 samples, if this is the dataloader's batch size: the second
                                                   tensor is repeated
    (Tensor[t, 8, f], Tensor[t, 8])                refused, if the dataloader's batch size is 8: time comes first

If the batch size of the dataloader is known, it decides. Otherwise the leaves must agree.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from types import NoneType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_avgpipe.errors import BatchError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.tensors import is_strided

WAY_OUT = (
    "define split_batch(batch, num_microbatches) on the LightningModule, or pass it to the strategy as "
    "split_batch=...; it returns a list of at most num_microbatches smaller batches"
)
_NAMES_PER_SIZE = 4  # most names of leaves per size in messages
_LONGEST = 80  # most characters of a value in messages
_RECORD = 3  # most elements of a list of tensors that counts as a record (input, target, weight), not as samples
# Types of leaves that hold for all samples; any other leaf may hold samples.
_CONSTANTS = (
    *(NoneType, bool, int, float, complex, str, bytes, Enum, type, np.generic, torch.dtype, torch.device, torch.Size),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, range, slice),
)


@dataclass(frozen=True)
class BatchInfo:
    """What is known about batches from their dataloader.

    Attributes:
        size: batch size, which some batches may not reach; None if unknown.
        stacked: whether torch's ``default_collate`` put the samples into dimension 0 of every tensor.
        changed: whether hooks of the user may have changed the batches since then.
    """

    size: int | None = None
    stacked: bool = False
    changed: bool = False


@dataclass
class EarlierBatches:
    """Findings about earlier batches of the same source, which decide how an ambiguous later one is read.

    Attributes:
        lists: name -> whether the list holds one element per sample.
        settled: whether a full batch had its samples in dimension 0, and clearly in no other.
        refusal: reason why the first batch could not be split; later batches are refused for the same reason.
        began: whether any batch has been read.
    """

    lists: dict[str, bool] = field(default_factory=dict)
    settled: bool = False
    refusal: str | None = None
    began: bool = False


@dataclass(frozen=True)
class Layout:
    """A description of how a batch, or a part of it, is split.

    Attributes:
        kind: ``"split"`` along dimension 0 or by elements, ``"repeat"`` for all parts, or ``"inside"``: a container.
        below: layouts of a container's children.
    """

    kind: Literal["split", "repeat", "inside"]
    below: tuple[Layout, ...] = ()

    def parts(self, node: Any, sizes: Sequence[int]) -> list[Any]:
        """Split a batch into parts with these numbers of samples."""
        if self.kind == "repeat":
            return [node] * len(sizes)
        if self.kind == "inside":
            children, spec = tree.children(node)
            columns = [layout.parts(child, sizes) for layout, child in zip(self.below, children, strict=True)]
            return [tree.unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]
        if isinstance(node, Tensor):
            return list(torch.split(node, list(sizes)))
        ends = list(accumulate(sizes))
        return [node[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def ends(self, node: Any, name: str) -> Iterator[tuple[str, str, Any]]:
        """Yield ``("split" or "repeat", name, part)`` of each part of a batch that is split or repeated as it is."""
        if self.kind != "inside":
            yield self.kind, name, node
            return
        for layout, (below, child) in zip(self.below, tree.named_children(node, name), strict=True):
            yield from layout.ends(child, below)

    @property
    def divides(self) -> bool:
        """Whether anything is split."""
        return self.kind == "split" or any(layout.divides for layout in self.below)


def layout(
    batch: Any, expected: BatchInfo = BatchInfo(), seen: EarlierBatches | None = None
) -> tuple[int, Layout] | None:
    """Find the samples of a batch.

    Args:
        batch: any tree.
        expected: what is known about the batch from its dataloader.
        seen: findings about earlier batches; this batch adds to them.
    Returns:
        The number of samples, and how they are split; None if nothing in the batch can be split.
    Raises:
        BatchError: tensors disagree about the number of samples, a list or a tensor may be read in two ways, or an
            object may hold samples that cannot be taken out. The message names the leaves.
    """
    seen = EarlierBatches() if seen is None else seen
    if seen.refusal is not None:
        raise BatchError(seen.refusal)
    try:
        return _found(batch, expected, seen)
    except BatchError as error:
        seen.refusal = None if seen.began else str(error)
        raise
    finally:
        seen.began = True


def _found(batch: Any, expected: BatchInfo, seen: EarlierBatches) -> tuple[int, Layout] | None:
    found: dict[int, tuple[Layout, dict[str, bool]]] = {}
    refusals = []
    for n in _candidates(batch, expected.size):
        reader = _Reader(n, expected, seen)
        try:
            read = reader.read(batch, "batch")
        except BatchError as refusal:
            refusals.append(refusal)
            continue
        if read.divides:
            found[n] = read, reader.lists
            if n == expected.size:
                break
    if not found:
        opaque = next(((name, leaf) for name, leaf in _leaves(batch) if _kind(leaf) == "opaque"), None)
        if opaque is not None:
            raise _unknown(*opaque)
        if not refusals:
            return None
        raise next((r for r in refusals if isinstance(r, _Ambiguity)), _disagreement(batch, expected.size))
    n = next(iter(found)) if len(found) == 1 else _chosen(batch, list(found), expected.size)
    read, lists = found[n]
    ends = list(read.ends(batch, "batch"))
    as_stacked = expected.stacked and (n == expected.size or not expected.changed)
    if expected.size is not None and expected.size > 1 and not (as_stacked or seen.settled):
        _check_first_dimension(batch, [part for kind, _, part in ends if kind == "split"], expected.size)
    seen.lists.update(lists)
    for kind, name, part in ends:  # what may hold samples must not be repeated for all micro-batches
        is_opaque = kind == "repeat" and _kind(part) == "opaque"
        if is_opaque and not (_is_labels(part) and seen.lists.get(name) is False):
            raise _unknown(name, part)
    seen.settled |= n == expected.size
    return n, read


class _Ambiguity(BatchError):
    """An error for a batch that can be read in two ways."""


class _Reader:
    """A reader of a batch under the assumption that it has n samples."""

    def __init__(self, n: int, expected: BatchInfo, seen: EarlierBatches) -> None:
        self._n = n
        self._expected = expected
        self._seen = seen
        self.lists: dict[str, bool] = {}

    def read(self, node: Any, name: str) -> Layout:
        """Return how a part of the batch is split.

        Raises:
            BatchError: it does not hold n samples, or is ambiguous.
        """
        kind = _kind(node)
        if kind == "array":
            return self._read_array(node, name)
        if kind == "container":
            return self._read_list(node, name) if type(node) in (list, tuple) else self._inside(node, name)
        if _is_labels(node) and len(node) != self._n:
            self.lists[name] = False
        return Layout("repeat")

    def _read_array(self, array: Any, name: str) -> Layout:
        if array.ndim == 0:
            return Layout("repeat")
        if array.shape[0] == self._n:
            return Layout("split")
        shared = array.shape[0] == 1 and self._expected.size is not None
        if shared and not (array.ndim > 1 and array.shape[1] == self._n):  # it is broadcast over the samples
            return Layout("repeat")
        raise BatchError(f"{name} {tuple(array.shape)}")

    def _read_list(self, node: Any, name: str) -> Layout:
        n = self._n
        known = False if self._expected.stacked else self._seen.lists.get(name)
        if len(node) != n or not node:
            if known is True:
                raise BatchError(f"{name} has {len(node)} elements")
            return self._inside(node, name)
        if not _arrays(node):
            if n > 1 and _may_be_columns(node):
                raise _rows_or_columns(node, name, n)
            return Layout("split")
        inside, refusal = None, None
        if known is not True:
            try:
                inside = self._inside(node, name)
            except BatchError as error:
                refusal = error
        alike = _alike(node)
        if inside is not None and (inside.divides or known is False) and not (alike and known is None and n > 1):
            return inside
        if inside is not None and inside.divides:
            raise _Ambiguity(
                f"{name} is a {type(node).__name__} of {n} elements with {n} entries each, which may be one per "
                f"sample, or tensors over {n} samples. To say how it is split, {WAY_OUT}"
            )
        record = known is None and self._expected.size is None and name == "batch" and n <= _RECORD
        if known is False or record or not (alike or known or n == self._expected.size):
            raise refusal or BatchError(f"{name} has elements of several kinds")
        self.lists[name] = True
        return Layout("split")

    def _inside(self, node: Any, name: str) -> Layout:
        children = tree.named_children(node, name)
        if type(node) in (list, tuple) and _arrays(node):
            self.lists[name] = False
        return Layout("inside", tuple(self.read(child, below) for below, child in children))


# -- which size ------------------------------------------------------------------------------------------------------


def _candidates(batch: Any, size: int | None) -> list[int]:
    """Return possible numbers of samples: the dataloader's, if known, then (smaller) lengths, the largest first."""
    if not _arrays(batch):
        sizes = {len(column) for column in _columns(batch)}
        return [size] if size in sizes else list(sizes) if len(sizes) == 1 else []
    sizes = set(_sizes(batch))
    if size is None:
        return sorted(sizes, reverse=True)
    return [size, *sorted((n for n in sizes if n < size), reverse=True)]


def _sizes(node: Any) -> Iterator[int]:
    kind = _kind(node)
    if kind == "array" and node.ndim > 0:
        yield int(node.shape[0])
    elif kind == "container":
        if type(node) in (list, tuple) and node and _arrays(node):
            yield len(node)
        for _, child in tree.named_children(node, ""):
            yield from _sizes(child)


def _columns(batch: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists of a batch without tensors, and its tuples without containers, which may hold one per sample.

    ``["a", "b"]`` and ``[("a", 0), ("b", 1)]`` are two samples. ``(("a", "b"), (0, 1))`` are two columns, as
    ``zip(*samples)`` makes them.
    """
    below, spec = tree.children(batch)
    if spec.is_leaf():
        return
    if type(batch) is list or (type(batch) is tuple and all(tree.children(child)[1].is_leaf() for child in batch)):
        if batch:
            yield batch
        return
    for child in below:
        yield from _columns(child)


def _chosen(batch: Any, sizes: Sequence[int], size: int | None) -> int:
    """Choose one of several possible sizes: if all tensors agree, a short list around them counts as a record."""
    agreed = {int(tensor.shape[0]) for _, tensor in _arrays(batch)}
    if len(agreed) == 1 and type(batch) in (list, tuple) and len(batch) <= _RECORD:
        (n,) = agreed
        flat = all(tensor.ndim < 3 for _, tensor in _arrays(batch))
        if set(sizes) <= {n, len(batch)} and (flat or (type(batch) is tuple and size is None)):
            return n
    readings = " or ".join(map(str, sorted(sizes)))
    raise _Ambiguity(
        f"the batch may hold {readings} samples: {_sizes_by_name(batch)}, and "
        f"{'its dataloader does not say' if size is None else f'its dataloader makes batches of up to {size}'}. To say "
        f"how it is split, {WAY_OUT}"
    )


def _check_first_dimension(batch: Any, split: Sequence[Any], size: int) -> None:
    """Check that tensors are not time-major: that not all of them have the dataloader's batch size in dimension 1."""
    if all(isinstance(part, (Tensor, np.ndarray)) and part.ndim > 1 and part.shape[1] == size for part in split):
        raise _Ambiguity(
            f"the dataloader makes batches of {size} samples, and all tensors have {size} entries in their second "
            f"dimension: {_sizes_by_name(batch)}. They seem to hold samples there (time first); only dimension 0 can "
            f"be split. Put the samples first, or {WAY_OUT}"
        )


# -- leaves ----------------------------------------------------------------------------------------------------------


def _kind(node: Any) -> Literal["array", "constant", "container", "opaque"]:
    """Return the kind of a node of a batch.

    A leaf is opaque if it may hold samples that cannot be taken out: a packed, nested or sparse tensor, or an object.
    """
    if isinstance(node, (Tensor, np.ndarray)):
        return "array" if isinstance(node, np.ndarray) or is_strided(node) else "opaque"
    if isinstance(node, _CONSTANTS) or (callable(node) and hasattr(node, "__name__")):
        return "constant"
    if type(node) in (list, tuple, dict):
        return "container"
    return "opaque" if isinstance(node, PackedSequence) or tree.children(node)[1].is_leaf() else "container"


def _is_labels(node: Any) -> bool:
    """Return whether a leaf is a one-dimensional array-like, such as a pandas index, which may hold the samples."""
    return hasattr(node, "__array__") and not isinstance(node, Tensor) and len(getattr(node, "shape", ())) == 1


def _leaves(node: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    if _kind(node) != "container":
        yield name, node
        return
    for below, child in tree.named_children(node, name):
        yield from _leaves(child, below)


def _arrays(batch: Any) -> list[tuple[str, Any]]:
    """Return ``(name, array)`` of all tensors and arrays that have dimensions."""
    return [(name, leaf) for name, leaf in _leaves(batch) if _kind(leaf) == "array" and leaf.ndim > 0]


def _alike(elements: Sequence[Any]) -> bool:
    """Return whether elements look like samples: they have one structure, and tensors of the same dtypes and ranks."""
    kinds = set()
    for element in elements:
        leaves, spec = tree.flatten(element)
        tensors = tuple((t.dtype, t.ndim) if isinstance(t, (Tensor, np.ndarray)) else type(t) for t in leaves)
        kinds.add((str(spec), tensors))
    return len(kinds) == 1


def is_plain_list(node: Any, length: int) -> bool:
    """Return whether a node is a list or tuple of this length without tensors."""
    return type(node) in (list, tuple) and len(node) == length > 0 and not tree.tensors(node)


def is_square(plain_list: Any) -> bool:
    """Return whether all elements are lists or tuples as long as the list itself, so that rows look like columns."""
    return len(plain_list) > 1 and all(is_plain_list(element, len(plain_list)) for element in plain_list)


def _may_be_columns(leaf: Any) -> bool:
    """Return whether a square list may hold rows or columns.

    A list of lists is read as rows, one list per sample (tokens, boxes). A list of tuples may be rows or what
    ``default_collate`` makes of strings, and a tuple of either may come from ``zip(*samples)``.
    """
    return is_square(leaf) and (type(leaf) is tuple or any(type(element) is tuple for element in leaf))


# -- messages --------------------------------------------------------------------------------------------------------


def _rows_or_columns(leaf: Any, name: str, total: int) -> BatchError:
    return _Ambiguity(
        f"{name} in a batch of {total} samples holds {total} sequences of length {total}, which may be one per sample "
        f"or {total} columns over the samples: {_shortened(leaf)}. To say how it is split, {WAY_OUT}"
    )


def _disagreement(batch: Any, size: int | None) -> BatchError:
    known = "" if size is None else f", which its dataloader makes of {size}"
    return BatchError(
        f"the tensors of the batch{known} disagree about the number of samples: {_sizes_by_name(batch)}. Every tensor "
        "with dimensions needs the samples in dimension 0 to be split into micro-batches, or must be in a list with "
        f"one element per sample; if yours has not, {WAY_OUT}"
    )


def _unknown(name: str, leaf: Any) -> BatchError:
    return BatchError(
        f"{name} is a {type(leaf).__name__}, of which it is not known how to take samples out; {WAY_OUT}, or use "
        "num_microbatches=1"
    )


def _sizes_by_name(batch: Any) -> str:
    """Return a text with a few leaves of each size: ``8 in batch['x'] (8, 3); 7 in batch['y'] (7,)``."""
    by_size: dict[int, list[str]] = {}
    for name, leaf in _arrays(batch):
        by_size.setdefault(int(leaf.shape[0]), []).append(f"{name} {tuple(leaf.shape)}")
    return "; ".join(f"{size} in {listed(names, _NAMES_PER_SIZE)}" for size, names in by_size.items())


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

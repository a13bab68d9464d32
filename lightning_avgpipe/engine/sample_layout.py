"""Layout: where the samples of a batch are, in dimension 0 of its tensors or one by one in its lists.

::

    (Tensor[8, 3], Tensor[8])                      8 samples: both tensors are split
    (8 x Tensor[3, h, w], 8 x {"boxes": ...})      8 samples: both lists are split
    {"ids": Tensor[8, t], "positions": [1, t]}     8 samples, if the dataloader says so: the second one is repeated
    (Tensor[t, 8, f], Tensor[t, 8])                refused: the dataloader makes batches of 8 samples

What the dataloader knows of the size of its batches comes first. Without that, the leaves must agree.
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
_NAMES_PER_SIZE = 4
_RECORD = 3  # elements of a list of tensors that is rather a record (input, target, weight) than a list of samples
# the same for all samples, whatever they are; anything else that is no container may hold samples
_CONSTANTS = (
    *(NoneType, bool, int, float, complex, str, bytes, Enum, type, np.generic, torch.dtype, torch.device, torch.Size),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, range, slice),
)


@dataclass(frozen=True)
class Expected:
    """What a dataloader says of its batches.

    Attributes:
        size: samples of a batch, of which some may have fewer; None if it does not say.
        stacked: whether samples were put into dimension 0 of every tensor, by torch's own collation.
        changed: whether the user's hooks may have changed them since.
    """

    size: int | None = None
    stacked: bool = False
    changed: bool = False


@dataclass
class Seen:
    """What batches of the same source have shown so far, which decides where a later one has two readings.

    Attributes:
        lists: name -> whether the list holds one element per sample.
        settled: whether a whole batch had its samples in dimension 0, and could not have had them in another.
        refusal: why the first batch could not be split. Later ones may look as if they could.
    """

    lists: dict[str, bool] = field(default_factory=dict)
    settled: bool = False
    refusal: str | None = None
    began: bool = False


@dataclass(frozen=True)
class Layout:
    """How a batch, or a part of one, is split.

    Attributes:
        kind: split along dimension 0 or element by element, repeated for all parts, or a container of both.
        below: of a container, what its children are.
    """

    kind: Literal["split", "repeat", "inside"]
    below: tuple[Layout, ...] = ()

    def parts(self, node: Any, sizes: Sequence[int]) -> list[Any]:
        """Parts of so many samples."""
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

    def split(self, node: Any) -> Iterator[Any]:
        """What is split of a batch."""
        if self.kind == "split":
            yield node
        elif self.kind == "inside":
            for layout, child in zip(self.below, tree.children(node)[0], strict=True):
                yield from layout.split(child)

    @property
    def divides(self) -> bool:
        """Whether something is split."""
        return self.kind == "split" or any(layout.divides for layout in self.below)


def layout(batch: Any, expected: Expected = Expected(), seen: Seen | None = None) -> tuple[int, Layout] | None:
    """Find the samples of a batch.

    Args:
        batch: any tree.
        expected: of its dataloader.
        seen: in batches before; this one adds to it.
    Returns:
        The number of samples, and how they are split; None if there is nothing that may hold samples.
    Raises:
        BatchError: tensors disagree about the number of samples, a list or a tensor may be read in two ways, or there
            is an object of which nothing is known. Names the leaves.
    """
    seen = Seen() if seen is None else seen
    if seen.refusal is not None:
        raise BatchError(seen.refusal)
    try:
        return _found(batch, expected, seen)
    except BatchError as error:
        seen.refusal = None if seen.began else str(error)
        raise
    finally:
        seen.began = True


def _found(batch: Any, expected: Expected, seen: Seen) -> tuple[int, Layout] | None:
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
        opaque = next(((name, leaf) for name, leaf in _leaves(batch) if _is_opaque(leaf)), None)
        if opaque is not None:
            raise _unknown(*opaque)
        if not refusals:
            return None
        raise next((r for r in refusals if isinstance(r, _Ambiguity)), _disagreement(batch, expected.size))
    n = next(iter(found)) if len(found) == 1 else _chosen(batch, list(found), expected.size)
    read, lists = found[n]
    as_stacked = expected.stacked and (n == expected.size or not expected.changed)
    if expected.size is not None and expected.size > 1 and not (as_stacked or seen.settled):
        _check_first_dimension(batch, read, expected.size)
    seen.lists.update(lists)
    _check_repeated(batch, read, "batch", seen)
    seen.settled |= n == expected.size
    return n, read


class _Ambiguity(BatchError):
    """Two readings."""


class _Reader:
    """Reads a batch as one of n samples."""

    def __init__(self, n: int, expected: Expected, seen: Seen) -> None:
        self._n = n
        self._expected = expected
        self._seen = seen
        self.lists: dict[str, bool] = {}

    def read(self, node: Any, name: str) -> Layout:
        """How a part of the batch is split.

        Raises:
            BatchError: it is no part of n samples, or it is in two ways.
        """
        if isinstance(node, (Tensor, np.ndarray)):
            return self._read_array(node, name)
        if type(node) in (list, tuple):
            return self._read_list(node, name)
        if _is_constant(node) or _is_opaque(node):
            if _is_labels(node) and len(node) != self._n:
                self.lists[name] = False
            return Layout("repeat")
        return self._inside(node, name)

    def _read_array(self, array: Any, name: str) -> Layout:
        if isinstance(array, Tensor) and _is_opaque(array):
            return Layout("repeat")
        if array.ndim == 0:
            return Layout("repeat")
        if array.shape[0] == self._n:
            return Layout("split")
        shared = array.shape[0] == 1 and self._expected.size is not None
        if shared and not (array.ndim > 1 and array.shape[1] == self._n):  # broadcast over the samples
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
    """Sizes that a batch may have: the dataloader's, or those of dimension 0 and of lists, the largest first."""
    if not _arrays(batch):
        sizes = {len(column) for column in _columns(batch)}
        return [size] if size in sizes else list(sizes) if len(sizes) == 1 else []
    sizes = set(_sizes(batch))
    if size is None:
        return sorted(sizes, reverse=True)
    return [size, *sorted((n for n in sizes if n < size), reverse=True)]


def _sizes(node: Any) -> Iterator[int]:
    if isinstance(node, (Tensor, np.ndarray)):
        if not _is_opaque(node) and node.ndim > 0:
            yield int(node.shape[0])
    elif not (_is_constant(node) or _is_opaque(node)):
        if type(node) in (list, tuple) and node and _arrays(node):
            yield len(node)
        for _, child in tree.named_children(node, ""):
            yield from _sizes(child)


def _columns(batch: Any) -> Iterator[Sequence[Any]]:
    """Find the plain lists of a batch without tensors, and tuples that contain no further lists, tuples or dicts.

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
    """One of several possible sizes: where tensors agree, a short list around them is taken for a record."""
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


def _check_first_dimension(batch: Any, read: Layout, size: int) -> None:
    """Where all that is split are tensors with the dataloader's size in dimension 1, they may be time-major."""
    if all(
        isinstance(node, (Tensor, np.ndarray)) and node.ndim > 1 and node.shape[1] == size for node in read.split(batch)
    ):
        raise _Ambiguity(
            f"the dataloader makes batches of {size} samples, and all tensors have {size} entries in their second "
            f"dimension: {_sizes_by_name(batch)}. They seem to hold samples there (time first); only dimension 0 can "
            f"be split. Put the samples first, or {WAY_OUT}"
        )


def _check_repeated(batch: Any, read: Layout, name: str, seen: Seen) -> None:
    """What nobody knows must be in a list of samples, not beside it."""
    if read.kind == "inside":
        for layout_, (below, child) in zip(read.below, tree.named_children(batch, name), strict=True):
            _check_repeated(child, layout_, below, seen)
    elif read.kind == "repeat" and _is_opaque(batch) and not (_is_labels(batch) and seen.lists.get(name) is False):
        raise _unknown(name, batch)


# -- leaves ----------------------------------------------------------------------------------------------------------


def _is_constant(node: Any) -> bool:
    return isinstance(node, _CONSTANTS) or (callable(node) and hasattr(node, "__name__"))


def _is_opaque(node: Any) -> bool:
    """Whether it may hold samples that cannot be taken out: packed, nested and sparse tensors, graphs, any object."""
    if isinstance(node, PackedSequence):
        return True
    if isinstance(node, Tensor):
        return not is_strided(node)
    if isinstance(node, np.ndarray) or _is_constant(node) or type(node) in (list, tuple, dict):
        return False
    return tree.children(node)[1].is_leaf()


def _is_labels(node: Any) -> bool:
    """Whether it is a row of anything, such as an index of pandas. As long as the batch it may hold samples."""
    return hasattr(node, "__array__") and not isinstance(node, Tensor) and len(getattr(node, "shape", ())) == 1


def _leaves(node: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    if isinstance(node, (Tensor, np.ndarray)) or _is_constant(node) or _is_opaque(node):
        yield name, node
        return
    for below, child in tree.named_children(node, name):
        yield from _leaves(child, below)


def _arrays(batch: Any) -> list[tuple[str, Any]]:
    """Arrays with dimensions."""
    found = ((name, leaf) for name, leaf in _leaves(batch) if isinstance(leaf, (Tensor, np.ndarray)))
    return [(name, leaf) for name, leaf in found if not _is_opaque(leaf) and leaf.ndim > 0]


def _alike(elements: Sequence[Any]) -> bool:
    """Whether elements may be samples of one kind: the same structure, tensors of the same type."""
    kinds = set()
    for element in elements:
        leaves, spec = tree.flatten(element)
        tensors = tuple((t.dtype, t.ndim) if isinstance(t, (Tensor, np.ndarray)) else type(t) for t in leaves)
        kinds.add((str(spec), tensors))
    return len(kinds) == 1


def is_plain_list(node: Any, length: int) -> bool:
    """Whether it is a list or tuple of so many elements without tensors."""
    return type(node) in (list, tuple) and len(node) == length > 0 and not tree.tensors(node)


def is_square(plain_list: Any) -> bool:
    """Whether all elements are lists or tuples that are as long as the whole: rows look like columns."""
    return len(plain_list) > 1 and all(is_plain_list(element, len(plain_list)) for element in plain_list)


def _may_be_columns(leaf: Any) -> bool:
    """Whether a square may be rows or columns.

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
    """``8 in batch['x'] (8, 3); 7 in batch['y'] (7,)``: a few leaves of each size."""
    by_size: dict[int, list[str]] = {}
    for name, leaf in _arrays(batch):
        by_size.setdefault(int(leaf.shape[0]), []).append(f"{name} {tuple(leaf.shape)}")
    return "; ".join(f"{size} in {listed(names, _NAMES_PER_SIZE)}" for size, names in by_size.items())


def _shortened(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

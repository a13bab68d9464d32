"""Split a batch into micro-batches, and merge the results of the micro-batches into the result of the batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_avgpipe.engine.sample_layout import BatchInfo, EarlierBatches, is_square, layout
from lightning_avgpipe.errors import BatchError
from lightning_avgpipe.utils import tree


@dataclass(frozen=True)
class MicroBatch:
    """One part of a batch.

    Attributes:
        index: index i of the part, in the order of the samples.
        data: the samples, in a batch that the step function gets.
        size: number of samples.
        weight: weight in the mean over the batch, by default its share of the samples. The weights of a batch sum to 1,
            those of the N shares of a batch (:func:`divided`) to N in total.
        count: weight in a mean, in any unit, such as a number of targets; None: ``size``.
    """

    index: int
    data: Any
    size: int
    weight: float
    count: float | None = None

    @property
    def mean_weight(self) -> float:
        """The weight in a mean, in any unit."""
        return self.size if self.count is None else self.count


def split(
    batch: Any,
    num_microbatches: int,
    expected: BatchInfo = BatchInfo(),  # noqa: B008
    seen: EarlierBatches | None = None,
    smallest: int = 1,
) -> list[MicroBatch]:
    """Split a batch into micro-batches of about equal size, in order.

    Sizes are those of ``torch.tensor_split``, and tensors become views. A list or tuple that has one element per sample
    (texts, file names, images, targets) is split as well; of nested ones, the outermost. Everything else is repeated:
    numbers, strings, 0-dim tensors, None, and plain lists and labels of other lengths. Each micro-batch has containers
    of its own, so a step function may ``pop`` from its batch.

    Args:
        batch: any tree.
        num_microbatches: M >= 1.
        expected: what is known about batches from their dataloader.
        seen: findings about earlier batches of the same source; this batch adds to them.
        smallest: fewest samples of a micro-batch; a smaller batch is not split.
    Returns:
        min(M, samples // smallest) micro-batches, so none is empty unless the batch is; one if there is nothing to
        split.
    Raises:
        BatchError: M > 1 and the samples of the batch cannot be found, see :func:`layout`.
    """
    if num_microbatches == 1:
        return as_one(batch, expected)
    found = layout(batch, expected, seen)
    if found is None:
        return as_one(batch, expected)
    total, read = found
    count = max(1, min(num_microbatches, total // smallest))
    sizes = [total // count + (i < total % count) for i in range(count)]
    return _micro_batches(read.parts(batch, sizes), sizes)


def fewest_samples(module: nn.Module) -> int:
    """Return the fewest samples of a micro-batch that can train: 2 with batch normalisation, which needs statistics."""
    return 2 if any(isinstance(m, _BatchNorm) and m.training for m in module.modules()) else 1


def as_one(batch: Any, expected: BatchInfo = BatchInfo()) -> list[MicroBatch]:  # noqa: B008
    """Return the batch as one micro-batch. If samples cannot be found, they are counted by the first tensor, as in
    Lightning.
    """
    size = _num_samples(batch, expected)
    if size is None:
        size = next((len(tensor) for tensor in tree.tensors(batch) if not tensor.is_nested and tensor.ndim > 0), 1)
    return [MicroBatch(0, _distinct(tree.map_tensors(lambda tensor: tensor, batch)), size, 1.0)]


def split_with(splitter: Callable[[Any, int], Sequence[Any]], batch: Any, num_microbatches: int) -> list[MicroBatch]:
    """Split a batch by the user's function.

    Args:
        splitter: ``(batch, num_microbatches) -> list`` of one to ``num_microbatches`` smaller batches.
        batch: batch in a form that ``splitter`` accepts.
        num_microbatches: M >= 1.
    Returns:
        The parts, weighted by their numbers of samples; or equally, with size 1, if these are unknown for any part.
    Raises:
        BatchError: ``splitter`` returned something else.
    """
    parts = splitter(batch, num_microbatches)
    if not isinstance(parts, (list, tuple)):
        raise BatchError(
            f"split_batch returned {type(parts).__name__}; it must return a list of at most "
            f"num_microbatches={num_microbatches} smaller batches"
        )
    if not 1 <= len(parts) <= num_microbatches:
        raise BatchError(
            f"split_batch returned {len(parts)} micro-batches; it must return at least 1 and at most "
            f"num_microbatches={num_microbatches}"
        )
    sizes = [_num_samples(part) for part in parts]
    known = [size for size in sizes if size is not None]
    return _micro_batches(parts, known if len(known) == len(parts) else [1] * len(parts))


def merge(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None = None) -> Any:
    """Merge what a step function returned for each micro-batch into the result of the batch.

    Containers of the same structure are merged child by child, each by the first of these rules that fits all parts:

    ================================================================  =========================================
    only one part; None in all parts                                  that part; None
    lists or tuples with one element per sample                       joined
    tensors whose dimension 0 is the micro-batch                      ``torch.cat``
    0-dim floating tensors; Python floats                             mean by ``weights``, same dtype
    equal in all parts (integers, strings, tensors of other shapes)   that value
    anything else, and containers of different structures             list of the parts
    ================================================================  =========================================

    A list is taken to have one element per sample if its length is the size of each micro-batch, unless it may as well
    be a record (``return texts, labels``): see :func:`_are_samples`.

    Args:
        outputs: one per micro-batch, in order.
        sizes: number of samples of each micro-batch.
        weights: weights of the micro-batches in a mean; None: their sizes.
    """
    if all(output is None for output in outputs):
        return None
    if len(outputs) == 1:
        return outputs[0]
    return _merge(outputs, sizes, sizes if weights is None else weights)


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape and dtype."""
    if len(tensors) == 1:
        return tensors[0]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision sums would lose digits
    total: Tensor = _mean([tensor.to(wide) for tensor in tensors], weights)
    return total.to(tensors[0].dtype)


# -- splitting -------------------------------------------------------------------------------------------------------


def _num_samples(batch: Any, expected: BatchInfo = BatchInfo()) -> int | None:  # noqa: B008
    """Return the number of samples of a batch; None if it has none or they cannot be found."""
    try:
        found = layout(batch, expected)
    except BatchError:
        return None
    return None if found is None else found[0]


def _distinct(batch: Any) -> Any:
    """Return a batch in which no tensor object occurs twice, as none does in a batch from another process."""
    tensors = tree.tensors(batch)
    if len({*map(id, tensors)}) == len(tensors):
        return batch
    seen: set[int] = set()

    def once(tensor: Tensor) -> Tensor:
        is_new = id(tensor) not in seen
        seen.add(id(tensor))
        return tensor if is_new else tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()

    return tree.map_tensors(once, batch)


def _micro_batches(parts: Sequence[Any], sizes: Sequence[int]) -> list[MicroBatch]:
    shares = sizes if sum(sizes) else [1] * len(sizes)  # no sample at all: equal weights
    total = sum(shares)
    return [
        MicroBatch(i, _distinct(part), size, share / total)
        for i, (part, size, share) in enumerate(zip(parts, sizes, shares, strict=True))
    ]


def divided(parts: Sequence[MicroBatch], count: int) -> list[list[MicroBatch]]:
    """Divide the micro-batches of a batch into shares of about equal number, in order.

    Returns:
        min(count, micro-batches) shares, whose weights are scaled so that the mean over shares of the weighted sum of
        each is the weighted sum over the batch.
    """
    count = min(count, len(parts))
    few, more = divmod(len(parts), count)
    rest = iter(parts)
    shares = [islice(rest, few + (n < more)) for n in range(count)]
    return [[replace(part, index=i, weight=count * part.weight) for i, part in enumerate(share)] for share in shares]


# -- merging ---------------------------------------------------------------------------------------------------------


def _merge(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if _are_samples(parts, sizes):
        return type(parts[0])(chain.from_iterable(parts))
    below, specs = zip(*(tree.children(part) for part in parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        return list(parts)
    if specs[0].is_leaf():
        return _merge_leaves(parts, sizes, weights)
    return tree.unflatten([_merge(values, sizes, weights) for values in zip(*below, strict=True)], specs[0])


def _are_samples(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether lists or tuples hold one element per sample, and are no records of what holds for all samples.

    If all micro-batches have the same size, a list that is by chance as long may be a record. With tensors it counts as
    one if its elements differ in kind, or if each may hold a micro-batch (``[predictions, targets]``) or is the same in
    all parts. So does a tuple in which an element may be no sample: a list of this length, or something with tensors
    without dimensions only (``return predictions, {"loss": loss}``).
    """
    cls = type(parts[0])
    if cls not in (list, tuple) or any(type(part) is not cls for part in parts):
        return False
    if not all(len(part) == size > 0 for part, size in zip(parts, sizes, strict=True)):
        return False
    if not tree.tensors(parts):
        return not (cls is tuple and all(map(is_square, parts)))
    if len(set(sizes)) > 1:  # a record would have the same length in each
        return True
    if not all(map(_are_of_one_kind, parts)):
        return False
    columns, size = list(zip(*parts, strict=True)), sizes[0]
    if cls is tuple and any(all(_may_be_result(element, size) for element in column) for column in columns):
        return False
    batches = [all(_may_be_batch(element, size) for element in column) for column in columns]
    shared = (all(_equal(column[0], element) for element in column) for column in columns)
    return not any(batches) or not all(map(operator.or_, batches, shared))


def _are_of_one_kind(elements: Sequence[Any]) -> bool:
    return len({(e.dtype, e.ndim) if isinstance(e, Tensor) else type(e) for e in elements if e is not None}) <= 1


def _may_be_batch(element: Any, size: int) -> bool:
    """Return whether an element may hold all samples of a micro-batch: in dimension 0 of each of its tensors."""
    leaves = tree.leaves(element)
    if any(isinstance(leaf, (int, float, str)) for leaf in leaves):
        return False
    return all(leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves if isinstance(leaf, Tensor))


def _may_be_result(element: Any, size: int) -> bool:
    """Return whether an element of a tuple is as long as a micro-batch, or has tensors without dimensions only."""
    if type(element) in (list, tuple) and len(element) == size:
        return True
    found = tree.tensors(element)
    return bool(found) and all(tensor.ndim == 0 for tensor in found)


def _merge_leaves(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        if _can_be_joined(parts, sizes):
            return torch.cat(tuple(parts))
        if all(part.ndim == 0 and part.dtype == first.dtype and _is_inexact(part) for part in parts):
            return mean(parts, weights)
    elif all(isinstance(part, float) for part in parts):
        return _mean(parts, weights)
    return first if all(_equal(first, part) for part in parts[1:]) else list(parts)


def _can_be_joined(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    kinds = {(part.shape[1:], part.dtype, part.device) for part in parts}  # padded texts may differ in length
    return len(kinds) == 1 and all(part.ndim > 0 and part.shape[0] == n for part, n in zip(parts, sizes, strict=True))


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mean(values: Sequence[Any], sizes: Sequence[float]) -> Any:
    """Return a weighted mean; weights are Python numbers, so nothing is copied, and parts of weight 0 may be NaN."""
    weights = sizes if sum(sizes) else [1] * len(sizes)
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in pairs) / sum(weights)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:  # an array, or another type whose == gives no bool
        return False

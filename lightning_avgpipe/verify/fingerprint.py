"""Fingerprints: a few numbers of a tensor, from which another process finds whether its tensor is equal or close."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.utils.tensors import digest, strided_parts

_CHUNK = 1 << 20  # elements that are converted at a time
_ODD, _SIGNS = 0x9E3779B1, 0x85EBCA6B  # multipliers that spread numbers over all bits
_ROUNDINGS = 100  # machine epsilons by which sums in another order may differ, relative to their norm
_COARSEST = 0.05  # largest such tolerance
_SHOWN = 60  # most characters of a value in a message


@dataclass(frozen=True)
class Fingerprint:
    """A few numbers that represent a tensor. Fingerprints of equal tensors are equal, even if their norms are NaN.

    Attributes:
        shape: shape of the tensor.
        dtype: type of its elements, as text.
        digest: a hash of 64 bits of all elements.
        norm: the Euclidean norm; 0 for integers.
        projection: the sum of the elements, each with a sign that depends on its position; 0 for integers.
        rounding: largest expected difference, relative to the norm, if a sum was made in another order.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int
    norm: float = field(compare=False)
    projection: float = field(compare=False)
    rounding: float = field(compare=False)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any layout. Zeros of both signs count as equal, and so do all NaN."""
    tensor = tensor.detach()
    shape, dtype, rounding = tuple(tensor.shape), str(tensor.dtype), _rounding(tensor)
    bits, squares, projection = 0, 0.0, 0.0
    for part in _strided(tensor):
        for chunk in part.reshape(-1).split(_CHUNK):
            if chunk.is_floating_point():
                wide = chunk.double()
                squares += float(wide.square().sum())
                projection += float((wide * _signs(chunk)).sum())
                chunk = (chunk + 0).masked_fill(chunk != chunk, math.nan) if chunk.itemsize > 1 else chunk
            bits = (bits * _ODD + int(digest(chunk))) % (1 << 64)
    return Fingerprint(shape, dtype, bits, math.sqrt(squares), projection, rounding)


def _strided(tensor: Tensor) -> list[Tensor]:
    """Return the dense, real-valued tensors that a tensor consists of."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    parts = strided_parts(tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor)
    real = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
    return [part.to(torch.uint8) if part.dtype == torch.bool else part for part in real]


def _signs(chunk: Tensor) -> Tensor:
    return ((torch.arange(chunk.numel(), device=chunk.device) * _SIGNS >> 16) & 1).double() * 2 - 1


def _rounding(tensor: Tensor) -> float:
    kind = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32
    return min(_ROUNDINGS * torch.finfo(kind).eps, _COARSEST)


@dataclass(frozen=True)
class Difference:
    """A result of a pipeline that differs from that of a plain run.

    Attributes:
        kind: kind of the result, such as "the loss" or "the gradient".
        name: name of the tensor, or of the place where the difference was found.
        size: description of how much the two differ.
    """

    kind: str
    name: str
    size: str

    def __str__(self) -> str:
        return f"{self.kind} of '{self.name}': {self.size}" if self.name else f"{self.kind}: {self.size}"


def usual_size(fingerprints: Iterable[Fingerprint | None]) -> float:
    """Return the root mean square of the elements of all tensors."""
    known = [f for f in fingerprints if f is not None]
    count = sum(math.prod(f.shape) for f in known)
    size = math.sqrt(math.fsum(f.norm**2 for f in known) / max(1, count))
    return size if math.isfinite(size) else 0.0


def distance(one: Mapping[str, Fingerprint | None], other: Mapping[str, Fingerprint | None]) -> float:
    """Estimate, from projections, the distance between two sets of tensors, relative to the norm of ``other``."""
    pairs = [(f, g) for name, f in one.items() if f is not None and (g := other.get(name)) is not None]
    norm = math.hypot(*(g.norm for _, g in pairs))
    return math.hypot(*(f.projection - g.projection for f, g in pairs)) / norm if norm else 0.0


def differences(
    kind: str,
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    rounded: Callable[[str], bool] = lambda name: False,
    order: Iterable[str] = (),
    scale: float = 0.0,
) -> Iterator[Difference]:
    """Yield the entries that differ between a plain run and a pipeline.

    Entries are compared in the given order, then in the order of ``expected``.

    Args:
        kind: kind of the entries.
        expected: name -> a fingerprint, or a Python value, of the plain run.
        found: name -> a fingerprint, or a Python value, of the pipeline.
        rounded: returns for a name whether the entry is compared up to rounding; others are compared bit for bit.
        order: names that are compared first.
        scale: typical size of an element, since a sum whose terms nearly cancel is rounded as much as its terms.
    """
    for name in dict.fromkeys((*(n for n in order if n in expected or n in found), *expected, *found)):
        if name not in expected or name not in found:
            side = "the pipeline" if name in found else "the plain run"
            yield Difference(kind, name, f"it exists in {side} only")
        elif (size := how_different(expected[name], found[name], rounded(name), scale)) is not None:
            yield Difference(kind, name, size)


def how_different(expected: Any, found: Any, rounded: bool = False, scale: float = 0.0) -> str | None:
    """Describe how two values differ; None if they are equal, or as close as rounding explains."""
    if isinstance(expected, Fingerprint) and isinstance(found, Fingerprint):
        return _tensors(expected, found, rounded, scale)
    if isinstance(expected, float) and isinstance(found, float):
        same = expected == found or (math.isnan(expected) and math.isnan(found))
        if not same and rounded:
            same = math.isclose(expected, found, rel_tol=_ROUNDINGS * torch.finfo(torch.float32).eps)
    else:
        same = type(expected) is type(found) and bool(expected == found)
    return None if same else f"{_shown(found)}, and {_shown(expected)} in the plain run"


def _tensors(expected: Fingerprint, found: Fingerprint, rounded: bool, scale: float) -> str | None:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return f"{_shown(found)}, and {_shown(expected)} in the plain run"
    if expected.digest == found.digest:
        return None
    apart = max(abs(expected.norm - found.norm), abs(expected.projection - found.projection))
    if rounded and apart <= expected.rounding * max(expected.norm, scale * math.sqrt(math.prod(expected.shape))):
        return None
    if not expected.norm or not math.isfinite(apart / expected.norm):
        return f"its norm is {found.norm:.6g}, and {expected.norm:.6g} in the plain run"
    factor = found.norm / expected.norm
    multiple = abs(found.projection - factor * expected.projection) <= 1e-4 * found.norm and abs(factor - 1) > 1e-3
    if multiple:
        return f"it is {factor:.6g} times that of the plain run"
    return f"it differs by about {apart / expected.norm:.1g} of its norm"


def _shown(value: Any) -> str:
    if isinstance(value, Fingerprint):
        return f"a tensor of shape {value.shape} and type {value.dtype}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

"""Comparing by name what a pipeline and a plain run have: which is the first that differs, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.utils.tensors import is_strided, same_contents

_ROUNDINGS = 100  # of the type, relative to the norm, where the order of a sum is not that of one process
_COARSEST = 0.05


@dataclass(frozen=True)
class Difference:
    """Something that a pipeline has otherwise than a plain run.

    Attributes:
        kind: what it is: "the loss", "the gradient".
        name: of the tensor, or where it was found.
        size: by how much it differs, in words.
    """

    kind: str
    name: str
    size: str

    def __str__(self) -> str:
        return f"{self.kind} of '{self.name}': {self.size}" if self.name else f"{self.kind}: {self.size}"


def rounding(tensor: Tensor) -> float:
    """How far sums in another order may be apart, relative to their norm."""
    kind = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32
    return min(_ROUNDINGS * torch.finfo(kind).eps, _COARSEST)


def usual_size(tensors: Iterable[Tensor | None]) -> float:
    """The root of the mean square of all elements."""
    known = [t.detach() for t in tensors if t is not None and not t.is_sparse]
    squares = math.fsum(float(torch.linalg.vector_norm(t)) ** 2 for t in known)
    size = math.sqrt(squares / max(1, sum(t.numel() for t in known)))
    return size if math.isfinite(size) else 0.0


def first_difference(
    kind: str,
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    rounded: Callable[[str], bool] = lambda name: False,
    order: Iterable[str] = (),
    scale: float = 0.0,
) -> Difference | None:
    """The first entry that differs, in this order and then in that of ``expected``.

    Args:
        rounded: whether an entry is compared up to rounding, not bit for bit.
        scale: how large elements are as a rule: what nearly cancels is rounded as its terms were.
    """
    for name in dict.fromkeys((*(n for n in order if n in expected or n in found), *expected, *found)):
        if name not in expected or name not in found:
            side = "the pipeline" if name in found else "the plain run"
            return Difference(kind, name, f"it exists in {side} only")
        size = how_different(expected[name], found[name], rounded(name), scale)
        if size is not None:
            return Difference(kind, name, size)
    return None


def how_different(expected: Any, found: Any, rounded: bool = False, scale: float = 0.0) -> str | None:
    """In words; None if they are equal, or as near as rounding explains."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensors(expected, found.to(expected.device), rounded, scale)
    if isinstance(expected, float) and isinstance(found, float):
        same = expected == found or (math.isnan(expected) and math.isnan(found))
        if not same and rounded:
            same = math.isclose(expected, found, rel_tol=_ROUNDINGS * torch.finfo(torch.float32).eps)
        return None if same else f"{found!r}, and {expected!r} in the plain run"
    if type(expected) is not type(found):
        return f"{_shown(found)}, and {_shown(expected)} in the plain run"
    try:
        same = bool(expected == found)
    except Exception:  # an array, or another type whose == is no yes or no
        return None
    return None if same else f"{_shown(found)}, and {_shown(expected)} in the plain run"


def _tensors(expected: Tensor, found: Tensor, rounded: bool, scale: float) -> str | None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{_shown(found)}, and {_shown(expected)} in the plain run"
    if not (is_strided(expected) and is_strided(found)):
        if same_contents(expected, found):
            return None
        expected, found = expected.to_dense(), found.to_dense()
    if torch.equal(expected, found):
        return None
    differing = (expected != found) & ~((expected != expected) & (found != found))
    count = int(differing.sum())
    if count == 0:
        return None
    if expected.dtype == torch.bool or expected.is_quantized:
        return f"{count} of {expected.numel()} elements differ"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), found.to(wide)
    norm, apart = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(a - b))
    if rounded and apart <= rounding(expected) * max(norm, scale * math.sqrt(expected.numel())):
        return None
    relative = f", {apart / norm:.3g} of its norm" if norm and math.isfinite(apart / norm) else ""
    if expected.numel() == 1:
        return f"{_number(found)}, and {_number(expected)} in the plain run{relative}"
    return (
        f"{count} of {expected.numel()} elements differ, by up to {float((a - b).abs().max()):.3g}{relative}"
        f"{_factor(a, b)}"
    )


def _factor(expected: Tensor, found: Tensor) -> str:
    """Where one is a multiple of the other, the multiple: a weight, or a scale, is wrong."""
    square = (expected * expected.conj()).sum().real
    if not square > 0 or not torch.isfinite(square):
        return ""
    factor = float((expected.conj() * found).sum().real / square)
    remainder = torch.linalg.vector_norm(found - factor * expected)
    exact = remainder <= 1e-4 * torch.linalg.vector_norm(found)
    return f"; it is {factor:.6g} times that of the plain run" if exact and abs(factor - 1) > 1e-3 else ""


def _number(tensor: Tensor) -> str:
    return repr(tensor.reshape(()).item())


def _shown(value: Any, limit: int = 60) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

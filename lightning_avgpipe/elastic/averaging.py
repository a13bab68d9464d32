"""The averaging step on lists of tensors: the parallel models meet, and the reference moves.

::

    y_n                                   models after their own steps; of n that had no batch, unchanged
    ybar = mean_n y_n
    z'   = z + outer_lr * (ybar - z)      or what an outer optimizer makes of the gradient z - ybar
    x_n' = z' + (1 - alpha) * (y_n - ybar)

Whatever moves the reference, it stays the mean of the models: that of ``y_n - ybar`` is zero.

If only some of the N models had a batch, as at the end of an epoch, ``ybar - z`` is the sum of their updates over N.
The idle ones do not count, so it is taken times N over the number of the others. (A mean of the others' weights alone
would take their deviation from the reference for an update.)

With several groups of processes N counts the models of all of them: ``sum_n (y_n - z)`` is summed over the groups, and
everything else is the same everywhere, so all groups keep the same reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.runtime.siblings import Siblings

__all__ = ["Elasticity", "OuterOptimizer", "average", "average_with"]

# Makes the optimizer of the reference model from its parameters.
OuterOptimizer = Callable[[Iterable[Any]], Optimizer]

_CHUNK_BYTES = 64 * 1024**2  # of one model; what is computed on the way takes a few times as much memory


@dataclass(frozen=True)
class Elasticity:
    """How parallel models are held together; see the strategy's options of the same names."""

    alpha: float | None = None
    outer_lr: float | Literal["auto"] = "auto"
    outer_optimizer: OuterOptimizer | None = None
    average_every: int = 1

    def dilution(self, num_pipelines: int) -> float:
        """alpha for N pipelines."""
        return 1.0 / num_pipelines if self.alpha is None else self.alpha

    def rate(self, num_pipelines: int) -> float:
        """outer_lr for N pipelines. ``"auto"``: N, so that the reference moves by the sum of the updates."""
        return float(num_pipelines if self.outer_lr == "auto" else self.outer_lr)


@torch.no_grad()
def average(
    models: Sequence[Sequence[Tensor]],
    reference: Sequence[Tensor],
    alpha: float,
    outer_lr: float,
    active: int,
    siblings: Siblings | None = None,
) -> None:
    """Average in place.

    Args:
        models: N lists of tensors of the same shapes, after the local steps; of this group.
        reference: the mean of the models before those steps.
        alpha: how far a model goes to the mean, from 0 (not at all) to 1 (it becomes the reference).
        outer_lr: how far the reference goes, as a multiple of the mean update.
        active: models that had a batch, of all groups; the others are as they were.
        siblings: in other groups; None if there are none.

    With ``alpha=0``, ``outer_lr=1`` models keep their bits. With ``outer_lr=0`` the reference does, and models are
    moved alike until it is their mean.
    """
    rate = outer_lr * _count(models, siblings) / active
    for part, centres in _chunks(models, reference):
        drift = _mean_drift(part, centres, siblings)
        mean = torch._foreach_add(_wide(centres), drift)
        for model in part:
            diluted = torch._foreach_lerp(_wide(model), mean, alpha)
            _move(diluted, drift, rate - 1.0)
            torch._foreach_copy_(model, diluted)
        if rate:
            _move(mean, drift, rate - 1.0)
            torch._foreach_copy_(centres, mean)


@torch.no_grad()
def average_with(
    outer: Optimizer,
    models: Sequence[Sequence[Tensor]],
    reference: Sequence[Tensor],
    alpha: float,
    active: int,
    siblings: Siblings | None = None,
) -> None:
    """Average in place; the reference is moved by an optimizer of its own. Arguments as of :func:`average`."""
    for part, centres in _chunks(models, reference):
        drift = _mean_drift(part, centres, siblings)
        mean = torch._foreach_add(_wide(centres), drift)
        for model in part:  # keeps its deviation until the reference has moved
            deviation = torch._foreach_sub(torch._foreach_lerp(_wide(model), mean, alpha), mean)
            torch._foreach_copy_(model, deviation)
        torch._foreach_mul_(drift, -float(_count(models, siblings)) / active)
        for centre, gradient in zip(centres, drift, strict=True):
            centre.grad = gradient.to(centre.dtype)
    outer.step()
    for tensor in reference:
        tensor.grad = None
    for tensors in models:
        torch._foreach_add_(list(tensors), list(reference))


def _move(tensors: Sequence[Tensor], drift: Sequence[Tensor], rate: float) -> None:
    if rate:
        torch._foreach_add_(list(tensors), list(drift), alpha=rate)


def _count(models: Sequence[Any], siblings: Siblings | None) -> int:
    """N, over all groups."""
    return len(models) * (1 if siblings is None else siblings.count)


def _mean_drift(models: Sequence[list[Tensor]], reference: list[Tensor], siblings: Siblings | None) -> list[Tensor]:
    """The mean of ``y_n - z``: exactly zero where no model has moved."""
    wide = _wide(reference)
    total = list(torch._foreach_sub(_wide(models[0]), wide))
    for model in models[1:]:
        torch._foreach_add_(total, torch._foreach_sub(_wide(model), wide))
    if siblings is not None:
        siblings.sum(total)
    torch._foreach_div_(total, float(_count(models, siblings)))
    return total


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In at least single precision; those that have it as they are."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _chunks(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Parts of all models, of a size that bounds the memory for what is computed on the way."""
    begin, nbytes = 0, 0
    for end, tensor in enumerate(reference, 1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES or end == len(reference):
            yield [list(model[begin:end]) for model in models], list(reference[begin:end])
            begin, nbytes = end, 0

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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.utils.patching import nothing

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
        """outer_lr for N pipelines. ``"auto"``: the square root of N, between the mean of the updates and their sum."""
        return math.sqrt(num_pipelines) if self.outer_lr == "auto" else float(self.outer_lr)


class Averaging:
    """One averaging step, which begins when the models have stepped and ends when somebody needs them.

    ::

        group 0, last stage     B6 B7 | step  begin ----------- end | F0       the sums travel
        group 0, first stage       B6 B7 | step  begin --- end | F0            while other stages go on

    With one group there is nothing to wait for, and nothing is computed before the end. With several, what is on its
    way is one more copy of a model (the accumulator), and in between neither models nor reference may be touched.

    Args:
        models: N lists of tensors of the same shapes, after the local steps; of this group.
        reference: the mean of the models of all groups before those steps.
        active: models of this group that had a batch; the others are as they were.
        replica_group: processes in other groups; None if there are none. All of them begin at the same time, and end.
    """

    def __init__(
        self,
        models: Sequence[Sequence[Tensor]],
        reference: Sequence[Tensor],
        active: int,
        replica_group: ReplicaGroup | None = None,
    ) -> None:
        self._models = models
        self._reference = reference
        self._count = len(models) * (1 if replica_group is None else replica_group.count)
        self._active = torch.tensor([active])
        self._parts: Iterator[_Part] = (_Part(*chunk) for chunk in chunks(models, reference))
        self._count_active = nothing
        if replica_group is not None:
            self._count_active = replica_group.begin_sum([self._active])
            self._parts = iter([part.begun(replica_group) for part in self._parts])

    @torch.no_grad()
    def end(self, alpha: float, outer_lr: float) -> None:
        """Average in place.

        Args:
            alpha: how far a model goes to the mean, from 0 (not at all) to 1 (it becomes the reference).
            outer_lr: how far the reference goes, as a multiple of the mean update.

        With ``alpha=0``, ``outer_lr=1`` models keep their bits. With ``outer_lr=0`` the reference does, and models are
        moved alike until it is their mean.
        """
        rate = outer_lr * self._over_active()
        for part in self._parts:
            drift = part.drift(self._count)
            mean = torch._foreach_add(wide(part.centres), drift)
            for model in part.models:
                diluted = torch._foreach_lerp(wide(model), mean, alpha)
                _move(diluted, drift, rate - 1.0)
                torch._foreach_copy_(model, diluted)
            if rate:
                _move(mean, drift, rate - 1.0)
                torch._foreach_copy_(part.centres, mean)

    @torch.no_grad()
    def end_with(self, outer: Optimizer, alpha: float) -> None:
        """Average in place; the reference is moved by an optimizer of its own."""
        over_active = self._over_active()
        for part in self._parts:
            drift = part.drift(self._count)
            mean = torch._foreach_add(wide(part.centres), drift)
            for model in part.models:  # keeps its deviation until the reference has moved
                deviation = torch._foreach_sub(torch._foreach_lerp(wide(model), mean, alpha), mean)
                torch._foreach_copy_(model, deviation)
            torch._foreach_mul_(drift, -over_active)
            for centre, gradient in zip(part.centres, drift, strict=True):
                centre.grad = gradient.to(centre.dtype)
        outer.step()
        for tensor in self._reference:
            tensor.grad = None
        for tensors in self._models:
            torch._foreach_add_(list(tensors), list(self._reference))

    def _over_active(self) -> float:
        """N over the number of those that had a batch, of all groups. If nobody had one, nobody has moved."""
        self._count_active()
        return self._count / (int(self._active) or self._count)


def average(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor], alpha: float, outer_lr: float, active: int
) -> None:
    """Average the models of one group in place; see :class:`Averaging` and :meth:`Averaging.end`."""
    Averaging(models, reference, active).end(alpha, outer_lr)


class _Part:
    """Some of the tensors of all models and of the reference."""

    def __init__(self, models: Sequence[list[Tensor]], centres: list[Tensor]) -> None:
        self.models = models
        self.centres = centres
        self._sum: list[Tensor] | None = None
        self._arrive = nothing

    def begun(self, replica_group: ReplicaGroup) -> _Part:
        """The same, whose sums are on their way to and from other groups."""
        self._sum = self._own_sum()
        self._arrive = replica_group.begin_sum(self._sum)
        return self

    def drift(self, count: int) -> list[Tensor]:
        """The mean of ``y_n - z`` over the models of all groups: exactly zero where no model has moved."""
        self._arrive()
        total = self._own_sum() if self._sum is None else self._sum
        self._sum = None  # it is needed once
        torch._foreach_div_(total, float(count))
        return total

    @torch.no_grad()
    def _own_sum(self) -> list[Tensor]:
        centres = wide(self.centres)
        total = list(torch._foreach_sub(wide(self.models[0]), centres))
        for model in self.models[1:]:
            torch._foreach_add_(total, torch._foreach_sub(wide(model), centres))
        return total


def _move(tensors: Sequence[Tensor], drift: Sequence[Tensor], rate: float) -> None:
    if rate:
        torch._foreach_add_(list(tensors), list(drift), alpha=rate)


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In at least single precision; those that have it as they are."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def chunks(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Parts of all models and of the reference, of a size that bounds the memory for what is computed on the way."""
    begin, nbytes = 0, 0
    for end, tensor in enumerate(reference, 1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES or end == len(reference):
            yield [list(model[begin:end]) for model in models], list(reference[begin:end])
            begin, nbytes = end, 0

"""The averaging step on lists of tensors: it moves the reference and pulls the parallel models towards their mean.

::

    y_n                                   models after their own steps; unchanged for an n that had no batch
    ybar = mean_n y_n
    z'   = z + outer_lr * (ybar - z)      or the result of an outer optimizer for the gradient z - ybar
    x_n' = z' + (1 - alpha) * (y_n - ybar)

However the reference moves, it stays the mean of the models, because the mean of ``y_n - ybar`` is zero.

If only some of the N models had a batch, as at the end of an epoch, ``ybar - z`` is the sum of their updates over N.
Idle models do not count, so this is multiplied by N over the number of the active ones. (A mean of only the active
models' weights would count their deviation from the reference as an update.)

With several groups of processes N counts the models of all groups: ``sum_n (y_n - z)`` is summed over the groups, and
everything else is computed equally in each of them, so all groups keep the same reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.utils.patching import nothing

_CHUNK_BYTES = 64 * 1024**2  # of one model; intermediate results take a few times as much memory


class AveragingStep:
    """One averaging step, which begins after the models have stepped and ends when the models are needed.

    ::

        group 0, last stage     B6 B7 | step  begin ----------- end | F0       the sums travel
        group 0, first stage       B6 B7 | step  begin --- end | F0            while other stages go on

    With one group there is nothing to wait for, and nothing is computed before the end. With several groups, the sums
    in flight take the memory of one more model (the accumulator), and neither models nor reference may be read or
    written in between.

    Args:
        models: tensors of each model of this group, after the local steps; N lists of the same shapes.
        reference: mean of the models of all groups before those steps.
        active: number of models of this group that had a batch; the others are unchanged.
        replica_group: processes in other groups, all of which begin and end the step as well; None if there are none.
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
        self._active = torch.tensor([active], device="cpu")
        self._parts: Iterator[_Part] = (_Part(*chunk) for chunk in chunks(models, reference))
        self._count_active = nothing
        if replica_group is not None:
            self._count_active = replica_group.begin_sum([self._active])
            self._parts = iter([part.begun(replica_group) for part in self._parts])

    @torch.no_grad()
    def end(self, alpha: float, outer_lr: float) -> None:
        """Average in place.

        Args:
            alpha: fraction of its distance to the mean that each model moves, from 0 (none) to 1 (it becomes the
                reference).
            outer_lr: step of the reference, as a multiple of the mean update.

        With ``alpha=0`` and ``outer_lr=1`` the models keep their bits. With ``outer_lr=0`` the reference keeps its
        bits, and all models move by the same difference, so that the reference is their mean.
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
        """Average in place, and move the reference by an optimizer of its own.

        Args:
            outer: optimizer of the reference, whose gradient is the negative mean update.
            alpha: as of :meth:`end`.
        """
        over_active = self._over_active()
        for part in self._parts:
            drift = part.drift(self._count)
            mean = torch._foreach_add(wide(part.centres), drift)
            for model in part.models:  # stores its deviation until the reference has moved
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
        """Return N over the number of models, of all groups, that had a batch; 1 if none had."""
        self._count_active()
        return self._count / (int(self._active) or self._count)


def average(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor], alpha: float, outer_lr: float, active: int
) -> None:
    """Average the models of one group in place. Arguments are those of :class:`AveragingStep` and its ``end``."""
    AveragingStep(models, reference, active).end(alpha, outer_lr)


class _Part:
    """A part of the tensors of all models and of the reference."""

    def __init__(self, models: Sequence[list[Tensor]], centres: list[Tensor]) -> None:
        self.models = models
        self.centres = centres
        self._sum: list[Tensor] | None = None
        self._arrive = nothing

    def begun(self, replica_group: ReplicaGroup) -> _Part:
        """Begin the sum over the groups, and return this part."""
        self._sum = self._own_sum()
        self._arrive = replica_group.begin_sum(self._sum)
        return self

    def drift(self, count: int) -> list[Tensor]:
        """Return the mean of ``y_n - z`` over the models of all groups: exactly zero where no model has moved."""
        self._arrive()
        total = self._own_sum() if self._sum is None else self._sum
        self._sum = None  # used once
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
    """Return the tensors in at least single precision; those that have it are not copied."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def chunks(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Yield parts of all models and of the reference, of a size that bounds the memory of intermediate results."""
    begin, nbytes = 0, 0
    for end, tensor in enumerate(reference, 1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES or end == len(reference):
            yield [list(model[begin:end]) for model in models], list(reference[begin:end])
            begin, nbytes = end, 0

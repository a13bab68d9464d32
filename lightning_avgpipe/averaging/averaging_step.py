"""The averaging step on lists of tensors: it moves the reference and pulls the parallel models towards their mean.

::

    y_n                                   models after their own steps; unchanged for an n that had no batch
    ybar = mean_n y_n
    z'   = z + outer_lr * (ybar - z)      or the result of an outer optimizer for the gradient z - ybar
    x_n' = z' + (1 - alpha) * (y_n - ybar)

However the reference moves, it stays the mean of the models, because the mean of ``y_n - ybar`` is zero.

If only some of the N models had a batch, as at the end of an epoch, ``ybar - z`` is the sum of their updates divided by
N. Idle models must not count, so it is multiplied by N over the number of active models. (A mean of only the active
models' weights would count their deviation from the reference as an update.)

With several groups of processes N counts the models of all groups: ``sum_n (y_n - z)`` is summed over the groups, and
each group computes everything else in the same way, so all groups keep the same reference, bit for bit.

A step may end late, when the models have trained on from ``y_n`` to ``w_n``. What they have learned since then counts
in the next averaging, so that no update is lost or counts twice::

    x_n' = z' + (1 - alpha) * (y_n - ybar) + (w_n - y_n)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.utils.patching import noop
from lightning_avgpipe.utils.random_streams import RandomKey

Rounding = tuple[Format, RandomKey]  # how sums are rounded, and the key of the random numbers for it

_CHUNK_BYTES = 64 * 1024**2  # of one model; intermediate results take a few times as much memory


class AveragingStep:
    """One averaging step. It begins after the models have stepped, and ends when the models are needed.

    ::

        group 0, last stage     B6 B7 | step  begin ----------- end | F0       the sums travel
        group 0, first stage       B6 B7 | step  begin --- end | F0            while other stages go on

    With one group there is nothing to wait for, and everything is computed at the end, unless the step ends late. With
    several groups, the sums in flight take the memory of one more model (the accumulator), and neither models nor
    reference may be read or written in between. If the step ends late, models may be read and written and the reference
    may be read, at the cost of one more copy of each model.

    Args:
        models: tensors of each model of this group, after the local steps; N lists of the same shapes.
        reference: mean of the models of all groups before those steps.
        active: number of models of this group that had a batch; the others are unchanged.
        averaging_group: processes of all groups, which begin and end the step together; None if there is one group.
        names: names of the tensors, if sums are rounded.
        rounding: how sums are rounded on their way between groups; None: they are not.
        late: whether the models train on before the end; then the step is ended by the result of :meth:`resumed`.

    Attributes:
        sums: for a late step, ``sum_n (y_n - z)`` of this group, and of all groups once :meth:`arrive` has returned.
        sent: for a late step, ``y_n`` of each model.
    """

    def __init__(
        self,
        models: Sequence[Sequence[Tensor]],
        reference: Sequence[Tensor],
        active: int,
        averaging_group: TensorCollectives | None = None,
        names: Sequence[str] = (),
        rounding: Rounding | None = None,
        late: bool = False,
    ) -> None:
        self._models = models
        self._reference = reference
        self._count: int | None = len(models) if averaging_group is None else None
        self._averaging_group = averaging_group
        self._active = torch.tensor([active], device="cpu")
        self._parts: Iterable[_Part] = (_Part(*chunk) for chunk in chunks(models, reference))
        self._count_active = noop
        if averaging_group is not None:
            self._count_active = averaging_group.begin_sum([self._active])
        if averaging_group is not None or late:
            left = iter(names)
            self._parts = [
                part.begun(averaging_group, list(islice(left, len(part.centres))), rounding) for part in self._parts
            ]
        self.sums = [tensor for part in self._parts for tensor in part.sums or ()] if late else []
        self.sent = [[tensor.clone() for tensor in model] for model in models] if late else []

    @classmethod
    def resumed(
        cls,
        models: Sequence[Sequence[Tensor]],
        reference: Sequence[Tensor],
        sums: Sequence[Tensor],
        sent: Sequence[Sequence[Tensor]],
        count: int,
        active: int,
    ) -> AveragingStep:
        """Return a late step, to be ended now.

        Args:
            models: tensors of each model of this group, which have trained on.
            reference: mean of the models of all groups when the step began.
            sums: :attr:`sums`; they are overwritten.
            sent: :attr:`sent`.
            count: number of models of all groups.
            active: number of models of all groups that had a batch.
        """
        step, size = cls(models, reference, active), len(models)
        step._count = count
        step._parts = (
            _Part(parts[:size], centres, parts[-1], parts[size:-1])
            for parts, centres in chunks([*models, *sent, sums], reference)
        )
        return step

    @property
    def count(self) -> int:
        """The number of models of all groups that take part; reading it waits for the other groups."""
        if self._count is None:
            assert self._averaging_group is not None
            self._count_active()
            self._count_active = noop
            self._count = len(self._models) * self._averaging_group.present
        return self._count

    def arrive(self) -> int:
        """Wait for the sums of a late step; return the number of models of all groups that had a batch."""
        self._count_active()
        for part in self._parts:
            part.arrive()
        return int(self._active)

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
            drift = part.drift(self.count)
            mean = torch._foreach_add(wide(part.centres), drift)
            for model, diluted in part.pulled(mean, alpha):
                _move(diluted, drift, rate - 1.0)
                torch._foreach_copy_(model, diluted)
            if rate:
                _move(mean, drift, rate - 1.0)
                torch._foreach_copy_(part.centres, mean)

    @torch.no_grad()
    def end_with(self, outer: Optimizer, alpha: float, frozen: Collection[int]) -> None:
        """Average in place, and move the reference by an optimizer of its own.

        Args:
            outer: optimizer of the reference, whose gradient is the negative mean update.
            alpha: as for :meth:`end`.
            frozen: ``id`` of tensors of the reference that are not trained now; they move to the mean.
        """
        over_active = self._over_active()
        for part in self._parts:
            drift = part.drift(self.count)
            mean = torch._foreach_add(wide(part.centres), drift)
            for model, diluted in part.pulled(mean, alpha):  # stores its deviation until the reference has moved
                torch._foreach_copy_(model, torch._foreach_sub(diluted, mean))
            torch._foreach_mul_(drift, -over_active)
            for centre, gradient in zip(part.centres, drift, strict=True):
                if id(centre) in frozen:
                    centre.sub_(gradient)  # updates from before it was frozen; otherwise zero
                else:
                    centre.grad = gradient.to(centre.dtype)
        outer.step()
        for tensor in self._reference:
            tensor.grad = None
        for tensors in self._models if self._reference else ():
            torch._foreach_add_(list(tensors), list(self._reference))

    def _over_active(self) -> float:
        """Return N over the number of models, of all groups, that had a batch; 1 if none had."""
        count = self.count
        return count / (int(self._active) or count)


@dataclass(eq=False)
class _Part:
    """A part of the tensors of all models and of the reference.

    Attributes:
        models: tensors of each model.
        centres: tensors of the reference.
        sums: ``sum_n (y_n - z)``; None: it is computed when it is needed.
        sent: ``y_n`` of each model, if the models have gone on; else empty.
        arrive: waits for the sum over the groups.
    """

    models: Sequence[list[Tensor]]
    centres: list[Tensor]
    sums: list[Tensor] | None = None
    sent: Sequence[list[Tensor]] = ()
    arrive: Callable[[], None] = noop

    def begun(
        self, averaging_group: TensorCollectives | None, names: Sequence[str], rounding: Rounding | None
    ) -> _Part:
        """Begin the sum over the groups, and return this part."""
        self.sums = self._own_sum()
        if averaging_group is not None and rounding is not None:
            self.arrive = averaging_group.begin_rounded_sum(dict(zip(names, self.sums, strict=True)), *rounding)
        elif averaging_group is not None:
            self.arrive = averaging_group.begin_sum(self.sums)
        return self

    def drift(self, count: int) -> list[Tensor]:
        """Return the mean of ``y_n - z`` over the models of all groups: exactly zero where no model has moved."""
        self.arrive()
        total = self._own_sum() if self.sums is None else self.sums
        self.sums = None  # used once
        torch._foreach_div_(total, float(count))
        return total

    def pulled(self, mean: Sequence[Tensor], alpha: float) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield each model with ``ybar + (1 - alpha) * (y_n - ybar) + (w_n - y_n)``, in at least single precision."""
        for model, sent in zip(self.models, self.sent or self.models, strict=True):
            diluted = list(torch._foreach_lerp(wide(sent), list(mean), alpha))
            if sent is not model:
                torch._foreach_add_(diluted, torch._foreach_sub(wide(model), wide(sent)))
            yield model, diluted

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
    """Return the tensors in at least single precision; tensors that have it already are not copied."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def chunks(
    models: Sequence[Sequence[Tensor]], reference: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Yield parts of all models and of the reference, which limit the memory of intermediate results by their size."""
    begin, nbytes = 0, 0
    for end, tensor in enumerate(reference, 1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES or end == len(reference):
            yield [list(model[begin:end]) for model in models], list(reference[begin:end])
            begin, nbytes = end, 0

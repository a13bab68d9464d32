"""Averaging without a barrier: each model meets the reference at the end of its own iteration, while others go on.

::

    pipeline 0   .. t ..|end|.. t+1 ..|end|            ends come in the order (iteration, pipeline), whatever
    pipeline 1      .. t ..|end|.. t+1 ..|end|         the timing is, so the numbers depend on the order alone

With x the model as its iteration began, delta what its optimizer made of it, z the reference, and ``z_t`` the reference
after the last end of the iteration before, which is known at each end of this one:

=========  =========================================================  ==============================================
rule       the model                                                  the reference, at each end
=========  =========================================================  ==============================================
tagged     x + delta - alpha (x - z_t)                                z + outer_lr delta / N
scaled     x + outer_lr delta - alpha (x - z_t)                       z + outer_lr delta / N
late       x + delta - alpha (x - z_t) + (outer_lr - 1) D             z + (delta + (outer_lr - 1) D) / N
staggered  (x + delta) + alpha (z' - (x + delta)), z' as just moved   z + outer_lr delta / N
=========  =========================================================  ==============================================

D is the mean of the deltas of the iteration before. After the last end of an iteration the reference is the mean of the
models with ``scaled`` and ``late``, and with ``tagged`` if ``outer_lr`` is 1: then ``x - z_t`` sums to zero. What
rounding leaves of a difference shrinks by ``1 - alpha`` from iteration to iteration. With ``staggered`` the models
follow the reference. One model alone is trained plainly, if ``outer_lr`` is 1.

With several groups of processes no end waits for those of another group. What the models of a group have made of an
iteration is summed over the groups while the next one runs, and arrives in the reference at its last end::

    group 0   .. t ..|ends|.. t+1 ..|ends|         sums of t on their way: ----
    group 1     .. t ..|ends|.. t+1 ..|ends|
                          ------->  in z, at a fixed end, so the bits do not depend on the timing either

Until then a group takes its own mean update for that of all: ``z_t`` is what the reference was an iteration before,
and ``outer_lr / N`` times the sum of the group's own deltas of that iteration. The sum of ``x - z_t`` over all models
is zero as before, so ``scaled`` keeps the reference their mean, and what groups differ by shrinks as what models do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averaging import chunks, wide
from lightning_avgpipe.elastic.late_sums import LateSums
from lightning_avgpipe.errors import ScheduleError

DEFAULT = "scaled"  # nothing is pending at a drain; as for samples to a goal see docs/parallel_pipelines.md


@dataclass(frozen=True)
class _Meeting:
    """What a rule looks at: lists of tensors, in at least single precision.

    Attributes:
        began: x.
        delta: of this iteration.
        known: z_t.
        before: D.
        alpha: as in the table.
        outer_lr: as in the table.
        count: N.
    """

    began: list[Tensor]
    delta: list[Tensor]
    known: list[Tensor]
    before: list[Tensor]
    alpha: float
    outer_lr: float
    count: int


# Of a model as its optimizer left it, and of the reference: both are changed in place.
_Rule = Callable[[_Meeting, list[Tensor], list[Tensor]], None]


def _tagged(m: _Meeting, model: list[Tensor], reference: list[Tensor]) -> None:
    torch._foreach_add_(model, torch._foreach_sub(m.known, m.began), alpha=m.alpha)
    torch._foreach_add_(reference, m.delta, alpha=m.outer_lr / m.count)


def _scaled(m: _Meeting, model: list[Tensor], reference: list[Tensor]) -> None:
    torch._foreach_add_(model, m.delta, alpha=m.outer_lr - 1.0)
    _tagged(m, model, reference)


def _late(m: _Meeting, model: list[Tensor], reference: list[Tensor]) -> None:
    torch._foreach_add_(model, torch._foreach_sub(m.known, m.began), alpha=m.alpha)
    torch._foreach_add_(model, m.before, alpha=m.outer_lr - 1.0)
    moved = torch._foreach_add(m.delta, m.before, alpha=m.outer_lr - 1.0)
    torch._foreach_add_(reference, moved, alpha=1.0 / m.count)


def _staggered(m: _Meeting, model: list[Tensor], reference: list[Tensor]) -> None:
    torch._foreach_add_(reference, m.delta, alpha=m.outer_lr / m.count)
    torch._foreach_lerp_(model, reference, m.alpha)


RULES: dict[str, _Rule] = {"tagged": _tagged, "scaled": _scaled, "late": _late, "staggered": _staggered}


class StaggeredAveraging:
    """Parallel models that meet one at a time.

    Costs the memory of N + 1 models, ``late`` and several groups of N + 3, beside the models and the reference.

    Args:
        rule: one of ``RULES``; of several groups ``scaled`` or ``tagged``.
        models: N lists of tensors of the same shapes, all at the end of the same iteration.
        reference: their mean.
        alpha: how far a model goes to the reference, 0..1.
        outer_lr: how far the reference goes, as a multiple of the mean update.
        replica_group: processes that hold the models of other groups, all of which begin and end with this one; None if
            there are none.
    """

    def __init__(
        self,
        rule: str,
        models: Sequence[Sequence[Tensor]],
        reference: Sequence[Tensor],
        alpha: float,
        outer_lr: float,
        replica_group: ReplicaGroup | None = None,
    ) -> None:
        self._mix = RULES[rule]
        # each with where its iteration began
        self._models = [(list(model), [tensor.detach().clone() for tensor in model]) for model in models]
        self._reference = list(reference)
        self._alpha, self._outer_lr = alpha, outer_lr
        self._next = 0
        self._known = [tensor.detach().clone() for tensor in self._reference]
        # only for what comes late, in at least single precision
        self._before = self._zeros() if rule == "late" else []
        self._sum = self._zeros() if rule == "late" else []
        self._sums = None if replica_group is None else LateSums(reference, replica_group)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in wide(self._reference)]

    @torch.no_grad()
    def end(self, number: int) -> None:
        """A model's optimizer has stepped: average it, in place. Its next iteration may begin.

        Args:
            number: n of the model; they come in turn.
        Raises:
            ScheduleError: it is another's turn.
        """
        if number != self._next:
            raise ScheduleError(f"model {number} ends its iteration, but it is the turn of model {self._next}")
        count = len(self._models)
        self._next = (number + 1) % count
        if number == 0 and self._sums is None:  # all ends of the iteration before have been
            torch._foreach_copy_(self._known, self._reference)
            self._before, self._sum = self._sum, self._before
            if self._sum:
                torch._foreach_zero_(self._sum)
        own = *self._models[number], self._known, self._before, self._sum
        for parts, centres in chunks(own, self._reference if self._sums is None else self._sums.moves):
            model, began, known, before, total = parts
            wide_model, wide_began, wide_centres = wide(model), wide(began), wide(centres)
            delta = list(torch._foreach_sub(wide_model, wide_began))
            if total:
                torch._foreach_add_(total, delta, alpha=1.0 / count)
            meeting = _Meeting(wide_began, delta, wide(known), before, self._alpha, self._outer_lr, count)
            self._mix(meeting, wide_model, wide_centres)
            torch._foreach_copy_(model, wide_model)
            torch._foreach_copy_(centres, wide_centres)
            torch._foreach_copy_(began, model)
        if self._next == 0 and self._sums is not None:
            self._sums.tell(self._known)

    def catch_up(self) -> None:
        """Wait for what other groups have made of the last iteration that has ended here: the reference is the mean of
        all models. What follows does not depend on whether anybody does.
        """
        if self._sums is not None:
            self._sums.catch_up()

    @torch.no_grad()
    def settle(self) -> None:
        """The same, and all groups go on from there, as if training had just begun: all of them call it."""
        self.catch_up()
        torch._foreach_copy_(self._known, self._reference)

"""Averaging without a barrier: each model is averaged at the end of its own iteration, while others train on.

::

    pipeline 0   .. t ..|end|.. t+1 ..|end|            ends come in the order (iteration, pipeline), whatever
    pipeline 1      .. t ..|end|.. t+1 ..|end|         the timing, so results depend on this order only

Let x be the model at the beginning of its iteration, delta its optimizer's update, z the reference, and ``z_t`` the
reference after the last end of the previous iteration, which is known at each end of this one. Then::

    x' = x + outer_lr delta - alpha (x - z_t)
    z' = z + outer_lr delta / N                   at each end

After the last end of an iteration the reference is the mean of the models, since ``x - z_t`` sums to zero, and no
update is pending. Differences due to rounding shrink by a factor of ``1 - alpha`` in each iteration. With
``outer_lr=1``, a single model trains as without averaging.

With several groups of processes no end waits for another group. The updates of a group's models in an iteration are
summed over the groups while the next iteration runs, and are added to the reference at its last end::

    group 0   .. t ..|ends|.. t+1 ..|ends|         sums of t on their way: ----
    group 1     .. t ..|ends|.. t+1 ..|ends|
                          ------->  in z, at a fixed end, so the bits do not depend on the timing either

Until then a group uses its own mean update in place of that of all groups: ``z_t`` is the reference of one iteration
before, plus ``outer_lr / N`` times the sum of the group's own deltas of that iteration. The sum of ``x - z_t`` over all
models is zero as before, so the reference stays their mean, and differences between groups shrink like those between
models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lightning_avgpipe.averaging.averaging_step import chunks, wide
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.errors import ScheduleError


class StaggeredAveraging:
    """An averaging of parallel models one at a time.

    In addition to the models and the reference, it takes the memory of N + 1 models, or N + 3 with several groups.

    Args:
        models: tensors of each model, all at the end of the same iteration; N lists of the same shapes.
        reference: mean of the models.
        alpha: fraction of its distance to the reference that a model moves, 0..1.
        outer_lr: step of the reference, as a multiple of the mean update.
        averaging_group: processes of all groups, which begin and end models together; None if there is one group.

    Attributes:
        was_shown: whether user code was shown a model, into which it may have written, since the last :meth:`settle`.
    """

    def __init__(
        self,
        models: Sequence[Sequence[Tensor]],
        reference: Sequence[Tensor],
        alpha: float,
        outer_lr: float,
        averaging_group: TensorCollectives | None = None,
    ) -> None:
        # each model with a copy of itself at the beginning of its iteration
        self._models = [(list(model), [tensor.detach().clone() for tensor in model]) for model in models]
        self._reference = list(reference)
        self._alpha, self._outer_lr = alpha, outer_lr
        self._next = 0
        self._known = [tensor.detach().clone() for tensor in self._reference]
        self._averaging_group = averaging_group
        # updates of this group's models in this iteration, and in the last one; the latter are summed over the groups
        several = [] if averaging_group is None else wide(reference)
        self._moves, self._sums = ([torch.zeros_like(tensor) for tensor in several] for _ in range(2))
        self._arrive: Callable[[], None] | None = None  # waits for the sum that was started last
        self.was_shown = False
        self._changed: set[int] = set()  # positions of what user code has changed in the reference between iterations

    @torch.no_grad()
    def end(self, number: int) -> None:
        """Average a model in place, after its optimizer has stepped. Then its next iteration may begin.

        Args:
            number: number n of the model; models take turns in the order of their numbers.

        Raises:
            ScheduleError: it is the turn of another model.
        """
        if number != self._next:
            raise ScheduleError(f"model {number} ends its iteration, but it is the turn of model {self._next}")
        count, alone = len(self._models), self._averaging_group is None
        self._next = (number + 1) % count
        self._changed.clear()
        if number == 0 and alone:  # the previous iteration has ended for all models
            torch._foreach_copy_(self._known, self._reference)
        own = *self._models[number], self._known
        for (model, began, known), centres in chunks(own, self._reference if alone else self._moves):
            wide_model, wide_began, wide_centres = wide(model), wide(began), wide(centres)
            delta = torch._foreach_sub(wide_model, wide_began)
            torch._foreach_add_(wide_model, delta, alpha=self._outer_lr - 1.0)
            torch._foreach_add_(wide_model, torch._foreach_sub(wide(known), wide_began), alpha=self._alpha)
            torch._foreach_add_(wide_centres, delta, alpha=self._outer_lr / count)
            torch._foreach_copy_(model, wide_model)
            torch._foreach_copy_(centres, wide_centres)
            torch._foreach_copy_(began, model)
        if self._next == 0 and self._averaging_group is not None:
            self._tell(self._averaging_group)

    def _tell(self, averaging_group: TensorCollectives) -> None:
        """Start to sum this iteration's updates over the groups; all models of this group have ended the iteration."""
        self.add_pending_sums()
        # the updates of other groups in this iteration are not known yet
        torch._foreach_copy_(self._known, torch._foreach_add(wide(self._reference), self._moves))
        self._sums, self._moves = self._moves, self._sums
        torch._foreach_zero_(self._moves)
        self._arrive = averaging_group.begin_sum(self._sums)

    @torch.no_grad()
    def add_pending_sums(self) -> None:
        """Wait for the sums of the last ended iteration, so that the reference is the mean of all models.

        Later results do not depend on whether this method is called.
        """
        if self._arrive is None or self._averaging_group is None:
            return
        self._arrive()
        self._arrive = None
        torch._foreach_div_(self._sums, float(self._averaging_group.count))
        torch._foreach_copy_(self._reference, torch._foreach_add(wide(self._reference), self._sums))

    @torch.no_grad()
    def reset(self) -> None:
        """Wait for the last sums, and continue as if training began with these models. All groups call it."""
        self.add_pending_sums()
        alone = self._averaging_group is None
        torch._foreach_copy_(
            self._known, self._reference if alone else torch._foreach_add(wide(self._reference), self._moves)
        )

    @torch.no_grad()
    def take_over(self, changed: Collection[int]) -> None:
        """Take over what user code may have written into a model or the reference between iterations.

        The reference follows what it writes into models alone, see :meth:`settle`. Where it changes the reference as
        well, before or after the models, training goes on from what it has written into each.

        Args:
            changed: positions of the tensors of the reference that it has just changed; their sums have arrived.
        """
        self.was_shown = True
        self._changed.update(changed)
        for tensors, kept in (*self._models, (self._reference, self._known)):
            for i in self._changed:
                kept[i].copy_(tensors[i])

    @torch.no_grad()
    def settle(self) -> None:
        """Move the reference by the mean of what user code has written into the models since their iteration ended.

        It is called before an iteration begins, and before the state is saved or this averaging ends, so that these do
        not change what follows. With several groups the reference moves at the end of the iteration.
        """
        if not self.was_shown or self._next:  # within an iteration an update may be pending as well
            return
        self.was_shown = False
        moving = self._reference if self._averaging_group is None else self._moves
        for model, start in self._models:
            for (tensors, began, known), centres in chunks((model, start, self._known), moving):
                change = torch._foreach_sub(wide(tensors), wide(began))
                for moved in (known, centres):
                    total = torch._foreach_add(wide(moved), change, alpha=1.0 / len(self._models))
                    torch._foreach_copy_(moved, total)
                torch._foreach_copy_(began, tensors)

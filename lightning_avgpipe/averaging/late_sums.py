"""Late sums: the updates of several groups' models in an iteration, summed while the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_avgpipe.averaging.averaging_step import wide
from lightning_avgpipe.comm.collectives import ReplicaGroup


class LateSums:
    """The updates of a reference by sums over all groups, which are the same in each of them.

    Args:
        reference: reference of the models of all groups.
        replica_group: processes that hold the models of other groups; all of them call :meth:`tell` equally often.

    Attributes:
        moves: sum of the updates of the reference by this group's models in this iteration, in at least single
            precision; the models add to it.
    """

    def __init__(self, reference: Sequence[Tensor], replica_group: ReplicaGroup) -> None:
        self.moves = [torch.zeros_like(tensor) for tensor in wide(reference)]
        self._reference = list(reference)
        self._replica_group = replica_group
        self._told = [torch.zeros_like(tensor) for tensor in self.moves]
        self._arrive: Callable[[], None] | None = None  # ends the sum that began last

    def tell(self, known: Sequence[Tensor]) -> None:
        """Begin to sum this iteration's moves over the groups, once all models of this group have ended it.

        Args:
            known: set to the reference without the moves of other groups in this iteration, which are not known yet.
        """
        self.catch_up()
        torch._foreach_copy_(list(known), torch._foreach_add(wide(self._reference), self.moves))
        self._told, self.moves = self.moves, self._told
        torch._foreach_zero_(self.moves)
        self._arrive = self._replica_group.begin_sum(self._told)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Wait for the last sum and add it to the reference, which is then the mean of all models."""
        if self._arrive is None:
            return
        self._arrive()
        self._arrive = None
        torch._foreach_div_(self._told, float(self._replica_group.count))
        torch._foreach_copy_(self._reference, torch._foreach_add(wide(self._reference), self._told))

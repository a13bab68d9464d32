"""Late sums: what the models of several groups have made of an iteration, summed up while the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averaging import wide


class LateSums:
    """Moves a reference by the sums of all groups, the same in each of them.

    Args:
        reference: of the models of all groups.
        replica_group: processes that hold the models of other groups, all of which tell as often as this one.

    Attributes:
        moves: how far the models of this group would move the reference in this iteration, in at least single
            precision; they add to it.
    """

    def __init__(self, reference: Sequence[Tensor], replica_group: ReplicaGroup) -> None:
        self.moves = [torch.zeros_like(tensor) for tensor in wide(reference)]
        self._reference = list(reference)
        self._replica_group = replica_group
        self._told = [torch.zeros_like(tensor) for tensor in self.moves]
        self._arrive: Callable[[], None] | None = None  # ends the sum of what was told last

    def tell(self, known: Sequence[Tensor]) -> None:
        """All models of this group have ended their iteration: the others learn of it meanwhile.

        Args:
            known: becomes the reference as far as it is known here: without what others have made of this iteration.
        """
        self.catch_up()
        torch._foreach_copy_(list(known), torch._foreach_add(wide(self._reference), self.moves))
        self._told, self.moves = self.moves, self._told
        torch._foreach_zero_(self.moves)
        self._arrive = self._replica_group.begin_sum(self._told)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Wait for what was told last: the reference is the mean of all models."""
        if self._arrive is None:
            return
        self._arrive()
        self._arrive = None
        torch._foreach_div_(self._told, float(self._replica_group.count))
        torch._foreach_copy_(self._reference, torch._foreach_add(wide(self._reference), self._told))

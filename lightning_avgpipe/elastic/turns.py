"""Turns: the models of a group meet their reference one after the other, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.elastic.models import Models
from lightning_avgpipe.elastic.staggered import DEFAULT, StaggeredAveraging
from lightning_avgpipe.utils.patching import nothing


class Turns:
    """Lets models meet one at a time; see ``staggered``.

    Args:
        models: that it holds together.
        elasticity: how.
        replica_group: processes that hold the parallel models of other groups; None if there are none.
    """

    def __init__(self, models: Models, elasticity: Elasticity, replica_group: ReplicaGroup | None) -> None:
        self._models = models
        self._elasticity = elasticity
        self._replica_group = replica_group
        self._averaging: StaggeredAveraging | None = None
        self._buffers: list[dict[str, Tensor]] = []  # of the models that have ended, where groups average them
        self._end_buffers: Callable[[], None] = nothing

    @property
    def are_there(self) -> bool:
        """Whether what models need for it is there."""
        return self._averaging is not None

    def begin(self) -> None:
        """The models are about to step, one after the other. All have stepped as often; the reference is not shown."""
        if self._averaging is None and self._models.mine:  # a process may have frozen stages only
            total, tensors = self._models.total, self._models.tensors()
            alpha, rate = self._elasticity.dilution(total), self._elasticity.rate(total)
            self._averaging = StaggeredAveraging(DEFAULT, *tensors, alpha, rate, self._replica_group)

    def end(self, number: int) -> None:
        """The optimizers of model n have stepped: it meets the reference, and may begin its next iteration."""
        if self._averaging is not None:
            self._averaging.end(number)
        if self._models.shared is None:
            return
        self._models.placement.read_back()
        found = self._models.replicas[number].buffers
        self._buffers.append({name: buffer.detach().clone() for name, buffer in found.items()})
        if len(self._buffers) == self._models.size:
            self._end_buffers()
            self._end_buffers, self._buffers = self._models.shared.begin(self._buffers), []

    def catch_up(self) -> None:
        """The reference has what all groups have made of the last iteration that has ended here."""
        if self._averaging is not None:
            self._averaging.catch_up()
        self._end_buffers()
        self._end_buffers = nothing

    def settle(self) -> None:
        """The same, and what follows does not depend on what has been. All groups call it."""
        if self._models.shown is None:  # else it has arrived, and the reference is in the place of a model
            self.catch_up()
            if self._averaging is not None:
                self._averaging.settle()

    def stop(self) -> None:
        """What meets the reference next does so anew."""
        self.catch_up()
        self._averaging = None

    def abandon(self) -> None:
        """The same, without waiting for other groups, which have failed."""
        self._averaging, self._end_buffers = None, nothing

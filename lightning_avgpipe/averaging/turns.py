"""Turns: the models of a group are averaged with their reference one after the other, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_avgpipe.averaging.models import Models
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.utils.patching import nothing


class Turns:
    """The averaging of parallel models one at a time; see ``staggered``.

    Args:
        models: models to average.
        averaging: options of the averaging.
        replica_group: processes that hold the parallel models of other groups; None if there are none.
    """

    def __init__(self, models: Models, averaging: Averaging, replica_group: ReplicaGroup | None) -> None:
        self._models = models
        self._options = averaging
        self._replica_group = replica_group
        self._averaging: StaggeredAveraging | None = None
        self._buffers: list[dict[str, Tensor]] = []  # of the models that have ended, if groups average buffers
        self._end_buffers: Callable[[], None] = nothing

    @property
    def are_there(self) -> bool:
        """Whether the state for averaging models one at a time exists."""
        return self._averaging is not None

    def begin(self) -> None:
        """Prepare to average models one at a time, unless that has begun.

        All models must have stepped equally often, and the reference must not be shown.
        """
        if self._averaging is None and self._models.mine:  # a process may have frozen stages only
            total, tensors = self._models.total, self._models.tensors()
            alpha, rate = self._options.dilution(total), self._options.rate(total)
            self._averaging = StaggeredAveraging(*tensors, alpha, rate, self._replica_group)

    def end(self, number: int) -> None:
        """Average model n after its optimizers have stepped. Then its next iteration may begin."""
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
        """Add the updates of all groups in the last iteration that has ended here to the reference."""
        if self._averaging is not None:
            self._averaging.catch_up()
        self._end_buffers()
        self._end_buffers = nothing

    def settle(self) -> None:
        """Catch up, and continue from there as if training had just begun. All groups call it."""
        if self._models.shown is None:  # showing the reference has caught up already
            self.catch_up()
            if self._averaging is not None:
                self._averaging.settle()

    def stop(self) -> None:
        """Catch up, and drop the state: the next model to average starts from the current reference."""
        self.catch_up()
        self._averaging = None

    def abandon(self) -> None:
        """Drop the state without waiting for other groups, which have failed."""
        self._averaging, self._end_buffers = None, nothing

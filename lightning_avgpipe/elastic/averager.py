"""The averager: holds parallel models together, now and then or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averaging import Averaging, Elasticity
from lightning_avgpipe.elastic.models import Models
from lightning_avgpipe.elastic.turns import Turns
from lightning_avgpipe.utils.patching import nothing


class Averager:
    """Averages models when it is time; with other groups in the background.

    Args:
        models: that it holds together.
        elasticity: how.
        replica_group: processes that hold the parallel models of other groups; None if there are none.

    Attributes:
        steps: averaged or not, since the last averaging.
        active: pipelines that had a batch since then.
        turns: in which models meet the reference one after the other.
    """

    def __init__(self, models: Models, elasticity: Elasticity, replica_group: ReplicaGroup | None) -> None:
        self._models = models
        self._elasticity = elasticity
        self._replica_group = replica_group
        self.steps = self.active = 0
        self._outer: Optimizer | None = None
        self._begun: tuple[Averaging, Callable[[], None]] | None = None
        self.turns = Turns(models, elasticity, replica_group)

    def follow(self, names: Collection[str]) -> None:
        """The reference has these tensors too."""
        reference = self._models.reference
        if self._elasticity.outer_optimizer is not None:
            if self._outer is None:
                self._outer = self._elasticity.outer_optimizer(list(reference.values()))
            else:
                self._outer.param_groups[0]["params"] += [reference[name] for name in names]

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the reference, over all its tensors; None if it has none."""
        self.finish()
        return self._outer

    def load_progress(self, steps: int, active: int) -> None:
        """Go on in the midst of an interval between averagings."""
        self.steps, self.active = steps, active

    def stepped(self, active: int) -> None:
        """The optimizers have stepped: average, if it is time.

        Args:
            active: pipelines that had a batch, counted from 0.
        """
        self.turns.stop()
        self.steps += 1
        self.active = max(self.active, active)
        if self.steps >= self._elasticity.average_every:
            self.begin()

    def begin(self) -> None:
        """Average what has been trained since the last time."""
        self._begun = self._meeting(self.active)
        self.steps = self.active = 0
        if self._replica_group is None:
            self.finish()

    def _meeting(self, active: int) -> tuple[Averaging, Callable[[], None]]:
        averaging = Averaging(*self._models.tensors(), active, self._replica_group)
        if self._models.shared is None:
            return averaging, nothing
        self._models.placement.read_back()
        return averaging, self._models.shared.begin([replica.buffers for replica in self._models.replicas])

    def recentre(self) -> None:
        """Models have gone: the others move alike, so that the reference stays where it is and is their mean."""
        averaging = Averaging(*self._models.tensors(), self._models.size, self._replica_group)
        averaging.end(alpha=0.0, outer_lr=0.0)

    @property
    def is_under_way(self) -> bool:
        """Whether an averaging has begun and not ended."""
        return self._begun is not None

    def finish(self) -> None:
        """End the averaging that has begun, if one has. Whatever here shows or changes a model does so first."""
        if self._begun is None:
            return
        (averaging, end_buffers), self._begun = self._begun, None
        whole = True
        while self._replica_group is not None and not self._replica_group.settle():
            # groups have left: the reference becomes the mean of the models that there still are
            whole = False
            averaging, end_buffers = self._meeting(self._models.size)
        alpha = self._elasticity.dilution(self._models.total)
        if self._outer is not None and whole:
            averaging.end_with(self._outer, alpha)
        else:
            averaging.end(alpha, self._elasticity.rate(self._models.total) if whole else 1.0)
        end_buffers()

    def abandon(self) -> None:
        """Do not wait for other groups any more: they have failed."""
        self._begun = None
        self.turns.abandon()

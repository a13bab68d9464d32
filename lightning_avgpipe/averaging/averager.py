"""The averager: pulls parallel models towards their reference, every few steps or one model after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.models import Models
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.utils.patching import nothing


class Averager:
    """The schedule of averagings: counts steps, and averages when it is time; with other groups in the background.

    Args:
        models: models to average.
        averaging: options of the averaging.
        replica_group: processes that hold the parallel models of other groups; None if there are none.

    Attributes:
        steps: number of steps since the last averaging.
        active: number of pipelines that had a batch since then.
    """

    def __init__(self, models: Models, averaging: Averaging, replica_group: ReplicaGroup | None) -> None:
        self._models = models
        self._options = averaging
        self._replica_group = replica_group
        self.steps = self.active = 0
        self._outer: Optimizer | None = None
        self._begun: tuple[AveragingStep, Callable[[], None]] | None = None
        self._turns: StaggeredAveraging | None = None  # while models are averaged one after the other
        self._ended: list[dict[str, Tensor]] = []  # buffers of the models that have ended, if groups average buffers
        self._end_buffers: Callable[[], None] = nothing

    def follow(self, names: Collection[str]) -> None:
        """Include new tensors of the reference in its optimizer."""
        reference = self._models.reference
        if self._options.outer_optimizer is not None:
            if self._outer is None:
                self._outer = self._options.outer_optimizer(list(reference.values()))
            else:
                self._outer.param_groups[0]["params"] += [reference[name] for name in names]

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the reference, over all its tensors; None if it has none."""
        self.finish()
        return self._outer

    def stepped(self, active: int) -> None:
        """Count a step of the optimizers, and average if it is time.

        Args:
            active: number of pipelines whose models took part in the step.
        """
        self.stop_turns()
        self.steps += 1
        self.active = max(self.active, active)
        if self.steps >= self._options.every:
            self.begin()

    def begin(self) -> None:
        """Begin to average the training since the last averaging; with one group, also end it."""
        averaging, end_buffers = AveragingStep(*self._models.tensors(), self.active, self._replica_group), nothing
        if self._models.shared is not None:
            self._models.read_back()
            end_buffers = self._models.shared.begin([model.buffers for model in self._models.each])
        self._begun = averaging, end_buffers
        self.steps = self.active = 0
        if self._replica_group is None:
            self.finish()

    def recentre(self) -> None:
        """Shift all models by the same difference after some have gone, so that the unmoved reference is their mean."""
        averaging = AveragingStep(*self._models.tensors(), self._models.size, self._replica_group)
        averaging.end(alpha=0.0, outer_lr=0.0)

    @property
    def is_under_way(self) -> bool:
        """Whether an averaging has begun and not ended."""
        return self._begun is not None

    def finish(self) -> None:
        """End the averaging that has begun, if one has. Call it before models are read or changed."""
        if self._begun is None:
            return
        (averaging, end_buffers), self._begun = self._begun, None
        alpha = self._options.dilution(self._models.total)
        if self._outer is not None:
            averaging.end_with(self._outer, alpha)
        else:
            averaging.end(alpha, self._options.rate(self._models.total))
        end_buffers()

    def abandon(self) -> None:
        """Drop the averaging that has begun, without waiting for other groups, which have failed."""
        self._begun = self._turns = None
        self._end_buffers = nothing

    # -- one model after the other -----------------------------------------------------------------------------------

    @property
    def takes_turns(self) -> bool:
        """Whether the state for averaging models one at a time exists."""
        return self._turns is not None

    def begin_turns(self) -> None:
        """Prepare to average models one at a time, unless that has begun.

        All models must have stepped equally often, and the reference must not be shown.
        """
        if self._turns is None and self._models.mine:  # a process may have frozen stages only
            total, tensors = self._models.total, self._models.tensors()
            alpha, rate = self._options.dilution(total), self._options.rate(total)
            self._turns = StaggeredAveraging(*tensors, alpha, rate, self._replica_group)

    def end_turn(self, number: int) -> None:
        """Average model n after its optimizers have stepped. Then its next iteration may begin."""
        if self._turns is not None:
            self._turns.end(number)
        if self._models.shared is None:
            return
        self._models.read_back()
        self._ended.append({name: b.detach().clone() for name, b in self._models.each[number].buffers.items()})
        if len(self._ended) == self._models.size:
            self._end_buffers()
            self._end_buffers, self._ended = self._models.shared.begin(self._ended), []

    def catch_up(self) -> None:
        """Add the updates of all groups in the last iteration that has ended here to the reference."""
        if self._turns is not None:
            self._turns.catch_up()
        self._end_buffers()
        self._end_buffers = nothing

    def reset(self) -> None:
        """Catch up, and continue from there as if training had just begun. All groups call it."""
        if self._models.shown is None:  # showing the reference has caught up already
            self.catch_up()
            if self._turns is not None:
                self._turns.reset()

    def stop_turns(self) -> None:
        """Catch up, and drop the state: the next model to average starts from the current reference."""
        self.catch_up()
        self._turns = None

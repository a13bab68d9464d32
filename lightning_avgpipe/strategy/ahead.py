"""Iterations that overlap: micro-batches of the next batches run before Lightning's loop comes to these batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightning_avgpipe.capture.graph import changed_in_common
from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.foresight import AheadWatch, Progress
from lightning_avgpipe.strategy.iteration import Finish, Iterations
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import ModelCheckpoint, _Stateful
from lightning_avgpipe.utils.torch_compat import version_of

STEP = "training_step"


@dataclass(kw_only=True)
class BatchRead:
    """A batch that was read, while it is on its way through the stages.

    Attributes:
        batches: batch of each pipeline, on the device.
        number: number of the iteration, on which random numbers depend.
        rest: other arguments of the step.
        progress: the trainer's counters as they will be for this batch; None once Lightning's loop has come to it.
        finish: function that the last stage calls with results; None before it is known.
    """

    batches: Sequence[Any]
    number: int
    rest: tuple[Any, ...]
    progress: Progress | None
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self._versions = [(t, version_of(t)) for t in tree.tensors(list(self.batches)) if not t.is_inference()]

    @property
    def changed(self) -> bool:
        """Whether user code has changed a batch since it was read."""
        return any(version_of(tensor) != version for tensor, version in self._versions)


@dataclass(kw_only=True)
class AheadIterations(Iterations):
    """Iterations that may begin before Lightning's loop comes to their batches.

    Attributes:
        batches: brings batches to the device.
        broken: called when an iteration fails in which some models or stages have stepped and others have not.
    """

    batches: Batches
    broken: Callable[[], None]

    def __post_init__(self) -> None:
        self._option, self._instead = self.configuration.options.overlap
        self._foresight = AheadWatch(self.trainer, self._option, self._instead)
        self._checked = False

    def evaluate(self, step: str, batch: Any, *rest: Any) -> Any:
        """Drain the pipeline, then run a step without backward; see :meth:`Iterations.evaluate`."""
        self.drain()
        return super().evaluate(step, batch, *rest)

    def _calling(self, step: str) -> AbstractContextManager[None]:
        # with rolling="auto" nothing runs early before the first iteration has shown whether the step allows it
        self._foresight.only_notes = self.configuration.is_open and not self._checked
        return self._foresight.guarding() if step == STEP and self._overlaps else contextlib.nullcontext()

    @property
    def _overlaps(self) -> bool:
        """Whether iterations of this run may overlap."""
        return self.configuration.rolls and self.models.num_models > 1

    @property
    def _trained_now(self) -> frozenset[str]:
        return self.deployment.pipeline.steps[STEP].freezing.trained

    def _may_go_on(self) -> bool:
        """Return whether the next batch may begin early: no validation, checkpoint or end of epoch comes before it."""
        trainer, loop, fetcher = self.trainer, self.trainer.fit_loop.epoch_loop, self.trainer.fit_loop._data_fetcher
        assert fetcher is not None
        steps = trainer.global_step + 1
        checkpoints = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        return not (
            loop._num_ready_batches_reached()
            or steps == trainer.max_steps
            or trainer.should_stop
            or trainer.received_sigterm
            or loop._should_check_val_fx(fetcher)
            or any(c._every_n_train_steps and steps % c._every_n_train_steps == 0 for c in checkpoints)
            or self.configuration.asked
            or self.deployment.replans
        )

    def _check_graph(self) -> None:
        """Check that the step changes nothing that overlapping batches share, and that its data may be read ahead.

        Raises:
            ConfigurationError: names what stands against it.
        """
        if found := self._against():
            raise ConfigurationError(found)
        self._checked = True

    def _against(self) -> str:
        """Return why iterations of a captured step must not overlap; empty if they may."""
        if self._foresight.noted:
            return self._foresight.noted
        loader = self.trainer.fit_loop._combined_loader
        saving = [one for one in ([] if loader is None else loader.flattened) if isinstance(one, _Stateful)]
        if saving:
            return (
                f"{self._option} reads ahead, but the {type(saving[0]).__name__} saves its position in checkpoints, "
                f"which would then be ahead of the training; use a dataloader without state_dict, or {self._instead}"
            )
        if what := changed_in_common(self.deployment.pipeline.graph(STEP)):
            return (
                f"{type(self._module).__name__}.{STEP} changes {what}, but with {self._option} micro-batches of two "
                "batches run at the same time, and would see it in an order that the timing decides; leave that to a "
                f"hook that looks at the outputs (on_train_batch_end), or use {self._instead}"
            )
        return ""

    def others_trained(self) -> ConfigurationError:
        """Return the error for a hook that has frozen or unfrozen parameters too late."""
        return ConfigurationError(
            f"a hook has changed which parameters of {type(self._module).__name__} are trained when micro-batches of "
            f"the next batch had run already; with {self._option} do so in on_train_epoch_start"
        )

    def other_batch(self) -> StepChangedError:
        """Return the error for a batch that is not the one that was read ahead."""
        return StepChangedError(
            "a batch that has been read ahead, and may have run in part, was changed or left out by a hook; with "
            f"{self._option} change batches in on_after_batch_transfer, or use {self._instead}"
        )

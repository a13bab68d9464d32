"""What happens between two optimizer steps and is not repeated in a plain run: hooks, and some kinds of schedulers."""

from __future__ import annotations

from typing import Any

from lightning_avgpipe.verify.plain import portable
from lightning_avgpipe.verify.state import attributes, state_of
from lightning_avgpipe.verify.subject import Subject


class BetweenSteps:
    """Finds out whether anything but training has changed the state with which the next step begins.

    Every process calls the methods at the same points: :meth:`before_step` before optimizers and hooks run,
    :meth:`begin` or :meth:`has_changed` when the iteration begins, and :meth:`after_step`.

    Args:
        subject: run of training to verify.

    Attributes:
        hooks_have_run: whether hooks have run between the steps that are compared.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._moment = 0, 0
        self._rates: list[float] = []  # learning rates before this step
        self._rates_then: list[float] = []  # learning rates after the previous step
        self._held: dict[str, Any] = {}  # what hooks may change, after the previous step
        self.hooks_have_run = False

    def before_step(self) -> None:
        """Record the learning rates before a step, since optimizers that wrap others may change them within it."""
        self._rates = self._rates_now()

    def begin(self) -> None:
        """Record the state before the first step that is compared."""
        self._moment, self._rates_then = self._moment_now(), self._rates

    def has_changed(self) -> bool:
        """Return whether anything but training has changed the state since the previous step, in any process."""
        subject, before = self._subject, self._moment
        self._moment = self._moment_now()
        if before != self._moment:
            return True
        unchanged = self._rates_are_known()
        if subject.has_hooks_between_steps:
            self.hooks_have_run = True
            unchanged = unchanged and self._held_now() == self._held
        return not all(subject.cluster.group.exchange_objects(unchanged))

    def after_step(self) -> None:
        """Record the state after a step, with which the next one should begin."""
        self._rates_then = self._rates_now()
        if self._subject.has_hooks_between_steps:
            self._held = self._held_now()

    def _moment_now(self) -> tuple[int, int]:
        """Return numbers that change if an epoch or a validation has come between: epoch, and validation batches."""
        trainer = self._subject.trainer
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready

    def _rates_now(self) -> list[float]:
        groups = (group for optimizer in self._subject.trainer.optimizers for group in optimizer.param_groups)
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _rates_are_known(self) -> bool:
        """Return whether learning rates have changed only by schedulers that plain runs step as well."""
        configs = [config for config in self._subject.trainer.lr_scheduler_configs if config.interval == "step"]
        monitors = [config.reduce_on_plateau for config in configs]
        return self._rates == self._rates_then if all(monitors) else not any(monitors)

    def _held_now(self) -> dict[str, Any]:
        """Return what hooks may change: weights, buffers and attributes of this process, and the state of callbacks."""
        held, callbacks = self._subject.held, dict(enumerate(self._subject.trainer.callbacks))  # type: ignore[attr-defined]
        weights = held(0, lambda module: {k: p for k, p in module.named_parameters() if not p.is_meta})
        buffers = held(0, lambda module: dict(module.named_buffers()))
        return {**weights, **buffers, **held(0, attributes), **portable(state_of(callbacks, "callbacks"))}

"""The check of gradients before a step: if one is infinite or NaN, training ends, or its model skips the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.integrity import first_nonfinite, has_nonfinite
from lightning_avgpipe.errors import NonFiniteError
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.training.stepping import scalers_of
from lightning_avgpipe.utils.lightning import rank_zero_warn

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.parallel_models import ParallelModels


class GradientCheck:
    """Checks gradients once they are complete, before clipping and before the optimizer's step.

    Args:
        context: trainer, connection and options of the run.
        models: models that step; None: the module is the only one.

    Attributes:
        left_out: numbers of this group's models that skip the present step.
        skipped_models: how often a model has skipped a step.
    """

    def __init__(self, context: RunContext, models: ParallelModels | None = None) -> None:
        self.left_out: list[int] = []
        self.skipped_models = 0
        self._trainer, self._cluster = context.trainer, context.cluster
        self._wanted = context.configuration.options.averaging.on_nonfinite
        self._module, self._models = context.module, models
        drains = context.configuration.options.policy.drains
        # stages that step at different times cannot check together
        self._by_process = models is not None and context.fitting and not drains

    def wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs this one and then checks the gradients, if the options ask for a check.

        The new closure returns None if model 0 skips the step. With a loss scaler there is no check, since the scaler
        has one of its own.
        """
        wanted = self._wanted
        if wanted == "auto":
            wanted = None if self._num_models == 1 else "raise"
        scaled = any(scaler.is_enabled() for scaler in scalers_of(self._trainer.precision_plugin))
        self.left_out = []
        if wanted is None or scaled:
            return closure

        def run() -> Any:
            result = closure()
            if self._by_process:
                self.check_model(0)
            else:
                self._check(skip=wanted == "skip")
            return None if 0 in self.left_out else result

        return run

    @property
    def _num_models(self) -> int:
        return 1 if self._models is None else self._models.num_models

    @property
    def _ensemble(self) -> Ensemble | None:
        return None if self._models is None else self._models.ensemble

    def _gradients(self, number: int) -> dict[str, Tensor]:
        """Return the gradients of one model on this process, by full name."""
        ensemble = self._ensemble
        parameters = dict(self._module.named_parameters()) if ensemble is None else ensemble.models.parameters(number)
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    def _restart(self, number: int, like: int | None) -> None:
        """Reset a model to the reference, with the buffers of model ``like``; clear the gradients of an only model."""
        if self._ensemble is not None:
            self._ensemble.restart(number, like)
        else:
            nn.Module.zero_grad(self._module)

    def _check(self, skip: bool) -> None:
        """Check the gradients of all models of a group. Every process of the group calls it.

        Raises:
            NonFiniteError: a gradient is infinite or NaN, and ``skip`` is False.
        """
        stepping = 1 if self._models is None else self._models.num_stepping
        gradients = [self._gradients(n) for n in range(stepping)]
        found = torch.stack([has_nonfinite(named.values(), self._cluster.device) for named in gradients]).cpu()
        bad = [n for n, count in enumerate(self._cluster.group.sum(found).tolist()) if count]
        if not bad:
            return
        if not skip:
            name = first_nonfinite(gradients[bad[0]])
            self._refuse(bad[0], self._cluster.group.exchange_objects(name))
        self.left_out = bad
        like = next((n for n in range(len(gradients)) if n not in bad), None)
        for n in bad:
            self._restart(n, like)
        self.skipped_models += len(bad)
        if self._cluster.world.rank == 0:
            self._tell(bad)

    def check_model(self, number: int) -> None:
        """Check the gradients of one model on this process alone, before that model steps.

        Raises:
            NonFiniteError: a gradient is infinite or NaN.
        """
        if self._wanted is None:
            return
        gradients = self._gradients(number)
        if has_nonfinite(gradients.values(), self._cluster.device):
            self._refuse(number, [first_nonfinite(gradients)], "Other models and stages may have stepped by then")

    def _refuse(
        self,
        number: int,
        names: Sequence[str | None],
        so_far: str = "No optimizer has stepped, so {} is as it was",
    ) -> None:
        """Raise an error that names the first bad gradient in the order of stages.

        Args:
            number: number n of the pipeline.
            names: the name of the first bad gradient on each rank, or None; rank 0 has the last stage.
            so_far: sentence that says what has stepped; ``{}`` stands for the model that is unchanged.
        """
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        name = next(name for name in reversed(names) if name is not None)
        several = self._num_models > 1
        group = f" of group {self._cluster.group_number}" if self._cluster.stage_map.num_groups > 1 else ""
        which = f"pipeline {number}{group}, " if several else ""
        spared = "the reference model" if several else "the model"
        skips = "leaves such a model out of the step" if several else "leaves out such a step"
        raise NonFiniteError(
            f"{which}batch_idx {batch_idx}: the gradient of '{name}' is infinite or NaN. "
            f"{so_far.format(spared)}. Look at this batch and the loss, lower the learning "
            f"rate, or clip gradients; Averaging(on_nonfinite='skip') {skips}, None looks at nothing"
        )

    def _tell(self, pipelines: Sequence[int]) -> None:
        """Warn of the pipelines whose models skip the step, and log the number of skipped models so far."""
        trainer = self._trainer
        rank_zero_warn(
            f"batch_idx {trainer.fit_loop.epoch_loop.batch_idx}: pipeline {' and '.join(map(str, pipelines))} had a "
            "gradient that is infinite or NaN, and was left out of the step; avgpipe/skipped_models counts this"
        )
        for logger in trainer.loggers:
            logger.log_metrics({"avgpipe/skipped_models": self.skipped_models}, step=trainer.global_step)

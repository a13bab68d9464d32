"""The check of gradients before a step: a model with an infinite one, or one that is no number, does not step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.amp import GradScaler

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.elastic.finite import first_nonfinite, has_nonfinite, may_have_nonfinite
from lightning_avgpipe.errors import NonFiniteError


class Models(Protocol):
    """The models that a group of processes trains."""

    @property
    def num_models(self) -> int:
        """Of all groups."""

    @property
    def stepping(self) -> int:
        """Models of this group that have had a batch since gradients were cleared, at least 1."""

    def gradients(self, number: int) -> dict[str, Tensor]:
        """Full name -> gradient of one model, as far as it is held here."""

    def restart(self, number: int, like: int | None) -> None:
        """Let one model begin again, without gradients; ``like`` is one that steps."""


class OneModel:
    """The module itself, and no other."""

    num_models = stepping = 1

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def gradients(self, number: int) -> dict[str, Tensor]:
        """Full name -> gradient."""
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}

    def restart(self, number: int, like: int | None) -> None:
        """Clear the gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None


class GradientCheck:
    """Looks at gradients once they are complete, and before anything is clipped or steps.

    Args:
        trainer: whose optimizers step.
        cluster: of the processes.
        wanted: the strategy's option ``on_nonfinite``.
        models: that step.

    Attributes:
        apart: whether stages step one after the other: each process looks at its own gradients.
        left_out: models of this group that this step leaves out.
        skipped_models: how often one was.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster, wanted: str | None, models: Models) -> None:
        self.apart = False
        self.left_out: list[int] = []
        self.skipped_models = 0
        self._trainer = trainer
        self._cluster = cluster
        self._wanted = wanted
        self._models = models

    def after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, and then the check, if one is wanted; nothing of a model that is left out."""
        wanted = self._wanted
        if wanted == "auto":
            wanted = None if self._models.num_models == 1 else "raise"
        plugin = self._trainer.precision_plugin
        scaled = any(isinstance(value, GradScaler) and value.is_enabled() for value in vars(plugin).values())
        self.left_out = []
        if wanted is None or scaled:
            return closure

        def run() -> Any:
            result = closure()
            if self.apart:
                self.look_at(0)
            else:
                self._check(skip=wanted == "skip")
            return None if 0 in self.left_out else result

        return run

    def _check(self, skip: bool) -> None:
        """All processes of a group call it.

        Raises:
            NonFiniteError: a gradient is infinite or no number, and the model is not to be skipped.
        """
        gradients = [self._models.gradients(n) for n in range(self._models.stepping)]
        found = torch.stack([may_have_nonfinite(named.values(), self._cluster.device) for named in gradients]).cpu()
        for n in found.nonzero().flatten().tolist():
            found[n] = has_nonfinite(gradients[n].values())
        bad = [n for n, count in enumerate(self._cluster.group.sum(found).tolist()) if count]
        if not bad:
            return
        if not skip:
            name = first_nonfinite(gradients[bad[0]])
            self._refuse(bad[0], self._cluster.group.exchange_objects(name))
        self.left_out = bad
        like = next((n for n in range(len(gradients)) if n not in bad), None)
        for n in bad:
            self._models.restart(n, like)
        self.skipped_models += len(bad)
        if self._cluster.leads:
            self._tell(bad)

    def look_at(self, number: int) -> None:
        """Look at the gradients of one model that are here, before it steps; other processes look at theirs.

        Raises:
            NonFiniteError: a gradient is infinite or no number.
        """
        if self._wanted is None:
            return
        gradients = self._models.gradients(number)
        if may_have_nonfinite(gradients.values(), self._cluster.device).item():
            name = first_nonfinite(gradients)
            if name is not None:
                self._refuse(number, [name], "Other models and stages may have stepped by then")

    def _refuse(
        self,
        number: int,
        names: Sequence[str | None],
        so_far: str = "No optimizer has stepped, so {} is as it was",
    ) -> None:
        """End with the first tensor by stages.

        Args:
            number: n of the pipeline.
            names: by rank, the first of its tensors; rank 0 has the last stage.
            so_far: what has stepped, with a place for what has not.
        """
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        name = next(name for name in reversed(names) if name is not None)
        several = self._models.num_models > 1
        group = f" of group {self._cluster.group_number}" if self._cluster.stage_map.num_groups > 1 else ""
        which = f"pipeline {number}{group}, " if several else ""
        spared = "the reference model" if several else "the model"
        skips = "leaves such a model out of the step" if several else "leaves out such a step"
        raise NonFiniteError(
            f"{which}batch_idx {batch_idx}: the gradient of '{name}' is infinite or no number (NaN). "
            f"{so_far.format(spared)}. Look at this batch and the loss, lower the learning "
            f"rate, or clip gradients; on_nonfinite='skip' {skips}, None looks at nothing"
        )

    def _tell(self, pipelines: Sequence[int]) -> None:
        trainer = self._trainer
        rank_zero_warn(
            f"batch_idx {trainer.fit_loop.epoch_loop.batch_idx}: pipeline {' and '.join(map(str, pipelines))} had a "
            "gradient that is infinite or no number, and was left out of the step; avgpipe/skipped_models counts this"
        )
        for logger in trainer.loggers:
            logger.log_metrics({"avgpipe/skipped_models": self.skipped_models}, step=trainer.global_step)

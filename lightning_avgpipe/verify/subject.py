"""The subject: what is verified."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.weighting import LossWeight
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.names import nearest
from lightning_avgpipe.verify.plain import Outcome
from lightning_avgpipe.verify.state import attributes, clone


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Training that is verified. Functions tell what is so when they are called.

    Attributes:
        trainer: of the run.
        cluster: of the processes.
        deployment: of the module on processes.
        step_log: collects what steps log; its ``listener`` is told of it.
        seed: of the random numbers in units.
        num_pipelines: N of each group.
        clears_gradients: whether the training step that runs now begins with cleared gradients.
        loss_is_mean: whether losses are means over the samples of their micro-batch; else they are sums.
        loss_weight: what micro-batches count by, if not by samples.
        showing: within the context that it returns the module shows the model of a pipeline.
    """

    trainer: pl.Trainer
    cluster: Cluster
    deployment: Deployment
    step_log: Any
    seed: Callable[[], int]
    num_pipelines: Callable[[], int]
    clears_gradients: Callable[[], bool]
    loss_is_mean: bool
    loss_weight: Callable[[], LossWeight | None]
    showing: Callable[[int], AbstractContextManager[None]]

    @property
    def module(self) -> pl.LightningModule:
        """That is trained."""
        return self.trainer.lightning_module

    @property
    def plan(self) -> Plan | None:
        """The stages; None before the first batch."""
        return self.deployment.plan

    @property
    def num_models(self) -> int:
        """Parallel models of all groups."""
        return self.num_pipelines() * self.cluster.stage_map.num_groups

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages of a parameter, a buffer, or an attribute of a unit, by its full name; empty if it has none."""
        known = {} if self.plan is None else self.plan.stages_of
        return known.get(nearest(name, known), ())

    # -- what this process, and all of them, hold ---------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process collects, runs plainly, and compares."""
        return self.cluster.rank == 0

    def model(self, n: int) -> AbstractContextManager[Any]:
        """Within this context the module shows the model of a pipeline."""
        return self.showing(n) if self.num_models > 1 else contextlib.nullcontext()

    def parameters(self) -> dict[str, Tensor]:
        """Those that this process answers for."""
        return {name: p for name, p in self.module.named_parameters() if self._is_mine(name) and not p.is_meta}

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of theirs."""
        return {name: None if p.grad is None else clone(p.grad) for name, p in self.parameters().items()}

    def state(self) -> Outcome:
        """What this process answers for, copied."""
        return Outcome(
            {},
            self.gradients(),
            {name: clone(p) for name, p in self.parameters().items()},
            {name: clone(b) for name, b in self.module.named_buffers() if self._is_mine(name) and not b.is_meta},
            {name: clone(v) for name, v in attributes(self.module).items() if self._is_mine(name)},
        )

    def collected(self) -> Outcome:
        """What all processes answer for, on the one that leads. Every process calls it."""
        state = self.state()
        for other in self.cluster.group.gather_objects(state)[1:]:
            for kind in ("gradients", "parameters", "buffers", "attributes"):
                getattr(state, kind).update(getattr(other, kind))
        return state

    def _is_mine(self, name: str) -> bool:
        """Whether this process answers for a parameter, a buffer or an attribute."""
        stages = self.stages_of(name)
        return (self.cluster.stage_map.owner(stages[0]) if stages else 0) == self.cluster.rank

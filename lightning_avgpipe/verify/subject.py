"""The subject: what verification asks of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.engine.weighting import LossWeight
from lightning_avgpipe.planning import Plan

__all__ = ["Subject"]


class Subject(Protocol):
    """A strategy whose training is verified; its members are documented there."""

    plan: Plan | None
    seed: int
    optimizers: list[Optimizer]

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...
    @property
    def precision_plugin(self) -> Precision: ...
    @property
    def root_device(self) -> torch.device: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_pipelines(self) -> int: ...
    @property
    def num_models(self) -> int: ...
    @property
    def clears_gradients(self) -> bool: ...
    @property
    def loss_is_mean(self) -> bool: ...
    @property
    def loss_weight(self) -> LossWeight | None: ...
    @property
    def step_log(self) -> Any: ...
    def barrier(self, name: str | None = None) -> None: ...
    def stages_of(self, name: str) -> Sequence[int]: ...
    def parallel_model(self, number: int) -> AbstractContextManager[nn.Module]: ...

"""A run of the trainer: the work of the strategy from set-up to teardown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_avgpipe.planning import Plan
from lightning_avgpipe.strategy.gradient_check import GradientCheck, OneModel
from lightning_avgpipe.strategy.parallel_models import check_number
from lightning_avgpipe.strategy.surroundings import Surroundings

Own = Callable[..., Any]  # Lightning's own method of the same name


class Run(Protocol):
    """A run of the trainer, from its set-up until the next one begins.

    Each method is called by the strategy's method of the same name, and ``own`` is Lightning's method.

    Attributes:
        plan: stages with their units, parameters and boundary values; None where there are none, or not yet.
        check: check of gradients before a step.
    """

    @property
    def check(self) -> GradientCheck: ...
    @property
    def plan(self) -> Plan | None: ...
    def setup(self, own: Own) -> None: ...
    def model_to_device(self, own: Own) -> None: ...
    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any: ...
    def needs(self, batch: Any, rank: int) -> frozenset[str] | None: ...
    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any: ...
    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any: ...
    def end_iteration(self) -> None: ...
    def showing(self, number: int | None) -> AbstractContextManager[None]: ...
    def teardown(self) -> None: ...


class PassthroughRun:
    """A run in which everything is as with Lightning's own strategy for one device.

    It has one process, with one stage and one micro-batch or steps that run whole.

    Args:
        around: trainer, connection and options of the run.
    """

    plan: Plan | None = None

    def __init__(self, around: Surroundings) -> None:
        wanted, module = around.configuration.options.averaging.on_nonfinite, around.trainer.lightning_module
        self.check = GradientCheck(around.trainer, around.cluster, wanted, OneModel(module))
        self._around = around

    def setup(self, own: Own) -> None:
        """Call Lightning's own set-up."""
        own(self._around.trainer)

    def model_to_device(self, own: Own) -> None:
        """Give contents to everything on meta, and move the module to the device."""
        self._around.state.fill()
        own()

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Move the batch with its transfer hooks."""
        return own(batch, device, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """Return None: all tensors of a batch are needed."""
        return None

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's own step."""
        return own(*args, **kwargs)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Run Lightning's own optimizer step, unless a gradient is infinite or NaN."""
        return own(optimizer, self.check.after(closure), model, **kwargs)

    def end_iteration(self) -> None:
        """Apply the changes that were asked for."""
        self._around.configuration.take_over(self._around.cluster)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Return a context within which the module is the only model, which is also the reference."""
        check_number(number or 0, 1)
        return contextlib.nullcontext()

    def teardown(self) -> None:
        """Do nothing."""

"""A run of the trainer: what the strategy does from set-up to teardown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_avgpipe.planning import Plan
from lightning_avgpipe.strategy.checkpoint_state import State
from lightning_avgpipe.strategy.gradient_check import GradientCheck, OneModel
from lightning_avgpipe.strategy.parallel_models import check_number
from lightning_avgpipe.strategy.surroundings import Surroundings

Own = Callable[..., Any]  # Lightning's own method of the same name


class Run(Protocol):
    """A run of the trainer, from its set-up until the next one begins.

    Methods are called by the strategy's of the same name, and get Lightning's own.

    Attributes:
        state: what checkpoints save and load.
        plan: the stages with their units, parameters and boundary values; None where there are none, or not yet.
        check: of gradients before a step.
    """

    @property
    def state(self) -> State: ...
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
    """One process, one stage, one micro-batch, or steps that run whole: everything is as with Lightning's own strategy.

    Also what there is before the set-up of any other run.

    Args:
        around: what it finds.
    """

    plan: Plan | None = None
    state: State

    def __init__(self, around: Surroundings) -> None:
        self.state = around.before
        wanted, module = around.configuration.options.on_nonfinite, around.trainer.lightning_module
        self.check = GradientCheck(around.trainer, around.cluster, wanted, OneModel(module))
        self._around = around

    def setup(self, own: Own) -> None:
        """Lightning's own set-up."""
        own(self._around.trainer)

    def model_to_device(self, own: Own) -> None:
        """The module goes to the device, and what has no contents gets them before."""
        self._around.before.fill()
        own()

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """The batch, after its transfer hooks."""
        return own(batch, device, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """All tensors of a batch."""
        return None

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own step."""
        return own(*args, **kwargs)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Lightning's own, unless a gradient is no number."""
        return own(optimizer, self.check.after(closure), model, **kwargs)

    def end_iteration(self) -> None:
        """What was asked for comes now."""
        self._around.configuration.take_over(self._around.cluster)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Within this context the module is the model of one pipeline; None: the reference. There is one model."""
        check_number(number or 0, 1)
        return contextlib.nullcontext()

    def teardown(self) -> None:
        """Nothing is to be given back."""

"""Whole steps: those that cannot be cut into micro-batches, and run as they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["why_whole"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def why_whole(module: pl.LightningModule) -> str | None:
    """Why the steps of a module run whole; None if a pipeline may run them.

    A pipeline decides when a backward or an optimizer runs, and which samples a step sees. A module that decides this
    itself gets its way: its steps run as they are written.
    """
    if not module.automatic_optimization:
        return "uses manual optimization, in which training_step itself runs backwards and optimizers"
    if is_overridden("backward", module):
        return "overrides backward()"
    for name in _STEPS:
        step = getattr(module, name)
        if _takes_iterator(getattr(step, "__func__", step)):
            return f"takes dataloader_iter in {name}, which reads batches itself"
    return None


@functools.lru_cache(maxsize=64)
def _takes_iterator(step: Callable[..., Any]) -> bool:
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)

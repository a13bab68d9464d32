"""Trainers without bars and banners."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.planning import Plan
from tests.driver import accumulate, assert_same_parameters


def trainer(**options: Any) -> L.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return L.Trainer(**{**defaults, **options})


def pipeline(
    num_stages: int = 2, devices: int = 1, strategy: dict[str, Any] | None = None, **options: Any
) -> L.Trainer:
    """The same with stages, whose plan does not depend on the machine."""
    strategy = {"costs": "flops", "num_stages": num_stages, **(strategy or {})}
    return trainer(devices=devices, strategy=AvgPipeStrategy(**strategy), **options)


def assert_defaults_equal_accumulation(module: L.LightningModule, batch: Any, num_stages: int, **strategy: Any) -> Plan:
    """Train on a batch twice, with options at their defaults: the weights must be those of one process, bit for bit.

    Those of copied parameters, whose gradients are summed in another order, only to rounding: all then, since the
    second step depends on them.

    Returns:
        The plan that was made.
    """
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    plain.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    stages = AvgPipeStrategy(num_stages=num_stages, **strategy)
    data: Any = [copy.deepcopy(batch), copy.deepcopy(batch)]
    trainer(strategy=stages, max_epochs=1).fit(module, DataLoader(data, batch_size=None))
    plan = stages.plan
    assert plan is not None and plan.forecast is not None and plan.measured
    optimizer: Any = plain.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        accumulate(plain, copy.deepcopy(batch), plan.forecast.num_microbatches)
        optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), before.parameters(), strict=True))
    assert_same_parameters(plain, module, exact=not plan.copied)
    return plan

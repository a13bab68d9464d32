"""Trainers without bars and banners."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_avgpipe import AvgPipeStrategy


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
    strategy = {"costs": "flops", **(strategy or {})}
    return trainer(devices=devices, strategy=AvgPipeStrategy(num_stages=num_stages, **strategy), **options)

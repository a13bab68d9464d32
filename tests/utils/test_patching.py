"""Attributes that are replaced for a while."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.utils.patching import replaced


def test_a_scheduler_finds_its_mark_on_a_step_that_is_replaced() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = optimizer.step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    with replaced(optimizer, "step", watched), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]

"""Streams of parallel pipelines where there are none; with streams see ``simulated/test_training.py``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe import Averaging
from tests.models import MLP, loader
from tests.trainers import pipeline


def trained(**strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = MLP()
    runner = pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 2, **strategy}, max_epochs=1)
    runner.fit(model, loader(MLP, 24, 4))
    return dict(model.state_dict())


def test_on_the_host_pipelines_take_turns_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ours = trained(averaging=Averaging(streams=True))
    assert [r.message for r in caplog.records if "Averaging(streams=True)" in r.message] == [
        "Averaging(streams=True): pipelines take turns, since cpu has no streams"
    ]
    for name, tensor in trained().items():
        assert torch.equal(ours[name], tensor), name

"""Metric objects know their device; on an accelerator see ``simulated/test_training.py``."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, Metric

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.metric_objects import tell_device
from tests.models import MLP, loader
from tests.trainers import pipeline


class Judge(Metric):
    """A metric with weights, a buffer, a state and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))
        self.add_state("total", torch.zeros(1))
        self.add_state("parts", [])

    def update(self, x: Any) -> None:
        self.parts.append(self.net(x) * self.scale)

    def compute(self) -> Any:
        return self.total


def test_modules_and_states_of_metrics_are_told_their_device_and_weights_stay() -> None:
    module, inner, judge = L.LightningModule(), L.LightningModule(), Judge()
    module.inner, module.judge = inner, judge
    judge.update(torch.ones(2, 4))
    tell_device(module, torch.device("meta"))
    assert {module.device.type, inner.device.type, judge.device.type} == {"meta"}
    assert judge.total.is_meta and judge.parts[0].is_meta
    assert not (judge.net.weight.is_meta or judge.scale.is_meta)
    assert [name for name, _ in judge.named_parameters()] == ["net.weight", "net.bias"]


class Counting(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()


def test_a_metric_object_without_contents_is_refused_by_name() -> None:
    runner = pipeline(max_epochs=1)
    with runner.init_module(empty_init=True):
        module = Counting()
    with pytest.raises(ConfigurationError, match=r"the metric object 'seen' was built without contents"):
        runner.fit(module, loader(MLP, 8, 4))

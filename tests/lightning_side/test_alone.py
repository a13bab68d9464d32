"""A step that would gather over processes trains as on one device: all stages work on the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import all_reduce as all_reduce_with_gradient
from torchmetrics import MeanMetric

from tests import processes
from tests.elastic.models import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline


def over_processes(value: Tensor) -> Tensor:
    """As losses and layers of many libraries do it."""
    if dist.is_available() and dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value


class _SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return over_processes(gradient)


class Gathers(MLP):
    """In the step, in a layer's backward, and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.metric = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _SumsGradients.apply(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.center = 0.9 * self.center + 0.1 * over_processes(out.detach().mean(0))
        if dist.is_initialized():
            out = all_reduce_with_gradient(out) / dist.get_world_size()
        gathered = self.all_gather(out, sync_grads=True)
        assert gathered.shape == out.shape
        self.log("mean", self.metric(out.mean()), sync_dist=True)
        return (out - self.center - batch[1]).square().mean()

    def on_before_backward(self, loss: Tensor) -> None:
        over_processes(loss.detach())


def trained(devices: int, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gathers()
    strategy = {"num_microbatches": 2, "timeout": "30s", **options}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(MLP, 32, 8))
    return dict(model.state_dict())


def on_two(rank: int) -> Any:
    found = [trained(2, costs="measured"), trained(2, recompute=True, num_pipelines=2)]
    assert dist.is_initialized()
    return found


def test_a_step_that_gathers_over_processes_trains_as_in_one_process(tmp_path: Path) -> None:
    expected = [trained(1), trained(1, recompute=True, num_pipelines=2)]
    for found in processes.results(processes.run(2, on_two, folder=tmp_path)):
        for weights, alone in zip(found, expected, strict=True):
            assert_equal(weights, alone)


def asks_nobody(rank: int) -> None:
    class Insists(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            dist.all_reduce(loss.detach())
            return loss

    with pytest.raises(Exception, match="Default process group has not been initialized"):
        pipeline(2, 2, {"timeout": "30s"}, max_epochs=1).fit(Insists(), loader(MLP, 16, 8))


def test_a_collective_without_asking_is_refused_as_on_one_device(tmp_path: Path) -> None:
    processes.results(processes.run(2, asks_nobody, folder=tmp_path))

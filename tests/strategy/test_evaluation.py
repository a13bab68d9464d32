"""Evaluations call what they want: other units than training, larger or smaller ones, or hardly any."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from tests.trainers import trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def value(self, batch: Tensor) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.value(batch).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class DecodesToo(Base):
    def value(self, batch: Tensor) -> Tensor:
        return self.decoder(self(batch))


class TrainsByWeights(Base):
    """Training calls no module, so what an evaluation calls as a whole lies on several stages."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        block: Any
        for block in self.net.blocks:
            batch = F.linear(batch, block.weight, block.bias).relu()
        return batch.square().mean()


class EvaluatesByWeights(Base):
    def value(self, batch: Tensor) -> Tensor:
        block: Any
        for block in self.net.blocks:
            batch = F.linear(batch, block.weight)
        return batch


class EvaluatesOneUnit(Base):
    """Fewer units than stages."""

    def value(self, batch: Tensor) -> Tensor:
        return self.net.blocks[4](batch)


class EvaluatesNothing(Base):
    """No unit at all."""

    def value(self, batch: Tensor) -> Tensor:
        return batch


def data(count: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader([torch.randn(8, 16) for _ in range(count)], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "sanity"),
    [
        (DecodesToo, 2), (TrainsByWeights, 2), (EvaluatesByWeights, 0), (EvaluatesOneUnit, 2),
        (EvaluatesNothing, 0),
    ],
)  # fmt: skip
def test_a_validation_may_call_other_units_than_training(model: type[Base], sanity: int) -> None:
    piped = model()
    plain, found = copy.deepcopy(piped), []
    for module, options in ((piped, {"strategy": AvgPipeStrategy(num_stages=3)}), (plain, {})):
        runner = trainer(max_epochs=1, num_sanity_val_steps=sanity, **options)
        runner.fit(module, data(2), data(1))
        found.append(float(runner.callback_metrics["value"]))
    assert found[0] == pytest.approx(found[1], abs=1e-6)

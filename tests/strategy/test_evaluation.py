"""Evaluations call what they want: other units than training, larger or smaller ones, or hardly any."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainers import both


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def value(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.value(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class DecodesToo(Base):
    def value(self, batch: Tensor) -> Tensor:
        return self.decoder(self.net(batch))


class TrainsByWeights(Base):
    """Training calls no module, so what an evaluation calls as a whole lies on several stages."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.net:
            batch = F.linear(batch, block[0].weight, block[0].bias).relu()
        return batch.square().mean()


class EvaluatesByWeights(Base):
    def value(self, batch: Tensor) -> Tensor:
        for block in self.net:
            batch = F.linear(batch, block[0].weight)
        return batch


class EvaluatesOneUnit(Base):
    """Fewer units than stages."""

    def value(self, batch: Tensor) -> Tensor:
        return self.net[4](batch)


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
    one, other = both(model, data(2), data(1), num_stages=3, max_epochs=1, num_sanity_val_steps=sanity)
    expected, found = (float(runner.callback_metrics["value"]) for runner in (one, other))
    assert found == pytest.approx(expected, abs=1e-6)

"""The tuner measures, chooses and leaves no trace: training goes on as if its choice had been given by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.callbacks import tuner as tuner_module
from lightning_avgpipe.errors import ConfigurationError, TuningError
from lightning_avgpipe.runtime.stage import Stage
from lightning_avgpipe.tuning import Corrected, Prediction, Profile, Result, Setting
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline, trainer


class Liking:
    """A predictor that likes some settings, in this order, and the others less."""

    name = "corrected"

    def __init__(self, *liked: Setting) -> None:
        self._liked = liked

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        memory = Corrected().predict(profile, setting).memory
        per_batch_s = 1.0 + self._liked.index(setting) if setting in self._liked else 100.0 - setting.num_pipelines
        return Prediction(per_batch_s * setting.num_pipelines, per_batch_s, memory)


@pytest.fixture
def liking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the choice independent of the machine."""

    def like(*settings: Setting) -> None:
        monkeypatch.setitem(tuner_module.PREDICTORS, "corrected", Liking(*settings))

    return like


class Eventful(Regression):
    """Everything that an iteration may change: buffers, attributes, metrics, random numbers of all kinds, its batch."""

    instances = 0

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout, self.three = nn.Dropout(0.3), nn.Linear(8, 8)
        self.error = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.calls = {"step": 0, "transfer": 0, "start": 0, "backward": 0}

    @staticmethod
    def example(size: int) -> Any:
        return {"x": torch.randn(size, 8), "y": torch.randn(size, 8)}

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.dropout(torch.relu(self.two(self.norm(torch.relu(self.one(x)))))))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["transfer"] += 1
        batch["x"] += random.random() + np.random.rand()
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls["start"] += 1
        self.log("started", float(self.calls["start"]))

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls["backward"] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls["step"] += 1
        type(self).instances += 1
        y = batch.pop("y")
        loss = (self(batch["x"]) - y).square().mean()
        self.losses.append(1.0)
        self.error(loss.detach())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class Stream(IterableDataset[Any]):
    """Without a length, and every sample is drawn once."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._samples):
            self.drawn += 1
            yield {"x": torch.randn(8), "y": torch.randn(8)}


class Witness(L.Callback):
    """What there is when each iteration begins, by name, and the order in which hooks are called."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append(state(trainer, pl_module, batch))


def state(trainer: L.Trainer, module: Any, batch: Any = None) -> dict[str, Any]:
    """Everything by name."""
    found: dict[str, Any] = {f"tensor {n}": t.detach().clone() for n, t in module.state_dict().items()}
    found |= {f"gradient {n}": None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    if batch is not None:
        found |= {f"batch {name}": tensor.clone() for name, tensor in batch.items()}
    for i, optimizer in enumerate(trainer.optimizers):
        found |= {f"optimizer {i} {k} {name}": v for k, s in optimizer.state_dict()["state"].items() for name, v in s.items()}
        found[f"rate {i}"] = optimizer.param_groups[0]["lr"]
        found[f"optimizer {i} attributes"] = sorted(vars(optimizer))
    found["generators"] = (torch.get_rng_state(), repr(np.random.get_state()), repr(random.getstate()))
    found["progress"] = repr(trainer.fit_loop.state_dict())
    found["step"] = trainer.global_step
    found["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["attributes"] = {n: v for n, v in vars(module).items() if n in ("losses", "calls", "_current_fx_name")}
    found["attributes"] = repr(found["attributes"])
    found["names"] = sorted(n for n in vars(module))
    found["metric"] = repr((module.error._update_count, module.error.mean_value, module.error.weight))
    found["class"] = type(module).instances
    found["logged"] = sorted(trainer.strategy._log._checked, key=str)
    return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_same(one[name], other[name], f"{where} {name}")
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, where)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def fitted(callbacks: list[Any], data: Any, strategy: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Train an eventful model; what was there at each iteration and at the end."""
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    Eventful.instances = 0
    model, witness = Eventful(), Witness()
    options = {"max_epochs": 2, "limit_val_batches": 0, **options}
    runner = pipeline(2, strategy=strategy, callbacks=[*callbacks, witness], **options)
    runner.fit(model, data())
    return {"iterations": witness.seen, "end": state(runner, model)}


def sized() -> Any:
    return loader(Eventful, 40, 8, shuffle=True)


def unsized() -> Any:
    return DataLoader(Stream(40), 8)


def by_hand(setting: Setting) -> dict[str, Any]:
    return {
        "num_pipelines": setting.num_pipelines,
        "num_microbatches": setting.num_microbatches,
        "advance": setting.advance,
    }


ALONE, TOGETHER = Setting(4, 1, 0), Setting(2, 3, 1)


@pytest.mark.parametrize("data", [sized, unsized])
@pytest.mark.parametrize("setting", [ALONE, TOGETHER], ids=str)
@pytest.mark.parametrize("limit", [None, 1])
def test_training_goes_on_as_if_the_choice_had_been_given_by_hand(
    setting: Setting, data: Any, limit: int | None, liking: Callable[..., None], tmp_path: Path
) -> None:
    liking(setting)
    tuner = AvgPipeTuner(3, [2, 4], profile_batches=6, refine=2, dirpath=tmp_path)
    options = {} if limit is None else {"limit_train_batches": limit}
    found = fitted([tuner], data, **options)
    expected = fitted([], data, by_hand(tuner.result.choice.setting), **options)
    assert len(found["iterations"]) > 1
    assert_same(found, expected)

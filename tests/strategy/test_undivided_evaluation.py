"""Steps of evaluation that stages cannot run, such as with ``generate()``: rank 0 does, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.strategy.steps import NUM_MICROBATCHES, Layers
from tests.trainers import trainer
from tests.zoo import transformers_models
from tests.zoo.transformers_models import HuggingFace


class Twice(Layers):
    """Runs its layers twice in validation, and in prediction on two versions of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def through(self, x: Tensor) -> Tensor:
        return super().through(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.through(batch[0]).mean())
        self.log("val_loss", self.loss((batch[0] + 0.1, batch[1])))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) + self.through(-batch[0])) / 2

    @staticmethod
    def data() -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.utils.data.TensorDataset(*torch.randn(2, 16, 8, generator=generator)), batch_size=8)


class Seeds(Twice):
    """Seeds torch's random numbers in validation, which the stages of a pipeline cannot do together."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(0)
        noise = torch.randn(batch[0].shape)
        self.log("val_loss", self.loss((batch[0] + noise, batch[1])))


class OnMeta(Twice):
    """Its weights are made stage by stage, so that no process has all of them."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()

    def configure_model(self) -> None:
        """The weights are there already, on meta."""


class Generates(HuggingFace):
    """Generates text in validation, with a cache of keys and values."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(transformers_models.gpt2())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_tokens", self.predict_step(batch, batch_idx).double().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        prompt = batch["input_ids"]
        made: Tensor = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=4, max_new_tokens=4, do_sample=False
        )
        return made

    @staticmethod
    def data() -> Any:
        torch.manual_seed(4)
        return DataLoader([transformers_models.texts(8, 5) for _ in range(2)], batch_size=None)


def evaluated(rank: int, make: Callable[[], Any], devices: int, num_stages: int = 2) -> Any:
    """What validation logs while a model trains, what a test says then, and what the model predicts."""
    torch.manual_seed(5)
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)
    runner, module = trainer(strategy=strategy, devices=devices, max_epochs=1), make()
    runner.fit(module, make.data(), make.data())  # type: ignore[attr-defined]
    logged = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("val")}
    (tested,) = runner.test(module, make.data(), verbose=False)  # type: ignore[attr-defined]
    logged |= {f"tested {name}": value for name, value in tested.items()}
    return logged, runner.predict(module, make.data())  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [Twice, Seeds, pytest.param(Generates, marks=pytest.mark.slow)])
def test_what_stages_cannot_do_is_evaluated_as_on_one_device(make: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="So rank 0 runs it for all stages"):
        one = evaluated(0, make, 1)
    first, other = processes.results(processes.run(2, evaluated, make, 2, folder=tmp_path))
    logged, predicted = evaluated(0, make, 1, num_stages=1)
    for found in (one, first):
        assert found[0] == pytest.approx(logged, rel=1e-6)
        torch.testing.assert_close(found[1], predicted)
    assert first[0] == other[0]  # all ranks know what was logged


def test_weights_that_began_on_meta_come_as_they_are_used(tmp_path: Path) -> None:
    (one, predicted), (other, _) = processes.results(processes.run(2, evaluated, OnMeta, 2, folder=tmp_path))
    assert one == other == pytest.approx(evaluated(0, OnMeta, 1)[0], rel=1e-6)
    assert [len(part) for part in predicted] == [8, 8]

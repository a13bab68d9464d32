"""Data arrive as on one device, however they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests import processes
from tests.driver import assert_same_parameters
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer


class Samples(Dataset[Any]):
    """Random augmentation: an input and its target belong together only if both were made in one place."""

    def __init__(self, size: int = 20) -> None:
        self.inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noisy = self.inputs[i] + torch.randn(8)
        return noisy, noisy.sin()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Samples(10)


def masked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Random collation, as in masked language modelling: the targets are what the mask has hidden."""
    inputs = torch.stack([x for x, _ in samples])
    mask = torch.rand(inputs.shape) < 0.5
    return inputs.masked_fill(mask, 0.0), inputs.masked_fill(~mask, 0.0)


class Agreeing(MLP):
    """Transfer hooks that change a batch; notes what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, targets = batch if isinstance(batch, (list, tuple)) and len(batch) == 2 else batch[0]
        return inputs + 0.01 * torch.randn_like(inputs), targets

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.seen.append(batch[0].clone())


class Module(L.LightningDataModule):
    """A new dataloader every epoch, of another order."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.trainer.current_epoch)
        return DataLoader(Samples(), batch_size=6, shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return loader(MLP, 8, 4)


def sampler() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 21.0), 12, generator=torch.Generator().manual_seed(2))


SOURCES: dict[str, Any] = {
    "workers": lambda: DataLoader(Samples(), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "collation": lambda: DataLoader(Samples(), batch_size=6, shuffle=True, collate_fn=masked),
    "sampler": lambda: DataLoader(Samples(), batch_size=6, sampler=sampler()),
    "module": Module,
}
OPTIONS = {"module": {"reload_dataloaders_every_n_epochs": 1}, "overfit": {"overfit_batches": 1}}


def fit(make: Any, name: str) -> tuple[Agreeing, int]:
    torch.manual_seed(3)
    model, runner = Agreeing(), make(**OPTIONS.get(name, {}))
    source = SOURCES.get(name, SOURCES["collation"])()
    torch.manual_seed(4)
    if isinstance(source, L.LightningDataModule):
        runner.fit(model, datamodule=source)
    else:
        runner.fit(model, source, loader(MLP, 4, 4))
    return model, runner.global_step


NAMES = [*SOURCES, "overfit"]


def assert_alike(expected: tuple[Agreeing, int], found: tuple[Any, int]) -> None:
    assert found[1] == expected[1]
    for a, b in zip(expected[0].seen, found[0].seen, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_batches_are_read_and_trained_on_as_on_one_device(name: str) -> None:
    expected, found = fit(trainer, name), fit(pipeline, name)
    assert_alike(expected, found)
    assert_same_parameters(expected[0], found[0], exact=False)


class Combined(MLP):
    """Takes what any combination of loaders gives: a dict with a loader that may have ended, or one of them."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if isinstance(batch, dict):
            x, y = batch["a"]
            return super().training_step((x, y + batch["b"][1].mean()), batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if isinstance(batch, dict):
            batch = batch["a"] if batch["a"] is not None else batch["b"]
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_combined_loaders_train_as_on_one_device(mode: Any) -> None:
    models = []
    for make in (trainer, pipeline):
        torch.manual_seed(3)
        models.append(Combined())
        # with batches of one size, a micro-batch pairs the same samples; the mean over "b" is over a micro-batch
        options = {} if make is trainer else {"strategy": {"num_microbatches": 1}}
        data = CombinedLoader({"a": loader(MLP, 12, 4), "b": loader(MLP, 20, 4, seed=1)}, mode)
        make(max_epochs=1, **options).fit(models[-1], data)
    assert_same_parameters(*models, exact=False)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_combined_loaders_validate_as_on_one_device(mode: Any) -> None:
    found = []
    for make in (trainer, pipeline):
        torch.manual_seed(3)
        data = CombinedLoader({"a": loader(MLP, 12, 4), "b": loader(MLP, 20, 4, seed=1)}, mode)
        found.append(make().validate(Combined(), data, verbose=False))
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


def fit_all(rank: int) -> list[tuple[list[Tensor], int, dict[str, Tensor]]]:
    torch.set_num_threads(1)
    found = []
    for name in NAMES:
        model, steps = fit(lambda **options: pipeline(2, 2, **options), name)
        found.append((model.seen, steps, model.state_dict()))
    return found


@pytest.mark.slow
def test_in_two_processes_inputs_and_targets_are_those_of_one_reader(tmp_path: Path) -> None:
    zero, other = processes.results(processes.run(2, fit_all, folder=tmp_path))
    for name, (seen, steps, weights), (_, other_steps, other_weights) in zip(NAMES, zero, other, strict=True):
        expected, expected_steps = fit(trainer, name)
        assert steps == other_steps == expected_steps, name
        assert all(torch.equal(a, b) for a, b in zip(expected.seen, seen, strict=True)), name
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(weights[key], other_weights[key])

"""Loops see what they would on one device: data, samplers, limits, results; and evaluations call what they want."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests import processes
from tests.comparing import assert_close, state
from tests.models import MLP, Regression, loader
from tests.trainers import both, pipeline, trainer

Make = Callable[..., L.Trainer]


def combined(mode: str) -> CombinedLoader:
    """Three batches and two; batches of the second loader are smaller at its end."""
    return CombinedLoader({"a": loader(MLP, 12, 4), "b": loader(MLP, 8, 4, seed=1)}, mode)  # type: ignore[arg-type]


class Several(MLP):
    """Takes what any loaders give, and notes what hooks and callbacks get of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def loss_of(self, batch: Any) -> Tensor:
        """Of all parts that are there; a loader that has ended gives None."""
        if not isinstance(batch, dict):
            return self.loss(batch)
        parts = [part for part in (batch["a"], batch["b"]) if part is not None]
        return self.loss(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss_of(batch)
        self.log("val_loss", loss)
        return {"loss": loss, "index": 10 * dataloader_idx + batch_idx}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0]) + dataloader_idx

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((outputs["index"], outputs["loss"].item()))


class Outputs(L.Callback):
    """Notes what a callback gets of the results of steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(outputs and (outputs["index"], outputs["loss"].item()))


class Backwards(Sampler[list[int]]):
    """A user's own batch sampler, with batches of several sizes."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([11, 10, 9, 8, 7, 6], [5, 4, 3, 2], [1, 0])


class Growing(L.LightningModule):
    """A new loader with more batches in every second epoch, made by the module."""

    def train_dataloader(self) -> Any:
        self.reloads = getattr(self, "reloads", 0) + 1
        return loader(MLP, 4 * self.reloads, 4, seed=self.reloads)


class Reloading(Growing, Several):
    pass


class Recomputed(MLP):
    """Logs inside of code that the backward runs once more."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = self.layers[:4], self.layers[4:]
        self.logged = 0

    def tail(self, x: Tensor) -> Tensor:
        y = self.back(x)
        self.logged += 1
        self.log("inside", y.square().mean(), on_step=True, on_epoch=True)
        self.log("sum", y.square().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.tail, self.front(x), use_reentrant=self.reentrant)


class RecomputedReentrantly(Recomputed):
    reentrant = True


def result(runner: L.Trainer, model: L.LightningModule) -> dict[str, Any]:
    return {
        "steps": (runner.global_step, runner.current_epoch),
        "metrics": {name: value.item() for name, value in runner.callback_metrics.items()},
        "weights": state(model),
        "seen": list(getattr(model, "seen", [])),
    }


def fitted(make: Make, model: L.LightningModule, *loaders: Any, **options: Any) -> dict[str, Any]:
    runner = make(**{"max_epochs": 2, **options})
    runner.fit(model, *loaders)
    return result(runner, model)


def trained_on_combined(make: Make, mode: str) -> dict[str, Any]:
    lengths = {"a": 12, "b": 12 if mode == "max_size" else 8}
    drawing = CombinedLoader({name: DataLoader(Samples(length), 4) for name, length in lengths.items()}, mode)  # type: ignore[arg-type]
    return fitted(make, Several(), drawing, combined(mode))


def validated_on_combined(make: Make, mode: str) -> dict[str, Any]:
    outputs, model = Outputs(), Several()
    runner = make(callbacks=[outputs])
    metrics = runner.validate(model, combined(mode), verbose=False)
    return {"metrics": metrics, "seen": model.seen, "outputs": outputs.seen}


def validated_on_several(make: Make) -> dict[str, Any]:
    outputs, model = Outputs(), Several()
    loaders = [loader(MLP, 12, 4), loader(MLP, 6, 4, seed=1)]
    runner = make(callbacks=[outputs], limit_val_batches=2, max_epochs=1)
    runner.fit(model, loader(MLP, 8, 4), loaders)
    found = {**result(runner, model), "outputs": list(outputs.seen)}
    found["tested"] = runner.validate(model, loaders, verbose=False)
    return found


def validated_again(make: Make, mode: str) -> dict[str, Any]:
    """Use one loader in several runs; Lightning puts into it what a run reads."""
    loaders, model = combined(mode), Several()
    runner = make(max_epochs=1)
    runner.fit(model, loader(MLP, 8, 4), loaders)
    found = {**result(runner, model), "validated": runner.validate(model, loaders, verbose=False)}
    runner.fit_loop.max_epochs = 2
    runner.fit(model, loader(MLP, 8, 4), loaders)
    return {**found, "again": result(runner, model)}


def predicted(make: Make) -> dict[str, Any]:
    loaders = CombinedLoader([loader(MLP, 12, 4), loader(MLP, 6, 4, seed=1)], "sequential")
    return {"predictions": make(limit_predict_batches=2).predict(Several(), loaders)}


def sampled(make: Make) -> dict[str, Any]:
    data = loader(MLP, 12, 4).dataset
    sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(1)), 5, drop_last=False)
    own, standard = (DataLoader(data, batch_sampler=batches) for batches in (Backwards(), sampler))
    return fitted(make, Several(), own, standard)


def reloaded(make: Make) -> dict[str, Any]:
    return fitted(make, Reloading(), max_epochs=5, reload_dataloaders_every_n_epochs=2)


def overfitted(make: Make) -> dict[str, Any]:
    return fitted(make, Several(), loader(MLP, 40, 8), loader(MLP, 20, 4), overfit_batches=0.4)


def augmented(make: Make) -> dict[str, Any]:
    return fitted(make, Several(), DataLoader(Samples(40), 8), limit_train_batches=3)


def augmented_between_validations(make: Make) -> dict[str, Any]:
    return fitted(make, Several(), DataLoader(Samples(40), 8), loader(MLP, 8, 4), val_check_interval=2)


class Refilled:
    """A loader of known length that fills the same memory for each batch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = torch.empty(8, 8), torch.empty(8, 8)
        for i in range(4):
            yield inputs.copy_(torch.linspace(i, i + 1, 64).view(8, 8)), targets.copy_(inputs.cos())


class Shuffled(CombinedLoader):
    """Reads by code of its own."""

    def __iter__(self) -> Any:
        super().__iter__()
        batches = zip(*map(iter, self.flattened), strict=True)
        return (({"a": a, "b": b}, i, 0) for i, (a, b) in enumerate(batches))


def read_by_own_code(make: Make) -> dict[str, Any]:
    data = {name: DataLoader(Samples(12), 4, shuffle=True) for name in ("a", "b")}
    return fitted(make, Several(), loader(MLP, 8, 4), Shuffled(data, "min_size"))


class ShowsBatches(Several):
    """Looks at the first batch of validation, as to draw a picture of it; such a hook runs on rank 0 only."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = [kept]

    def on_validation_epoch_end(self) -> None:
        batch = next(iter(self.kept[0] or self.trainer.val_dataloaders))
        self.seen.append(tree_leaves(batch)[0].sum().item())


class LooksAtData(L.Callback):
    """Looks at dataloaders between batches of training, on rank 0 alone and on every rank."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.val_dataloaders))
        next(iter(trainer.train_dataloader))


def looked_at(make: Make) -> dict[str, Any]:
    return fitted(make, ShowsBatches(), loader(MLP, 24, 4), loader(MLP, 8, 4), callbacks=[LooksAtData()])


class Mixes(Several):
    """Mixes each batch of training with the first one of the loader."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        other = next(iter(self.trainer.train_dataloader))
        return tuple(0.5 * (one + two) for one, two in zip(batch, other, strict=True))


def mixed(make: Make) -> dict[str, Any]:
    return fitted(make, Mixes(), loader(MLP, 24, 4))


def kept_and_looked_at(make: Make) -> dict[str, Any]:
    kept = combined("max_size_cycle")
    return fitted(make, ShowsBatches(kept), loader(MLP, 24, 4), kept)


class Samples(Dataset[Any]):
    """Random augmentation in this process: an input and its target belong together only if both were made in one place,
    and one batch more than needed would change the numbers of all that follow.
    """

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
    "weighted sampler": lambda: DataLoader(Samples(), batch_size=6, sampler=sampler()),
}


def read_from(make: Make, source: str) -> dict[str, Any]:
    loaders = SOURCES[source]()
    torch.manual_seed(4)
    return fitted(make, Agreeing(), loaders, loader(MLP, 4, 4))


def read_from_module(make: Make) -> dict[str, Any]:
    model, runner = Agreeing(), make(reload_dataloaders_every_n_epochs=1)
    torch.manual_seed(4)
    runner.fit(model, datamodule=Module())
    return result(runner, model)


def limited(make: Make) -> dict[str, Any]:
    loaders = loader(MLP, 40, 8), loader(MLP, 20, 4)
    return fitted(make, Several(), *loaders, limit_train_batches=0.6, limit_val_batches=0.5, val_check_interval=0.34)


CASES: dict[str, Callable[[Make], dict[str, Any]]] = {
    **{
        f"train {mode}": functools.partial(trained_on_combined, mode=mode)
        for mode in ("min_size", "max_size_cycle", "max_size")
    },
    **{
        f"validate {mode}": functools.partial(validated_on_combined, mode=mode)
        for mode in ("min_size", "max_size_cycle", "max_size", "sequential")
    },
    **{source: functools.partial(read_from, source=source) for source in SOURCES},
    "data module": read_from_module,
    "validate several": validated_on_several,
    "validate again": functools.partial(validated_again, mode="sequential"),
    "predict several": predicted,
    "samplers": sampled,
    "reload": reloaded,
    "overfit": overfitted,
    "limits": limited,
    "augmentation": augmented,
    "augmentation between validations": augmented_between_validations,
    "refilled memory": lambda make: fitted(make, Several(), Refilled()),
    "hooks that read": looked_at,
    "a hook that reads a kept loader": kept_and_looked_at,
    "a transfer hook that reads": mixed,
    "loader with code of its own": read_by_own_code,
    "recomputation": lambda make: fitted(make, Recomputed(), loader(MLP, 16, 8)),
    "reentrant recomputation": lambda make: fitted(make, RecomputedReentrantly(), loader(MLP, 16, 8)),
}
READ = {*SOURCES, "data module"}
SLOW = {"train max_size_cycle", "validate min_size", "validate max_size_cycle", "reentrant recomputation"}


def found(name: str, make: Make) -> dict[str, Any]:
    torch.manual_seed(3)
    return CASES[name](make)


def piped(devices: int = 1) -> Make:
    return functools.partial(pipeline, 2, devices, {"num_microbatches": 2})


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_stages_see_what_one_device_sees(name: str) -> None:
    assert_close(found(name, piped()), found(name, trainer))


@pytest.mark.slow
def test_two_processes_see_what_one_device_sees(tmp_path: Path) -> None:
    """Weights, metrics, predictions and results that a callback reads, everywhere."""
    zero, other = processes.everywhere(2, lambda: {name: found(name, piped(2)) for name in CASES}, folder=tmp_path)
    for name in CASES:
        expected = found(name, trainer)
        assert_close(zero[name], expected)
        # what hooks of rank 0 collect in the module is everybody's; batches it has itself
        shared = expected.keys() - ({"seen"} if name in READ else set())
        assert_close({key: other[name][key] for key in shared}, {key: expected[key] for key in shared})


def test_sequential_training_is_refused_as_by_lightning() -> None:
    for make in (trainer, piped()):
        with pytest.raises(ValueError, match="does not support the `CombinedLoader"):
            make().fit(Several(), combined("sequential"))


class Base(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def value(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.value(batch).mean())


class DecodesToo(Base):
    def value(self, batch: Tensor) -> Tensor:
        return self.decoder(self.net(batch))


class TrainsByWeights(Base):
    """Training calls no module, so what an evaluation calls as a whole lies on several stages."""

    def loss(self, batch: Tensor) -> Tensor:
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

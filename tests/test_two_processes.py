"""Stages in two real processes: the same numbers on every rank, and the same as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests import processes
from tests.averaging.models import assert_equal, state
from tests.models import MLP, MODELS, Regression, TinyTransformer, Transposing, UNet, loader
from tests.processes import num_processes, two_and_one
from tests.trainers import pipeline


def fit(rank: int, folder: Path, kind: type[Regression], **options: Any) -> dict[str, Any]:
    """Everything that a training leaves behind, from the point of view of one rank."""
    torch.manual_seed(5)
    model = kind("adamw")
    checkpoint = ModelCheckpoint(folder / "checkpoints", "{step}-{val_loss:.2f}", monitor="val_loss", save_last=True)
    loggers = CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tensorboard", version=0)
    runner = pipeline(
        2, num_processes(), {"num_microbatches": 3}, callbacks=[checkpoint, EarlyStopping("val_loss", patience=1)],
        enable_checkpointing=True, logger=list(loggers), log_every_n_steps=1, max_epochs=3, gradient_clip_val=0.1,
    )  # fmt: skip
    data = loader(kind, 20, 8, shuffle=True), loader(kind, 10, 4, seed=1)
    runner.fit(model, *data)
    return {
        "metrics": {key: value.item() for key, value in runner.callback_metrics.items()},
        "validated": runner.validate(model, data[1], verbose=False),
        "tested": runner.test(model, data[1], verbose=False, ckpt_path="best"),
        "weights": state(model),
        "best": Path(checkpoint.best_model_path).name,
        "step": runner.global_step,
        "predicted": runner.predict(model, data[1]),
        "of rank 0": (folder / "csv" / "version_0" / "metrics.csv").read_text() if rank == 0 else None,
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind is UNet else pytest.mark.slow) for kind in MODELS]
)
def test_two_processes_equal_one_bitwise(kind: type[Regression], tmp_path: Path) -> None:
    two, one = two_and_one(fit, tmp_path, kind)
    assert_equal(two[0], one)
    assert_equal(*({key: found[key] for key in found if key != "of rank 0"} for found in (two[1], one)))
    assert list((tmp_path / "two" / "tensorboard").rglob("events*"))


def trained(rank: int, folder: Path, make: Any, num_stages: int, *strategy: Any) -> tuple[Any, Any]:
    """Weights and metrics after an epoch, with a checkpoint."""
    torch.manual_seed(5)
    model = make()
    runner = pipeline(num_stages, num_processes(), *strategy, max_epochs=1)
    runner.fit(model, loader(type(model), 12, 6), loader(type(model), 6, 6))
    runner.save_checkpoint(folder / "last.ckpt")
    return state(model), {name: value.item() for name, value in runner.callback_metrics.items()}


def local_class() -> Any:
    class Pair(NamedTuple):
        x: Tensor
        y: Tensor

    return Pair


PAIR = local_class()
Function = Callable[[Tensor], Any]


class Unit(nn.Module):
    """A layer between two functions."""

    def __init__(self, before: Function, after: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.before, self.after = before, after

    def forward(self, x: Any) -> Any:
        return self.after(self.layer(self.before(x)))


def same(x: Tensor) -> Tensor:
    return x


# what the first unit returns, and how the second one reads it
CONJUGATED = (lambda x: torch.fft.fft(x).conj()), (lambda x: torch.fft.ifft(x).real)
LOCAL = (lambda x: PAIR(x, 2 * x)), (lambda pair: pair.x + pair.y)


class Normed(MLP):
    """Running statistics on both stages, and a counter that belongs to the step."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(0, 10, 2):
            self.layers[i] = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def returning(returned: Function, read: Function) -> MLP:
    """What the first of two units returns, and how the second one reads it."""
    model = MLP()
    model.layers = nn.Sequential(Unit(same, returned), Unit(read, same))
    return model


@pytest.mark.parametrize(
    ("make", "num_stages", "strategy"),
    [
        (lambda: TinyTransformer(dropout=0.2), 4, {}),  # two stages in each process
        (Normed, 2, {"num_microbatches": 2}),
        (lambda: returning(*CONJUGATED), 2, {"split_points": ["layers.1"]}),
        pytest.param(Transposing, 4, {"num_microbatches": 2}, marks=pytest.mark.slow),  # the order of dimensions
    ],
)
def test_weights_buffers_and_checkpoints_are_those_of_one(
    make: Any, num_stages: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    two, one = two_and_one(trained, tmp_path, make, num_stages, strategy)
    assert_equal(two, [one, one])
    assert make is not Normed or one[0]["steps"] == 4  # micro-batches
    saved = torch.load(tmp_path / "two" / "last.ckpt", weights_only=True)["state_dict"]
    assert_equal({name: saved[name] for name in one[0]}, one[0])


def refused(rank: int) -> str:
    with pytest.raises(Exception) as caught:  # a PeerError on the other rank
        pipeline(2, 2, {"split_points": ["layers.1"]}, max_epochs=1).fit(returning(*LOCAL), loader(MLP, 16, 8))
    return str(caught.value)


def test_a_class_that_other_processes_cannot_find_is_named_with_its_unit_on_all_ranks(tmp_path: Path) -> None:
    for said in processes.results(processes.run(2, refused, folder=tmp_path)):
        assert "unit 'layers.0' at models.py:" in said, said
        assert "Pair" in said and "Define its class at the top level of a module" in said, said
        assert "IndexError" not in said and "connection" not in said, said


class Stream(IterableDataset[Any]):
    """A stream without length that says on which ranks it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Any:
        (self.folder / f"read-{os.environ['LOCAL_RANK']}").touch()
        torch.manual_seed(0)
        for _ in range(5):
            inputs, targets = MLP.example(6)
            yield from zip(inputs, targets, strict=True)


def fit_stream(rank: int, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = MLP()
    runner = pipeline(2, 2, max_epochs=2)
    runner.fit(model, DataLoader(Stream(folder), batch_size=6))
    return runner.global_step, model.state_dict()


def test_only_rank_zero_reads_a_stream_and_all_end_with_it(tmp_path: Path) -> None:
    outcomes = processes.results(processes.run(2, fit_stream, tmp_path, folder=tmp_path))
    assert [step for step, _ in outcomes] == [10, 10]
    assert [path.name for path in tmp_path.glob("read-*")] == ["read-0"]


class Validations(Callback):
    count = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.count += not trainer.sanity_checking


def fit_limited(rank: int) -> tuple[int, int, float]:
    model = MLP()
    model.configure_optimizers = lambda: {  # type: ignore[method-assign]
        "optimizer": (optimizer := torch.optim.SGD(model.parameters(), lr=1.0)),
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9),
            "monitor": "val_loss",
            "interval": "step",
            "frequency": 2,
        },
    }
    validations = Validations()
    runner = pipeline(
        2, 2, max_epochs=-1, max_steps=7, limit_train_batches=4, limit_val_batches=1, val_check_interval=2,
        accumulate_grad_batches=2, callbacks=[validations], reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    runner.fit(model, loader(MLP, 80, 8, shuffle=True), loader(MLP, 16, 8))
    return runner.global_step, validations.count, runner.optimizers[0].param_groups[0]["lr"]


def test_limits_and_schedulers_count_alike_on_all_ranks(tmp_path: Path) -> None:
    two = processes.results(processes.run(2, fit_limited, folder=tmp_path))
    assert two[0] == two[1]
    assert two[0][:2] == (7, 7)
    assert two[0][2] < 1.0


def owned(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    """Names of the parameters that are really there while the pipeline trains, and of the optimizer's states."""
    model: Regression = MLP("adamw")
    seen: list[str] = []
    states: list[str] = []
    names = {parameter: name for name, parameter in model.named_parameters()}

    def look(*_: Any) -> None:
        seen.extend(name for name, p in model.named_parameters() if not p.is_meta)
        states.extend(names[parameter] for parameter in runner.optimizers[0].state)

    model.on_train_end = look  # type: ignore[method-assign]
    runner = pipeline(2, 2, max_steps=1)
    runner.fit(model, loader(MLP, 8, 8))
    assert not any(p.is_meta for p in model.parameters())
    return seen, states


def test_a_rank_holds_the_parameters_and_states_of_its_stage_only(tmp_path: Path) -> None:
    (last, last_states), (first, first_states) = processes.results(processes.run(2, owned, tmp_path, folder=tmp_path))
    everything = {name for name, _ in MLP().named_parameters()}
    assert set(first) | set(last) == everything
    assert not set(first) & set(last)
    assert set(first_states) == set(first)
    assert set(last_states) == set(last)

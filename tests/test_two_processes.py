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
from tests.averaging.models import assert_equal
from tests.models import MLP, MODELS, Regression, TinyTransformer, Transposing, UNet, loader
from tests.trainers import pipeline


def fit(rank: int, folder: Path, name: str, num_stages: int, devices: int, options: dict[str, Any]) -> dict[str, Any]:
    """Everything that a training leaves behind, from the point of view of one rank."""
    torch.manual_seed(5)
    model = {m.__name__: m for m in (*MODELS, Transposing)}[name](optimizer=options.get("optimizer", "sgd"))
    checkpoint = ModelCheckpoint(
        folder / "checkpoints", monitor="val_loss", filename="{step}-{val_loss:.2f}", save_last=True
    )
    runner = pipeline(
        num_stages,
        devices,
        {"num_microbatches": options.get("num_microbatches", 3)},
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=1)],
        enable_checkpointing=True,
        logger=[CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tensorboard", version=0)],
        log_every_n_steps=1,
        max_epochs=3,
        gradient_clip_val=options.get("gradient_clip_val"),
        accumulate_grad_batches=options.get("accumulate", 1),
    )
    data = loader(type(model), 20, 8, shuffle=True), loader(type(model), 10, 4, seed=1)
    runner.fit(model, *data)
    metrics = {key: value.item() for key, value in runner.callback_metrics.items()}
    validated = runner.validate(model, data[1], verbose=False)
    tested = runner.test(model, data[1], verbose=False, ckpt_path="best")
    predicted = runner.predict(model, data[1])
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "metrics": metrics,
        "validated": validated,
        "tested": tested,
        "predicted": predicted,
        "best": checkpoint.best_model_path,
        "rows": (folder / "csv" / "version_0" / "metrics.csv").read_text() if rank == 0 else None,
        "step": runner.global_step,
    }


def both(folder: Path, name: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The same training in two processes and in one."""
    for sub in ("two", "one"):
        (folder / sub).mkdir()
    two = processes.results(processes.run(2, fit, folder / "two", name, 2, 2, options, folder=folder))
    one = processes.results(processes.run(1, fit, folder / "one", name, 2, 1, options, folder=folder))[0]
    return two, one


@pytest.mark.parametrize(
    "name", [pytest.param(m.__name__, marks=() if m is UNet else pytest.mark.slow) for m in MODELS]
)
def test_two_processes_equal_one_bitwise(name: str, tmp_path: Path) -> None:
    two, one = both(tmp_path, name, optimizer="adamw", gradient_clip_val=0.1)
    for rank in two:
        assert rank["weights"].keys() == one["weights"].keys()
        for key, value in one["weights"].items():
            assert torch.equal(rank["weights"][key], value), key
        assert rank["metrics"] == one["metrics"]
        assert rank["validated"] == one["validated"]
        assert rank["tested"] == one["tested"]
        assert Path(rank["best"]).name == Path(one["best"]).name
        assert rank["step"] == one["step"]
    assert two[0]["best"] == two[1]["best"]
    assert two[0]["rows"] == one["rows"]
    assert all(torch.equal(a, b) for a, b in zip(two[0]["predicted"], one["predicted"], strict=True))
    assert list((tmp_path / "two" / "tensorboard").rglob("events*"))


def several_stages_each(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = TinyTransformer(dropout=0.2)
    pipeline(4, int(os.environ["WORLD_SIZE"]), max_epochs=1).fit(model, loader(TinyTransformer, 12, 6))
    return model.state_dict()


def test_two_stages_in_each_process_equal_four_in_one(tmp_path: Path) -> None:
    two = processes.results(processes.run(2, several_stages_each, tmp_path, folder=tmp_path))
    one = processes.results(processes.run(1, several_stages_each, tmp_path, folder=tmp_path))[0]
    for rank in two:
        assert all(torch.equal(rank[key], value) for key, value in one.items())


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


def fit_normed(rank: int, folder: Path) -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = Normed()
    runner = pipeline(2, int(os.environ["WORLD_SIZE"]), {"num_microbatches": 2}, max_epochs=1)
    runner.fit(model, loader(MLP, 16, 8), loader(MLP, 8, 8))
    runner.save_checkpoint(folder / "normed.ckpt")
    return model.state_dict(), {name: value.item() for name, value in runner.callback_metrics.items()}


def test_buffers_follow_the_stage_that_changes_them(tmp_path: Path) -> None:
    two = processes.results(processes.run(2, fit_normed, tmp_path, folder=tmp_path))
    saved = torch.load(tmp_path / "normed.ckpt", weights_only=True)["state_dict"]
    ((one, metrics),) = processes.results(processes.run(1, fit_normed, tmp_path, folder=tmp_path))
    assert one["steps"] == 4  # micro-batches
    for name, value in one.items():
        assert torch.equal(saved[name], value), name
        assert all(torch.equal(state[name], value) for state, _ in two), name
    assert two[0][1] == two[1][1] == metrics


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


@pytest.mark.slow
def test_the_order_of_dimensions_in_memory_survives_the_journey(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    outcomes = processes.run(2, fit, tmp_path / "two", "Transposing", 4, 2, {"num_microbatches": 2}, folder=tmp_path)
    one = processes.run(1, fit, tmp_path / "one", "Transposing", 1, 1, {"num_microbatches": 2}, folder=tmp_path)
    expected = processes.results(one)[0]
    for rank in processes.results(outcomes):
        for key, value in expected["weights"].items():
            assert torch.equal(rank["weights"][key], value), key


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


class Two(MLP):
    def __init__(self, returned: Function, read: Function) -> None:
        super().__init__()
        self.layers = nn.Sequential(Unit(same, returned), Unit(read, same))


def trained(devices: int, kind: tuple[Function, Function]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Two(*kind)
    strategy = {"num_microbatches": 2, "timeout": "30s", "split_points": ["layers.1"]}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(MLP, 16, 8))
    return dict(model.state_dict())


def on_two(rank: int) -> tuple[dict[str, Tensor], str]:
    found = trained(2, CONJUGATED)
    with pytest.raises(Exception) as refused:  # a PeerError on the other rank
        trained(2, LOCAL)
    return found, str(refused.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Tensor], str]]:
    return processes.results(processes.run(2, on_two, folder=tmp_path_factory.mktemp("two")))


def test_a_value_that_torch_conjugates_when_it_is_read_crosses(found: list[tuple[dict[str, Tensor], str]]) -> None:
    expected = trained(1, CONJUGATED)
    for weights, _ in found:
        assert_equal(weights, expected)


def test_a_class_that_other_processes_cannot_find_is_named_with_its_unit_on_all_ranks(
    found: list[tuple[dict[str, Tensor], str]],
) -> None:
    for _, said in found:
        assert "unit 'layers.0' at models.py:" in said, said
        assert "Pair" in said and "Define its class at the top level of a module" in said, said
        assert "IndexError" not in said and "connection" not in said, said

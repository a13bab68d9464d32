"""What a user does with a Trainer, with all stages in one process and in two."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_avgpipe.comm.collectives import Collectives
from tests import processes
from tests.comparing import assert_equal, state
from tests.models import MLP, MODELS, Regression, TinyTransformer, Transposing, loader
from tests.processes import num_processes, two_and_one
from tests.trainers import both, pipeline


class Sum(MLP):
    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[1]).square().sum() * 1e-3


def test_a_sum_over_samples_is_trained_as_on_one_device() -> None:
    both(Sum, loader(Sum, 20, 8), loader(Sum, 8, 4, seed=1), strategy={"loss_reduction": "sum"})


def test_outputs_of_a_step_are_those_of_the_whole_batch() -> None:
    class Outputs(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            prediction = self(batch[0])
            return {"loss": (prediction - batch[1]).square().mean(), "prediction": prediction, "names": ["a"]}

    class Monitor(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs, self.batch = outputs, batch

    watch = Monitor()
    pipeline(2, max_steps=1, callbacks=[watch]).fit(Outputs(), loader(MLP, 6, 6))
    assert watch.outputs["prediction"].shape == (6, 8)
    assert not watch.outputs["prediction"].requires_grad
    expected = (watch.outputs["prediction"] - watch.batch[1]).square().mean()
    torch.testing.assert_close(watch.outputs["loss"], expected)


@pytest.mark.parametrize("points", [None, ["blocks.1", "norm"]])
def test_a_plan_tells_what_each_stage_does(points: list[str] | None) -> None:
    runner = pipeline(3, strategy={"split_points": points}, max_steps=1)
    runner.fit(TinyTransformer(), loader(TinyTransformer, 8, 8))
    plan = runner.strategy.plan
    assert [stage.index for stage in plan.stages] == [0, 1, 2]
    begins = [stage.units[0] for stage in plan.stages]
    assert begins == ["embed", *points] if points else begins[0] == "embed"
    assert "position" in plan.stages[0].parameters
    assert plan.stages[2].units[-1] == "head"
    assert all(stage.sends and stage.boundary_bytes > 0 for stage in plan.stages[:2])
    assert sum(stage.share for stage in plan.stages) == pytest.approx(1.0)
    assert "embed" in str(plan)


# -- stages in two real processes: the same numbers on every rank, and the same as in one process --------------------


def fit(folder: Path, devices: int, kind: type[Regression]) -> dict[str, Any]:
    """Everything that a training leaves behind, from the point of view of one rank."""
    torch.manual_seed(5)
    model = kind("adamw")
    checkpoint = ModelCheckpoint(folder / "checkpoints", "{step}-{val_loss:.2f}", monitor="val_loss", save_last=True)
    loggers = CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tensorboard", version=0)
    runner = pipeline(
        2, devices, {"num_microbatches": 3}, callbacks=[checkpoint, EarlyStopping("val_loss", patience=1)],
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
        "of rank 0": (folder / "csv" / "version_0" / "metrics.csv").read_text() if runner.is_global_zero else None,
    }


def trained(folder: Path, devices: int, make: Any, num_stages: int, strategy: dict[str, Any]) -> tuple[Any, Any]:
    """Weights and metrics after an epoch, with a checkpoint."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(5)
    model = make()
    runner = pipeline(num_stages, devices, strategy, max_epochs=1)
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


def returning(returned: Function, read: Function) -> MLP:
    """What the first of two units returns, and how the second one reads it."""
    model = MLP()
    model.layers = nn.Sequential(Unit(same, returned), Unit(read, same))
    return model


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "two stages in each process": (lambda: TinyTransformer(dropout=0.2), 4, {}),
    "a conjugated tensor": (lambda: returning(*CONJUGATED), 2, {"split_points": ["layers.1"]}),
    "the order of dimensions": (Transposing, 4, {"num_microbatches": 2}),
    "compiled units": (lambda: TinyTransformer(dropout=0.2), 2, {"compile": {"backend": "eager"}}),
}
KINDS = {kind.__name__: kind for kind in MODELS}
FAST = ("UNet", "two stages in each process", "a conjugated tensor")
SLOW = tuple(name for name in (*KINDS, *CASES) if name not in FAST)


def all_of(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """What each of several trainings leaves behind."""
    devices = num_processes()
    return {
        name: fit(folder / name, devices, KINDS[name])
        if name in KINDS
        else trained(folder / name, devices, *CASES[name])
        for name in names
    }


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["", "other models"])
def test_two_processes_leave_what_one_does_bitwise(names: Sequence[str], tmp_path: Path) -> None:
    (first, second), one = two_and_one(all_of, tmp_path, names)
    for name in names:
        folder = tmp_path / "two" / name
        assert_equal(first[name], one[name], name)
        if name in KINDS:
            written = "of rank 0"
            assert_equal(second[name], {**one[name], written: None}, name)
            assert one[name][written] and list((folder / "tensorboard").rglob("events*"))
        else:
            assert_equal(second[name], one[name], name)
            saved = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
            assert_equal({key: saved[key] for key in one[name][0]}, one[name][0], name)


# -- streams, limits, places, errors: of two processes ---------------------------------------------------------------


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


class Planned(MLP):
    """Asks how many steps there will be, for which Lightning makes the dataloader, and reads the first batch of it."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == -1  # nobody knows
        return super().configure_optimizers()


def fit_stream(folder: Path) -> int:
    runner = pipeline(2, 2, max_epochs=2)
    runner.fit(Planned(), DataLoader(Stream(folder), batch_size=6))
    return runner.global_step


class Validations(Callback):
    count = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.count += not trainer.sanity_checking


def fit_limited() -> tuple[int, int, float]:
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


COLLECTIVES = ("barrier", "broadcast", "broadcast_object_list", "all_reduce", "all_gather", "gather_object")


def watched() -> list[str]:
    """The collectives that a rank takes part in from the second batch of an epoch to its last one."""
    called: list[str] = []
    model = MLP()
    during: list[str] = []

    def look(_: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            called.clear()
        during[:] = called

    model.on_train_batch_start = look  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(Collectives, "together"), *((dist, name) for name in COLLECTIVES)]:
            collective = getattr(owner, name)

            def counted(*args: Any, _name: str = name, _collective: Any = collective, **kwargs: Any) -> Any:
                called.append(_name)
                return _collective(*args, **kwargs)

            patch.setattr(owner, name, counted)
        pipeline(2, 2, max_epochs=2, num_sanity_val_steps=0).fit(model, loader(MLP, 32, 8))
    assert called, "the collectives of the tear-down are seen"
    return during


def in_all(num_batches: int) -> int:
    """The number of collectives of a training without hooks, in which each stage changes buffers."""
    model, called = MLP(), list[int]()
    for i in (1, 7):
        model.layers[i] = nn.BatchNorm1d(8)
    together = Collectives.together

    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return together(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "together", counted)
        runner = pipeline(2, 2, {"verify": False}, max_epochs=1, num_sanity_val_steps=0)
        runner.fit(model, loader(MLP, 8 * num_batches, 8))
    return len(called)


def refused() -> str:
    with pytest.raises(Exception) as caught:  # a PeerError on the other rank
        pipeline(2, 2, {"split_points": ["layers.1"]}, max_epochs=1).fit(returning(*LOCAL), loader(MLP, 16, 8))
    return str(caught.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of these gives on both ranks, and which ranks read the stream."""
    folder = tmp_path_factory.mktemp("both")
    ranks = processes.everywhere(
        2,
        lambda: [fit_stream(folder), fit_limited(), watched(), refused(), (in_all(3), in_all(6))],
        folder=folder,
    )
    return [*zip(*ranks, strict=True), [path.name for path in folder.glob("read-*")]]


def test_only_rank_zero_reads_a_stream_and_all_end_with_it(found: list[Any]) -> None:
    steps, *_, read = found
    assert steps == (10, 10)
    assert read == ["read-0"]


def test_limits_and_schedulers_count_alike_on_all_ranks(found: list[Any]) -> None:
    one, other = found[1]
    assert one == other
    assert one[:2] == (7, 7)
    assert one[2] < 1.0


def test_no_batch_waits_for_a_collective_of_all_processes(found: list[Any]) -> None:
    assert found[2] == ([], [])
    for fewer, more in found[4]:
        assert fewer == more > 0


def test_a_class_that_other_processes_cannot_find_is_named_with_its_unit_on_all_ranks(found: list[Any]) -> None:
    for said in found[3]:
        assert "unit 'layers.0' at models.py:" in said, said
        assert "Pair" in said and "Define its class at the top level of a module" in said, said
        assert "IndexError" not in said and "connection" not in said.replace("connection.py", ""), said


class Silent(MLP):
    """Logs nothing: Lightning's metrics live on the default device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def with_default_device(devices: int, default: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Silent()  # and so does the state of torch's other optimizers
    model.on_train_start = lambda: torch.set_default_device(default)  # type: ignore[method-assign]
    options = {"num_pipelines": 2, "num_microbatches": 2, "timeout": "30s"}
    runner = pipeline(2, devices, options, max_epochs=1, gradient_clip_val=0.1)
    runner.fit(model, loader(MLP, 32, 8))
    runner.save_checkpoint("last.ckpt")
    return state(model)


@pytest.mark.slow  # what makes tensors says on which device: tests/test_house.py
def test_processes_train_the_same_with_another_default_device(tmp_path: Path) -> None:
    expected = with_default_device(1, "cpu")
    assert_equal(processes.everywhere(2, with_default_device, 2, "meta", folder=tmp_path), [expected] * 2)

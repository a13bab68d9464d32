"""Lightning's callbacks decide and do what they would on one device."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler
from torch.utils.tensorboard.summary import histogram

from lightning_avgpipe import Links
from lightning_avgpipe.errors import AbsentValueError, AvgPipeError, ConfigurationError
from lightning_avgpipe.strategy import checks
from tests import processes
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, MadeOnMeta, Normed, loader
from tests.trainers import both, pipeline, trainer, twins


class Scheduled(MLP):
    """Lowers the learning rate when the validation, or a training step, does not get better."""

    def __init__(self, interval: str = "epoch", monitor: str = "val_loss") -> None:
        super().__init__()
        self.example_input_array = torch.randn(2, 8)
        self.lr = 0.05
        self.plateau = {"interval": interval, "monitor": monitor, "frequency": 1}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.plateau}}


def callbacks(folder: Path) -> list[L.Callback]:
    return [
        ModelCheckpoint(
            folder / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}"
        ),
        ModelCheckpoint(
            folder / "steps",
            monitor="train_loss",
            every_n_train_steps=2,
            save_top_k=3,
            filename="{step}-{train_loss:.3f}",
        ),
        EarlyStopping("val_loss", patience=2, min_delta=0.02),
        LearningRateMonitor(logging_interval="step", log_momentum=True),
        DeviceStatsMonitor(cpu_stats=False),
        Timer(duration={"hours": 1}),
    ]


def fit(make: Any, folder: Path, interval: str, monitor: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Scheduled(interval, monitor)
    options = {"logger": CSVLogger(folder, name="csv", version=0), "log_every_n_steps": 1}
    runner = make(callbacks=callbacks(folder), max_epochs=8, enable_checkpointing=True, **options)
    runner.fit(model, loader(MLP, 24, 8), loader(MLP, 8, 8, seed=1))
    best, steps = runner.checkpoint_callbacks
    stopping = runner.early_stopping_callback
    return {
        "files": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt")),
        "best": [Path(best.best_model_path).name, float(best.best_model_score)],
        "best step": [Path(steps.best_model_path).name, float(steps.best_model_score)],
        "stopped": [stopping.stopped_epoch, stopping.wait_count, runner.current_epoch, runner.global_step],
        "lr": runner.optimizers[0].param_groups[0]["lr"],
        "weights": state(model),
    }


PLATEAUS = [("epoch", "val_loss"), ("step", "train_loss")]


def assert_alike(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for key in ("files", "stopped", "lr"):
        assert found[key] == expected[key], key
    assert_close([found[key] for key in ("best", "best step")], [expected[key] for key in ("best", "best step")], 1e-6)
    assert_close(found["weights"], expected["weights"])


@pytest.mark.parametrize(("interval", "monitor"), PLATEAUS[1:])  # both in two processes
def test_callbacks_that_monitor_decide_as_on_one_device(interval: str, monitor: str, tmp_path: Path) -> None:
    expected = fit(trainer, tmp_path / "one", interval, monitor)
    found = fit(pipeline, tmp_path / "pipeline", interval, monitor)
    assert_alike(expected, found)
    assert expected["lr"] < 0.05
    one, other = ((tmp_path / name / "csv/version_0/metrics.csv").read_text() for name in ("one", "pipeline"))
    assert one.splitlines()[0] == other.splitlines()[0]
    assert "lr-SGD" in one.splitlines()[0]


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # fmt: skip  # noqa: E501
        torch.save((prediction, indices), self.folder / f"batch-{batch_idx}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self.folder / "epoch.pt")


def written(make: Any, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    make(callbacks=[Writer(folder)]).predict(MLP(), loader(MLP, 7, 4), return_predictions=False)
    return {path.name: torch.load(path) for path in sorted(folder.glob("*.pt"))} if folder.exists() else {}


def test_predictions_are_written_as_on_one_device(tmp_path: Path) -> None:
    expected = written(trainer, tmp_path / "one")
    assert expected.keys() == {"batch-0.pt", "batch-1.pt", "epoch.pt"}
    assert_close(written(pipeline, tmp_path / "pipeline"), expected, rtol=1e-6)


def suggested(make: Any) -> float:
    torch.manual_seed(3)
    model = Scheduled()
    finder = LearningRateFinder(num_training_steps=20, min_lr=1e-4, max_lr=1.0)
    make(callbacks=[finder], max_epochs=1).fit(model, loader(MLP, 120, 4), loader(MLP, 8, 4))
    assert finder.optimal_lr is not None
    assert finder.optimal_lr.suggestion() == model.lr
    return model.lr


def test_the_learning_rate_finder_suggests_what_it_would_on_one_device() -> None:
    assert suggested(pipeline) == pytest.approx(suggested(trainer))


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_progress_bar_shows_logged_values(bar: type[L.Callback], capsys: pytest.CaptureFixture[str]) -> None:
    runner = pipeline(callbacks=[bar(), RichModelSummary(max_depth=2)], enable_progress_bar=True, max_epochs=1)
    runner.fit(Scheduled(), loader(MLP, 16, 8), loader(MLP, 8, 8))
    shown = capsys.readouterr()
    assert "val_loss" in shown.out + shown.err
    assert runner.progress_bar_metrics.keys() >= {"val_loss"}


class Watching(Precision):
    """Looks for the trainer's progress bar at every backward, as a thread of rich may at any time."""

    def __init__(self) -> None:
        self.bars: list[Any] = []

    def pre_backward(self, tensor: torch.Tensor, module: L.LightningModule) -> torch.Tensor:
        self.bars.append(module.trainer.progress_bar_callback)
        return super().pre_backward(tensor, module)


def test_the_trainer_has_its_progress_bar_with_every_micro_batch() -> None:
    bar, watching = RichProgressBar(), Watching()
    pipeline(2, callbacks=[bar], plugins=[watching], enable_progress_bar=True).fit(MLP(), loader(MLP, 8, 8))
    assert set(watching.bars) == {bar}


@pytest.mark.parametrize("profiler", [AdvancedProfiler, pytest.param(PyTorchProfiler, marks=pytest.mark.slow)])
def test_profilers_see_the_steps(profiler: Any, tmp_path: Path) -> None:
    profile = profiler(dirpath=tmp_path, filename="profile")
    runner = pipeline(profiler=profile, max_epochs=1, callbacks=[ModelSummary()])
    runner.fit(Scheduled(), loader(MLP, 32, 8), loader(MLP, 8, 8))
    text = "".join(path.read_text() for path in tmp_path.rglob("*profile*.txt"))
    assert "training_step" in text


class Failing(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("enough")


def test_a_checkpoint_is_written_on_an_exception_and_by_a_run_after_it(tmp_path: Path) -> None:
    saves = [OnExceptionCheckpoint(tmp_path / "failed"), ModelCheckpoint(tmp_path / "later")]
    runner = pipeline(max_epochs=1, callbacks=saves, enable_checkpointing=True)
    with pytest.raises(ValueError, match="enough"):
        runner.fit(Failing(), loader(MLP, 32, 8))
    assert torch.load(tmp_path / "failed" / "on_exception.ckpt", weights_only=True)["global_step"] == 2
    runner.fit(MLP(), loader(MLP, 32, 8))
    (path,) = (tmp_path / "later").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == runner.global_step


@pytest.mark.parametrize("moment", ["configure_callbacks", "setup", "on_fit_start"])
def test_a_run_that_fails_before_training_leaves_what_a_run_before_it_saved(moment: str, tmp_path: Path) -> None:
    model = MLP()
    path = tmp_path / "on_exception.ckpt"
    before = pipeline(max_steps=1)
    before.fit(MLP(), loader(model, 8, 4))
    before.save_checkpoint(path)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    setattr(model, moment, fail)
    again = pipeline(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="ended before training began"), pytest.raises(RuntimeError, match="not today"):
        again.fit(model, loader(model, 8, 4))
    assert torch.load(path, weights_only=True)["global_step"] == 1


AVERAGES = [StochasticWeightAveraging(0.01, swa_epoch_start=1), EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize("average", AVERAGES, ids=lambda average: type(average).__name__)
def test_averaged_weights_are_those_of_one_device(average: L.Callback) -> None:
    both(MLP, loader(MLP, 24, 8), loader(MLP, 8, 8), callbacks=[average], max_epochs=3)


def refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        pipeline(2, 2, callbacks=[StochasticWeightAveraging(0.01)]).fit(MadeOnMeta(), loader(MLP, 8, 8))
    return str(error.value)


def test_an_average_of_weights_without_contents_is_refused_on_several_processes(tmp_path: Path) -> None:
    for text in processes.everywhere(2, refused, folder=tmp_path):
        assert text.startswith("StochasticWeightAveraging copies the weights before training, but those of MadeOnMeta")


class Sized(L.LightningDataModule):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(MLP, 48, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(MLP, 8, self.batch_size)


def found_size(make: Any) -> tuple[int, int]:
    data = Sized()
    runner = make(callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)], max_epochs=1)
    runner.fit(MLP(), datamodule=data)
    return data.batch_size, runner.global_step


def test_the_batch_size_finder_finds_what_it_would_on_one_device() -> None:
    assert found_size(pipeline) == found_size(trainer)


@pytest.mark.parametrize("callback", [BatchSizeFinder, lambda: ModelPruning("l1_unstructured", amount=0.5)])
def test_what_needs_the_whole_module_is_refused_on_several_processes(callback: Any) -> None:
    made = callback()
    message = rf"{type(made).__name__} .* not supported on 2 processes yet; remove it"
    with pytest.raises(ConfigurationError, match=message):
        checks.trainer(trainer(callbacks=[made]), world_size=2)


def all_of_it(folder: Path) -> tuple[list[dict[str, Any]], float, dict[str, Any]]:
    make = functools.partial(pipeline, 2, 2)
    fits = [fit(make, folder / interval, interval, monitor) for interval, monitor in PLATEAUS]
    predictions = written(make, folder / "predictions")
    return fits, suggested(make), predictions


@pytest.mark.slow
def test_in_two_processes_all_ranks_decide_as_one_device(tmp_path: Path) -> None:
    ranks = processes.everywhere(2, all_of_it, tmp_path / "two", folder=tmp_path)
    expected = [fit(trainer, tmp_path / "one" / interval, interval, monitor) for interval, monitor in PLATEAUS]
    rate = suggested(trainer)
    for fits, found_rate, _ in ranks:
        for one, found in zip(expected, fits, strict=True):
            assert_alike(one, found)
        assert found_rate == pytest.approx(rate)
    assert_close(ranks[0][2], written(trainer, tmp_path / "predicted"), rtol=1e-6)


class LogsAtEnd(Scheduled):
    """Logs at the end of a batch what its scheduler monitors."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", 1.0 + batch_idx % 2)


class Smooth(L.Callback):
    """Logs at the end of a batch what a checkpoint monitors."""

    mean = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean = 0.5 * self.mean + 0.5 * float(outputs["loss"])
        pl_module.log("mean", self.mean, sync_dist=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("epoch", float(trainer.current_epoch))


class Adapts(L.Callback):
    """Sets learning rates by what a callback before it has logged in the same hook."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.change(trainer, float(trainer.callback_metrics["mean"]) > 0.9)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.change(trainer, trainer.callback_metrics.get("epoch", -1) == trainer.current_epoch)

    def change(self, trainer: Any, is_high: bool) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9 if is_high else 0.8


def decided(folder: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    module = LogsAtEnd("step", "end")
    best = ModelCheckpoint(folder, monitor="mean", every_n_train_steps=1, save_top_k=2, filename="{step}-{mean:.2f}")
    options = {"callbacks": [Smooth(), Adapts(), best], "enable_checkpointing": True, "max_epochs": 2}
    pipeline(2, processes.num_processes(), {"num_microbatches": 2}, **options).fit(module, loader(MLP, 24, 4))
    files = sorted(Path(path).name for path in best.best_k_models)
    return {"rate": module.trainer.optimizers[0].param_groups[0]["lr"], "files": files, "weights": state(module)}


def test_all_ranks_decide_by_what_hooks_log_at_the_end_of_a_batch_or_an_epoch(tmp_path: Path) -> None:
    two, one = processes.two_and_one(decided, tmp_path)
    assert one["rate"] < 0.05
    assert len(one["files"]) == 2
    assert_equal(two, [one, one])


class Searches(LearningRateFinder):
    """Looks for a learning rate in the midst of training, and then goes back to where it was."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def searched(folder: Path) -> dict[str, Any]:
    module, _ = twins(Scheduled)
    options = {"callbacks": [Searches(num_training_steps=4)], "default_root_dir": folder, "max_epochs": 2}
    runner = pipeline(2, processes.num_processes(), {"num_microbatches": 2}, **options)
    runner.fit(module, loader(MLP, 16, 4), loader(MLP, 8, 4))
    return state(module)


@pytest.mark.slow
def test_states_of_optimizers_are_loaded_in_the_midst_of_training(tmp_path: Path) -> None:
    two, one = processes.two_and_one(searched, tmp_path)
    assert_equal(two, [one, one])


class Mistaken(MLP):
    lr = 0.05

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("typo")


def failed(folder: Path) -> str:
    """How a search ends whose first step fails."""
    runner = pipeline(2, 2, {"timeout": 20}, callbacks=[LearningRateFinder()], default_root_dir=folder)
    with pytest.raises(Exception, match="typo") as raised:
        runner.fit(Mistaken(), loader(MLP, 16, 4))
    return f"{raised.typename}: {raised.value}"


def test_an_error_in_a_search_for_a_learning_rate_ends_all_processes_with_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    zero, one = processes.everywhere(2, failed, root, folder=tmp_path)
    assert zero.startswith("ValueError: typo")
    assert re.match(r"PeerError: rank 0 \(stage 1\).* failed: ValueError: typo", one)
    assert not [*root.iterdir()]


def measured(devices: int, folder: Path) -> dict[str, Any]:
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    logger = CSVLogger(folder, name="csv", version=0)
    options = {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 2, "max_epochs": 1}
    runner = pipeline(2, devices, {"num_microbatches": 2}, **options)
    runner.fit(MLP(), loader(MLP, 16, 4))
    return dict(runner.logged_metrics)


@pytest.mark.slow
def test_devices_that_work_on_one_batch_count_as_one_in_its_throughput(tmp_path: Path) -> None:
    found, _ = processes.everywhere(2, measured, 2, tmp_path, folder=tmp_path)
    assert found["train/device/batches_per_sec"] > 0
    assert found.keys() == measured(1, tmp_path / "one").keys()


# it begins where the weights are divided already, and from a checkpoint where they are not
SWA = functools.partial(StochasticWeightAveraging, 0.02, swa_epoch_start=2)
WAYS = {
    "swa": SWA,
    "cautious": functools.partial(SWA, avg_fn=lambda a, p, n: p if n < 1 else a + (p - a) / (n + 1)),  # it reads n
    "ema": functools.partial(EMAWeightAveraging, decay=0.5),
}


def averaged(path: Path, way: str) -> list[dict[str, Any]]:
    """Train, and train on from a checkpoint between two averages; the weights after both, and what was logged."""
    found, devices = [], processes.num_processes()
    for number, epochs in enumerate((3, 5)):
        module, _ = twins(Normed)
        saved = ModelCheckpoint(path, f"{{epoch}}-{epochs}", save_top_k=-1, save_on_train_epoch_end=True)
        options = {"enable_checkpointing": True, "callbacks": [WAYS[way](), saved]}
        runner = pipeline(2, devices, {"num_microbatches": 2, "costs": "measured"}, max_epochs=epochs, **options)
        data = loader(MLP, 16, 4)
        resumed = path / "epoch=1-3.ckpt" if number else None
        runner.fit(module, data, data if way == "ema" else None, ckpt_path=resumed, weights_only=False)
        runner.save_checkpoint(path / f"after-{epochs}.ckpt")
        found += [state(module), {key: value.clone() for key, value in runner.callback_metrics.items()}]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_average_like_one(way: str, tmp_path: Path) -> None:
    """In the weights, or beside them."""
    two, one = processes.two_and_one(averaged, tmp_path, way)
    assert_equal(two, [one, one])
    for file in ("epoch=0-3.ckpt", "epoch=3-5.ckpt", "after-3.ckpt", "after-5.ckpt"):
        expected, found = (torch.load(tmp_path / sub / file, weights_only=False) for sub in ("one", "two"))
        for part in ("state_dict", "current_model_state", "averaging_state"):
            assert_equal(expected.get(part), found.get(part), f"{file} {part}")
        averages = {key: state for key, state in expected["callbacks"].items() if "StochasticWeightAveraging" in key}
        if way != "ema" and file != "epoch=0-3.ckpt":
            assert any(state["n_averaged"] > 0 for state in averages.values())
            assert_equal(averages, {key: found["callbacks"][key] for key in averages})
        if way == "ema" and not file.startswith("after"):
            with pytest.raises(AssertionError, match="differs"):
                assert_equal(expected["state_dict"], expected["current_model_state"])


class Returning(MLP):
    """Returns what it has computed, for callbacks."""

    lr = 0.05  # which a search may set

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        answers = self.layers(batch[0])
        return {"loss": (answers - batch[1]).square().mean(), "mean": answers.mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"answers": self.forward(batch[0]), "name": "validation"}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.forward(batch[0])


class Keeps(L.Callback):
    """Keeps what the steps have returned, and of validation the targets."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs["mean"])

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.found += [outputs, batch[1].clone()]

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(args[2])


class Counts(Keeps):
    """Counts batches, and does not look at what the steps have returned."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(None)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(None)

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        self.found.append(None)


class Appends(L.Callback):
    """Appends a callback to those of the trainer when training begins."""

    def __init__(self, callback: L.Callback) -> None:
        self.callback = callback

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks.append(self.callback)


def read(devices: int, make: Any, searches: bool = False, appends: bool = False) -> list[Any]:
    """What a callback finds in training, validation, test and prediction; then what is predicted, if it is wanted."""
    callback = make()
    callbacks = [LearningRateFinder(num_training_steps=2)] if searches else []
    callbacks.append(Appends(callback) if appends else callback)
    runner = pipeline(2, devices, {"num_microbatches": 2}, max_epochs=1, callbacks=callbacks)
    (module, _), data = twins(Returning), loader(MLP, 16, 4)
    runner.fit(module, data, data)
    runner.test(module, data, verbose=False)
    return [*callback.found, runner.predict(module, data, return_predictions=make is Keeps)]


class Copies(L.Callback):
    """Copies the module and itself, as those do that keep a teacher, or save whole objects."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert isinstance(pickle.loads(pickle.dumps(Copies())), Copies)
        self.copies.append(copy.deepcopy(pl_module))
        if not any(p.is_meta for p in pl_module.parameters()):
            self.copies.append(pickle.loads(pickle.dumps(pl_module)))
        else:
            with pytest.raises(AbsentValueError, match=r"a hook pickles, at .*, a weight of another stage"):
                pickle.dumps(pl_module)
            weight = next(p for p in pl_module.parameters() if p.is_meta)
            with pytest.raises(AbsentValueError, match=r"a hook shows in TensorBoard, at .*, a weight .* of another"):
                histogram("weight", weight, "auto")


class Hooked(MLP):
    """Has hooks, of which a pipeline puts others in the place."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("mean", self.layers[8].weight.mean())

    def on_train_epoch_end(self) -> None:
        self.log("sum", self.layers[8].weight.sum())


class HookedByHand(Hooked):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def copied(devices: int, make: Any) -> list[list[str]]:
    """What copies of a module, made while it trains, have in the place of methods of their class."""
    keeps = Copies()
    runner = pipeline(2, devices, max_epochs=1, callbacks=[keeps])
    module = make()
    runner.fit(module, loader(MLP, 16, 4))
    last = keeps.copies[-1]
    here = [name for name, p in module.named_parameters() if not p.is_meta and not last.get_parameter(name).is_meta]
    assert_equal({name: module.get_parameter(name) for name in here}, {n: last.get_parameter(n) for n in here})
    return [
        [name for name in vars(one).keys() - vars(make()).keys() if vars(one)[name] != getattr(make, name).__get__(one)]
        for one in keeps.copies
    ]


class Averages(L.Callback):
    """Keeps an average of the weights by itself."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.average[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def refused_average(make: Any) -> str:
    with pytest.raises(AbsentValueError) as refused:
        pipeline(2, 2, max_epochs=1, callbacks=[Averages()]).fit(make(), loader(MLP, 16, 4))
    return str(refused.value)


def refused_on_rank_0() -> str:
    on_rank_0 = [Keeps()] if os.environ["LOCAL_RANK"] == "0" else []
    with pytest.raises(AvgPipeError) as refused:
        pipeline(2, 2, max_epochs=1, callbacks=on_rank_0).fit(MLP(), loader(MLP, 16, 4))
    return str(refused.value)


class Norms(L.Callback):
    """Notes the norm of all gradients within a step that runs whole."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None))


def norms(devices: int) -> list[float]:
    keeps = Norms()
    torch.manual_seed(3)
    pipeline(2, devices, max_epochs=1, callbacks=[keeps]).fit(HookedByHand(), loader(MLP, 16, 4))
    return keeps.found


def said_of_writer() -> str:
    first = functools.partial(pipeline, 2, 2, {"links": Links(reader="first")})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        written(first, Path("written"))
    return " ".join(str(one.message) for one in said)


def refused_beside() -> str:
    options = {"num_microbatches": 2, "save_distributed_checkpoint": True}
    with pytest.raises(ConfigurationError) as refused:
        pipeline(2, 2, options, callbacks=[EMAWeightAveraging()]).fit(MLP(), loader(MLP, 16, 4))
    return str(refused.value)


# A callback is called only after a search for a learning rate, or is appended when training begins.
LATER: list[dict[str, bool]] = [{"searches": True}, {"appends": True}, {"searches": True, "appends": True}]


def in_rank() -> dict[str, Any]:
    found: dict[str, Any] = {str(options): read(2, Keeps, **options) for options in ({}, *LATER)}
    found |= {"counts": read(2, Counts)}
    found |= {make.__name__: copied(2, make) for make in (Hooked, HookedByHand)}
    found["averages"] = list(map(refused_average, (Hooked, HookedByHand)))
    found |= {"on rank 0": refused_on_rank_0(), "writer": said_of_writer(), "norms": norms(2)}
    return {**found, "refused": refused_beside()}


in_two = processes.shared(2, lambda rank: in_rank())


@pytest.mark.parametrize("options", [{}, *LATER], ids=str)
def test_what_steps_return_is_known_wherever_a_callback_reads_it(options: dict[str, bool], in_two: Any) -> None:
    expected = read(1, Keeps, **options)
    for rank in in_two:
        assert_equal(expected, rank[str(options)])


def test_what_steps_return_is_known_nowhere_else(in_two: Any) -> None:
    assert all(set(rank["counts"]) == {None} for rank in in_two)


@pytest.mark.parametrize("make", [Hooked, HookedByHand])
def test_copies_of_a_module_that_trains_are_plain_modules(make: Any, in_two: Any) -> None:
    for found in (copied(1, make), *(rank[make.__name__] for rank in in_two)):
        assert len(found) >= 4
        assert not any(found)


def test_an_average_of_weights_of_which_each_process_has_some_is_refused(in_two: Any) -> None:
    for found in (message for rank in in_two for message in rank["averages"]):
        assert re.search(r"add_\(\) at test_callbacks\.py:\d+ in on_train_batch_end in a hook writes", found), found


def test_a_callback_that_rank_0_alone_has_is_refused_everywhere(in_two: Any) -> None:
    for rank in in_two:
        assert re.search(r"rank 0 has 1 Keeps\.on_\w+_batch_end, rank 1 none", rank["on rank 0"])


def test_callbacks_see_all_gradients_within_a_step_that_runs_whole(in_two: Any) -> None:
    expected = norms(1)
    assert expected
    for rank in in_two:
        assert rank["norms"] == pytest.approx(expected)


def test_whoever_writes_predictions_is_told_where_there_are_no_indices_of_samples(in_two: Any) -> None:
    assert "with Writer: predictions are written by rank 0, which does not know the indices" in in_two[0]["writer"]


def test_divided_checkpoints_have_no_average_beside_the_weights(in_two: Any) -> None:
    assert all("WeightAveraging puts averages in their place" in rank["refused"] for rank in in_two)

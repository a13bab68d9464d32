"""Logged values are those of one device: what micro-batches log becomes what the batch would have logged."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import PearsonCorrCoef

from lightning_avgpipe.errors import AbsentValueError, ConfigurationError, PartitionError
from tests import processes
from tests.comparing import assert_close
from tests.models import MLP, ConvNet, loader
from tests.strategy.steps import Layers, piped
from tests.trainers import both, loaders, pipeline, trainer


class Everything(ConvNet):
    """Logs in every way that there is, in every hook that may."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="macro")
        self.f1 = MulticlassF1Score(5)
        self.returned = MulticlassF1Score(5)
        self.values = MetricCollection([MulticlassPrecision(5), MulticlassRecall(5)])
        self.mean = MeanMetric()
        self.correlation = PearsonCorrCoef()
        # the first two share their state
        group = {"precision": MulticlassPrecision(5), "recall": MulticlassRecall(5), "f1": MulticlassF1Score(5)}
        self.group = MetricCollection(group, prefix="group_")
        self.valid_group = self.group.clone(prefix="other_")

    def shared(self, batch: Any, stage: str) -> Tensor:
        label = batch["label"]
        logits = self(batch["image"])
        loss = torch.nn.functional.cross_entropy(logits, label)
        values = {"sum": logits.sum(), "MIN": logits.min(), "max": logits.max(), "mean": loss, "Avg": loss}
        for name, value in values.items():
            self.log(f"{stage}_{name}", value, reduce_fx=name, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_builtin", logits.max(), reduce_fx=max)
        self.log_dict({f"{stage}_given": loss, f"{stage}_two": 2 * loss}, batch_size=len(label), prog_bar=True)
        self.log(f"{stage}_one", loss, batch_size=1, on_epoch=True, on_step=False)
        self.log(f"{stage}_float", 0.1, on_epoch=True)
        self.log(f"{stage}_shape", logits.abs().max(dim=0).values.sum().detach().sign(), on_epoch=True, on_step=False)
        self.accuracy(logits, label)
        self.log(f"{stage}_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log(f"{stage}_value", self.returned(logits, label), on_step=True, on_epoch=True)
        returned = self.values(logits, label)
        self.log_dict({f"{stage}_{name}": value for name, value in returned.items()}, on_step=True, on_epoch=True)
        self.f1.update(logits, label)
        self.log(f"{stage}_f1", self.f1, on_step=False, on_epoch=True)
        self.mean.update(loss.detach(), weight=len(label))
        self.correlation.update(logits[:, 0], label.float())
        group = self.group if stage == "train" else self.valid_group
        group.update(logits, label)
        self.log_dict(group, on_step=False, on_epoch=True)
        return loss

    def on_fit_start(self) -> None:
        self.print(f"begins on rank {self.global_rank}")
        gathered = self.all_gather(torch.tensor([1.0, 2.0]))
        assert torch.equal(gathered, torch.tensor([1.0, 2.0]))  # the stages are one model: as on one device

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.shared(batch, "valid")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.shared(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self.log("computed_mean", self.mean.compute())
        self.log("computed_correlation", self.correlation.compute())
        self.mean.reset()
        self.correlation.reset()


def hook_that_logs(name: str) -> Any:
    def hook(self: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        self.log(f"in_{name}", float(self.trainer.global_step))

    return hook


# All hooks in which Lightning allows self.log and that do no work of their own.
LOGGING_HOOKS = [
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
]
for _name in LOGGING_HOOKS:
    setattr(Everything, _name, hook_that_logs(_name))


def fit(runner: L.Trainer, module: L.LightningModule) -> dict[str, dict[str, float]]:
    train, valid = loader(ConvNet, 22, 8), [loader(ConvNet, 11, 8, seed=1), loader(ConvNet, 6, 4, seed=2)]
    runner.fit(module, train, valid)
    found = {
        kind: {name: float(value) for name, value in getattr(runner, f"{kind}_metrics").items()}
        for kind in ("callback", "logged", "progress_bar")
    }
    found["tested"] = dict(runner.test(module, valid[0], verbose=False)[0])
    return found


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tensorboard", version=0)]


def options(folder: Path) -> dict[str, Any]:
    return {"logger": loggers(folder), "log_every_n_steps": 1, "val_check_interval": 2}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def assert_same_files(expected: Path, found: Path) -> None:
    for one, other in zip(rows(expected), rows(found), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value == other[name] == "") or float(other[name]) == pytest.approx(float(value), abs=1e-6), name
    events = [EventAccumulator(str(folder / "tensorboard" / "version_0")).Reload() for folder in (expected, found)]
    assert set(events[0].Tags()["scalars"]) == set(events[1].Tags()["scalars"]) != set()
    for tag in events[0].Tags()["scalars"]:
        scalars = [[(s.step, s.value) for s in event.Scalars(tag)] for event in events]
        assert [step for step, _ in scalars[1]] == [step for step, _ in scalars[0]], tag
        assert [v for _, v in scalars[1]] == pytest.approx([v for _, v in scalars[0]], abs=1e-6), tag


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("single")
    torch.manual_seed(3)
    return folder, fit(trainer(**options(folder)), Everything())


def test_all_that_is_logged_equals_one_device(single: tuple[Path, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    found = fit(pipeline(2, strategy={"num_microbatches": 3}, **options(tmp_path)), Everything())
    assert_close(found, single[1], 1e-6)
    assert_same_files(single[0], tmp_path)
    names = set(found["callback"])
    assert {f"in_{hook}" for hook in LOGGING_HOOKS} <= {name.split("/")[0] for name in names}
    assert 0 < found["tested"]["test_accuracy_epoch"] < 1


def fit_quietly() -> tuple[list[str], bool]:
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        pipeline(2, 2, max_epochs=1).fit(Signature(), loader(ConvNet, 16, 8), loader(ConvNet, 8, 8))
        unchanged = list(warnings.filters) == filters
    return [str(warning.message) for warning in said], unchanged and list(warnings.filters) == before


def fit_rank(folder: Path) -> tuple[dict[str, dict[str, float]], bool, str, list[str], bool]:
    torch.manual_seed(3)
    runner = pipeline(2, 2, {"num_microbatches": 3}, **options(folder))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = fit(runner, Everything())
    return found, runner.is_global_zero, printed.getvalue(), *fit_quietly()


def test_all_ranks_know_what_rank_zero_logs_and_nothing_is_recommended_to_them(
    single: tuple[Path, Any], tmp_path: Path
) -> None:
    ranks = processes.everywhere(2, fit_rank, tmp_path, folder=tmp_path)
    for found, _, _, said, are_filters_unchanged in ranks:
        for kind in ("callback", "tested"):
            assert_close({kind: found[kind]}, {kind: single[1][kind]}, 1e-6)
        assert [text for text in said if "sync_dist" in text] == []
        assert are_filters_unchanged
    assert_close(ranks[0][0], single[1], 1e-6)
    assert_same_files(single[0], tmp_path)
    assert [is_zero for _, is_zero, *_ in ranks] == [True, False]
    assert [printed.count("begins on rank") for _, _, printed, *_ in ranks] == [1, 0]


class Overrides(ConvNet):
    """Overrides ``log`` and ``log_dict`` as libraries do: with any signature, other names, further values."""

    def __init__(self) -> None:
        super().__init__()
        self.returned = MulticlassF1Score(5)

    def log(self, *args: Any, **kwargs: Any) -> None:
        name, value, *rest = [*args, *(kwargs.pop(name) for name in ("name", "value") if name in kwargs)]
        super().log(f"mine/{name}", value, *rest, **kwargs)
        if name == "positional":
            super().log("scaled", float(value) * 100, on_epoch=True)

    def log_dict(self, values: Any, **kwargs: Any) -> None:
        super().log_dict({f"{name}_{float(value) >= 0}": value for name, value in values.items()}, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        label = batch["label"]
        logits = self(batch["image"])
        loss = torch.nn.functional.cross_entropy(logits, label)
        self.log("positional", loss, True, None, True, True)
        self.log(value=loss, name="keywords", on_step=False, on_epoch=True, reduce_fx="max")
        self.log("metric", self.returned(logits, label), on_epoch=True)
        self.log_dict({"a": loss, "b": 2 * loss}, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        label = batch.pop("label")
        self.log("val", torch.nn.functional.cross_entropy(self(batch["image"]), label))


class Signature(Overrides):
    def log(self, key: str, number: Any, *, stage: str = "s", **kwargs: Any) -> None:
        L.LightningModule.log(self, f"{stage}/{key}", number, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, stage="train", prog_bar=True)
        return loss


@pytest.mark.parametrize("model", [Overrides, Signature])
def test_an_overridden_log_takes_part_whatever_its_signature(model: Any) -> None:
    data = loader(ConvNet, 22, 8), loader(ConvNet, 11, 8, seed=1)
    runners = both(model, *data, strategy={"num_microbatches": 3})
    found = [{name: float(value) for name, value in runner.callback_metrics.items()} for runner in runners]
    if model is Overrides:
        for one in found:  # the largest mean of a batch, or of a micro-batch
            assert one.pop("mine/keywords") > 0
    assert found[1] == pytest.approx(found[0], abs=1e-6) and len(found[0]) > 1


def test_a_hook_that_logs_what_has_no_number_here_is_told_so() -> None:
    class Logs(ConvNet):
        def on_train_epoch_end(self) -> None:
            self.log("norms", torch.zeros((), device="meta"))  # as of weights that another process has

    with pytest.raises(AbsentValueError, match=r"self.log\('norms'\) in a hook is given a value without a number"):
        pipeline(2).fit(Logs(), loader(ConvNet, 8, 8))


def test_a_metric_object_without_contents_is_refused_by_name() -> None:
    runner = pipeline(max_epochs=1)
    with runner.init_module(empty_init=True):
        module = CopiesMetrics()
    with pytest.raises(ConfigurationError, match=r"the metric object 'mean' was built without contents"):
        runner.fit(module, loader(MLP, 8, 4))


class CountsObjects(ConvNet):
    """Weighs what it logs by a number of its own, which is one for some micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("weighed", loss, batch_size=self.numbers[self.calls], on_epoch=True, on_step=False)
        self.seen.append(loss.item())
        self.calls += 1
        return loss

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.seen, self.calls = [1, 3, 2, 1, 1, 1], list[float](), 0


def test_a_number_given_as_batch_size_weighs_also_where_it_is_one() -> None:
    module = CountsObjects()
    runner = pipeline(2, strategy={"num_microbatches": 2}, max_epochs=1)
    runner.fit(module, loader(ConvNet, 24, 8))
    expected = sum(n * loss for n, loss in zip(module.numbers, module.seen, strict=True)) / sum(module.numbers)
    assert float(runner.callback_metrics["weighed"]) == pytest.approx(expected)


class LogsSizes(MLP):
    """Gives the number of the dataloader for each batch, another one, one, and the true one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for name, size in (("whole", 8), ("other", 5), ("one", 1), ("true", len(batch[0]))):
            self.log(name, loss, batch_size=size, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize(("samples", "num_microbatches"), [(10, 4), (10, 8), (30, 4), (11, 1)])
def test_with_a_constant_batch_size_all_batches_count_alike(samples: int, num_microbatches: int) -> None:
    strategy, data = {"num_microbatches": num_microbatches}, loader(MLP, samples, 8)
    runners = both(LogsSizes, data, strategy=strategy, max_epochs=2, log_every_n_steps=1)
    one, stages = (dict(runner.callback_metrics) for runner in runners)
    assert abs(one["whole_epoch"] - one["true_epoch"]) > 1e-3
    unknown = ("one", "one_epoch", "other", "other_epoch") if num_microbatches == 8 else ()
    for name in unknown:  # each micro-batch has one sample, so that these may be numbers of something
        del one[name], stages[name]
    assert_close(stages, one, 1e-5)


class LogsTwice(MLP):
    """Logs several values under one name, as a loop over parts of a model does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("first", loss, on_step=True, on_epoch=True)
        for factor in (1.0, 10.0):
            self.log("twice", factor * loss, on_step=True, on_epoch=True)
        return loss


def test_of_one_name_the_step_has_the_last_value_and_the_epoch_the_mean_as_on_one_device() -> None:
    strategy = {"num_microbatches": 4, "verify": True}
    runners = both(LogsTwice, loader(MLP, 24, 8), strategy=strategy, max_epochs=1, log_every_n_steps=1)
    one, stages = (dict(runner.callback_metrics) for runner in runners)
    assert one["twice_step"] > 5 * one["first_step"]
    assert_close(stages, one, 1e-6)


class KeepsMetrics(MLP):
    """Has a metric among its hyper-parameters, which checkpoints hold."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.metric = metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self(batch[0])
        self.log("mse", self.metric(found.detach(), batch[1]))
        return (found - batch[1]).square().mean()


@pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
def test_values_of_half_precision_are_reduced_in_single(reduce_fx: str) -> None:
    class Halves(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            assert loss.dtype == torch.bfloat16
            self.log("mine", loss.detach() * 3.0, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
            return loss

    one, stages = both(Halves, loaders(MLP, 40), max_epochs=1, precision="bf16-true")
    expected = one.callback_metrics["mine"]
    assert expected != expected.bfloat16()  # rounded values would be no such number
    torch.testing.assert_close(stages.callback_metrics["mine"], expected, rtol=1e-6, atol=0.0)


def test_checkpoints_hold_metrics_as_they_are(tmp_path: Path) -> None:
    module = KeepsMetrics(MeanSquaredError())
    runner = pipeline(2, max_epochs=1)
    runner.fit(module, loader(MLP, 8, 8))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["hyper_parameters"]["metric"]
    saved.reset()
    saved.update(torch.ones(2), torch.zeros(2))
    assert float(saved.compute()) == 1.0
    assert saved.distributed_available_fn is module.metric.distributed_available_fn


class CopiesMetrics(MLP):
    """Counts in a hook with a copy of a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.copied: list[MeanMetric] = []

    def on_train_batch_end(self, *_: Any) -> None:
        copied = copy.deepcopy(self.mean)
        copied(torch.tensor(2.0))
        self.copied.append(copied)


def test_a_copy_of_a_metric_object_counts_for_itself() -> None:
    module = CopiesMetrics()
    pipeline(2, max_epochs=1).fit(module, loader(MLP, 8, 4))
    assert [float(copied.compute()) for copied in module.copied] == [2.0, 2.0]
    assert not module.mean.update_called


class HandsOut(Layers):
    """Logs and returns weights and buffers as they are, of which the first stage uses or changes some."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.c = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]
        self.register_buffer("count", torch.zeros(()))
        self.returned = list[list[float]]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        loss = self.loss((batch[0] * self.scale, batch[1]))
        self.log("scale", self.scale)
        self.log_dict({"count": self.count, "batches": self.c[1].num_batches_tracked})  # type: ignore[index]
        return {"loss": loss, "count": self.count, "scale": self.scale}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append([float(outputs[name].mean()) for name in ("count", "scale")])


def _handed_out(folder: Path, kind: type[Any], options: dict[str, Any]) -> tuple[dict[str, float], list[Any]]:
    devices = processes.num_processes()
    options = options if devices == 2 else {}
    module = piped(kind(), devices, devices, {"log_every_n_steps": 1}, **options)
    return {name: float(value) for name, value in module.trainer.callback_metrics.items()}, module.returned


def test_weights_and_buffers_are_logged_and_returned_as_they_are_in_the_step(tmp_path: Path) -> None:
    ((metrics, returned), (known, _)), one = processes.two_and_one(
        _handed_out, tmp_path, HandsOut, {"split_points": ["c"]}
    )
    assert (metrics, returned) == one and known == metrics
    assert [count for count, _ in returned] == [2.5, 6.5, 10.5, 14.5]  # means over four micro-batches
    assert metrics["count"] == metrics["batches"] == 14.5
    assert metrics["scale"] == pytest.approx(returned[-1][1])
    assert len({scale for _, scale in returned}) == 4


class Replaces(nn.Linear):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().forward(x)


class HandsOutReplaced(Layers):
    """Logs and returns a buffer as it is, which an early submodule replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Replaces()
        self.returned = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("mean", self.b.mean)
        return {"loss": loss, "mean": self.b.mean}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(float(outputs["mean"]))


def test_a_buffer_that_a_submodule_replaces_is_logged_and_returned_as_it_is_in_the_step(tmp_path: Path) -> None:
    ((metrics, returned), (known, _)), one = processes.two_and_one(
        _handed_out, tmp_path, HandsOutReplaced, {"costs": "flops", "verify": False}
    )
    assert (metrics, returned) == one and known == metrics
    assert metrics["mean"] == pytest.approx(returned[-1])
    assert len(set(returned)) == 4


def test_no_cut_lies_between_a_submodule_that_replaces_a_buffer_and_what_logs_it() -> None:
    with pytest.raises(PartitionError, match=r"reads a tensor that unit 'b' at .* writes into"):
        piped(HandsOutReplaced(), split_points=["c"])


class CountsInCallback(L.Callback):
    """Counts the samples of validation, of which every process sees the outputs."""

    def __init__(self) -> None:
        self.samples, self.found = SumMetric(), list[float]()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.samples.update(len(outputs))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.found.append(float(self.samples.compute()))
        self.samples.reset()


class CountsInList(Layers):
    """Has a metric object in a list, which hooks of rank 0 update and ask."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.found = [SumMetric()], list[float]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[0].update(outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.found.append(float(self.losses[0].compute()))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0])


def _counted(folder: Path) -> tuple[list[float], list[float]]:
    devices, callback = processes.num_processes(), CountsInCallback()
    options = {"callbacks": [callback], "num_sanity_val_steps": 0}
    return piped(CountsInList(), devices, devices, options).found, callback.found


def test_metric_objects_that_are_no_submodules_wait_for_no_stage_and_count_for_one(tmp_path: Path) -> None:
    ((losses, samples), (_, known)), one = processes.two_and_one(_counted, tmp_path)
    assert ([pytest.approx(loss) for loss in losses], samples) == one
    assert samples == known == [32]

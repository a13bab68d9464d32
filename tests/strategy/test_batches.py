"""Batches of any layout train as on one device, or are refused; each process gets the tensors that its stages need."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from lightning_avgpipe import Averaging, Links
from lightning_avgpipe.errors import AvgPipeError, BatchError
from lightning_avgpipe.utils.placeholder import Absent
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters, state
from tests.driver import Engine
from tests.models import MLP, ConvNet, Regression, loader
from tests.trainers import both, pipeline, trainer, twins


class TimeMajor(Regression):
    """nn.LSTM's default layout: (T, B, F)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])[..., 0]


def time_first(samples: list[Any]) -> Any:
    return tuple(torch.stack(column, 1) for column in zip(*samples, strict=True))


def sequences(length: int) -> DataLoader[Any]:
    x = torch.randn(20, length, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.cumsum(1).mean(2)), batch_size=8, collate_fn=time_first)


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of batches that are not split."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [text for text in (str(one.message) for one in caught) if re.search("(batches are )?not split", text)]


@pytest.mark.parametrize("length", [6, 8])
def test_time_first_trains_as_on_one_device_with_a_warning(length: int) -> None:
    with told() as said:
        runners = both(TimeMajor, sequences(length))
    expected, found = (float(runner.callback_metrics["train_loss_epoch"]) for runner in runners)
    assert found == pytest.approx(expected, abs=1e-6)
    assert said and all("split_batch" in text for text in said)


def test_time_first_is_refused_where_micro_batches_were_asked_for() -> None:
    runner = pipeline(2, strategy={"num_microbatches": 4})
    with pytest.raises(BatchError, match=r"time first.*split_batch"):
        runner.fit(TimeMajor(), sequences(8))
    assert runner.global_step == 0


class Detector(Regression):
    """Takes batches as torchvision's detectors do: images of several sizes, and a dict for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 4)

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        features = torch.stack([self.body(image[None]).mean((0, 2, 3)) for image in images])
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        return F.mse_loss(self.head(features), boxes)


def scenes(count: int, size: int | None = None) -> list[Any]:
    make = torch.Generator().manual_seed(1)
    images = [torch.rand(3, size or 5 + i % 3, 6, generator=make) for i in range(count)]
    return [(image, {"boxes": torch.rand(1 + i % 4, 4, generator=make)}) for i, image in enumerate(images)]


def columns(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


# the last batch has two, or as many images as there are channels
@pytest.mark.parametrize(("samples", "size"), [(14, None), (11, 3)])
def test_lists_of_images_and_targets_train_as_on_one_device(samples: int, size: int | None) -> None:
    both(Detector, DataLoader(scenes(samples, size), 4, collate_fn=columns), max_epochs=1)


class Shared(MLP):
    """Beside its samples the batch holds what all of them share."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"] + batch["positions"]), batch["y"])


class WithPositions:
    def __init__(self, weights: bool) -> None:
        self.weights = weights

    def __call__(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        shared = {"positions": torch.arange(8.0)[None] / 8}
        return {"x": x, "y": y, **shared, **({"weights": torch.ones(5)} if self.weights else {})}


@pytest.mark.parametrize("weights", [False, True])
def test_what_samples_share_is_repeated_or_keeps_the_batch_whole(weights: bool) -> None:
    data = DataLoader(loader(MLP, 13, 4).dataset, batch_size=4, collate_fn=WithPositions(weights))
    both(Shared, data, data)


def test_a_first_batch_of_one_sample_says_that_the_stages_take_turns() -> None:
    with pytest.warns(UserWarning, match=r"first batch of the train data holds 1 sample.*wants 8.*take turns"):
        pipeline(2, max_epochs=1).fit(MLP(), loader(MLP, 2, 1))


class AllAtOnce(MLP):
    """Models of several series want all of them in each batch.

    Args:
        of: the steps that do.
    """

    def __init__(self, *of: str) -> None:
        super().__init__()
        self.of = of or ("training_step",)
        self.cleared = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._check("training_step", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._check("validation_step", batch)
        super().validation_step(batch, batch_idx)

    def _check(self, step: str, batch: Any) -> None:
        if step in self.of and len(batch[0]) != 8:
            raise ValueError(f"8 series are needed, {len(batch[0])} were given")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.cleared += 1


@pytest.mark.parametrize(
    ("of", "options"),
    [
        (("training_step",), {}),
        (("training_step",), {"num_pipelines": 2}),
        (("training_step", "validation_step"), {"verify": True}),
    ],
)
def test_a_step_that_takes_no_part_of_a_batch_gets_whole_ones(of: tuple[str, ...], options: dict[str, Any]) -> None:
    models = []
    for count in (1 if "training_step" in of else 8, "auto"):
        model, _ = twins(partial(AllAtOnce, *(of if count == "auto" else ("no step",))))
        runner = pipeline(2, strategy={"num_microbatches": count, **options}, max_epochs=1)
        with told() as said:
            runner.fit(model, loader(MLP, 32, 8), loader(MLP, 16, 8))
        models.append(model)
        assert runner.strategy.plan.num_stages == 2 and torch.isfinite(runner.callback_metrics["val_loss"])
    expected, found = models
    assert found.cleared == expected.cleared
    assert_same_parameters(expected, found)
    assert all("ValueError: 8 series are needed, 1 were given" in text for text in said)
    assert sorted(of) == sorted(text.partition(" for ")[2].partition(", so its stages take turns")[0] for text in said)


class BegunByData(nn.Module):
    """Begins with the mean and the deviation of its first batch, as the layers of flows do: one sample has none."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.scale.copy_(x.std(0))
            self.begun.fill_(True)
        return (x - self.shift) / self.scale


class Begun(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, BegunByData())


@pytest.mark.filterwarnings("ignore:std")
def test_a_step_whose_loss_is_no_number_on_a_part_of_a_batch_gets_whole_ones() -> None:
    with told() as said:
        one, other = both(Begun, loader(MLP, 32, 8), max_epochs=1)
    assert len(said) == 1 and "its loss is not finite on 1 of the 8 samples of a batch" in said[0]
    assert_same_parameters(one.lightning_module, other.lightning_module)


class Samples(L.Callback):
    """Keeps a batch of its own, and moves it as with any strategy."""

    def __init__(self, hook: str) -> None:
        self.moved: list[Any] = []
        setattr(self, hook, self.move)

    def move(self, trainer: L.Trainer, *args: Any) -> None:
        self.moved.append(trainer.strategy.batch_to_device({"own": torch.full((4, 8), 7.0)}))


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("on_train_epoch_start", {"num_pipelines": 2}),
        ("on_train_batch_end", {"num_pipelines": 2, "averaging": Averaging(rolling=True)}),
    ],
)
def test_a_callback_that_moves_a_batch_of_its_own_gets_it_and_changes_nothing(
    hook: str, options: dict[str, Any]
) -> None:
    samples, models = Samples(hook), twins(MLP)
    for model, callbacks in zip(models, ([], [samples]), strict=True):
        pipeline(2, strategy=options, callbacks=callbacks).fit(model, loader(MLP, 24, 4))
    assert samples.moved and all(torch.equal(batch["own"], torch.full((4, 8), 7.0)) for batch in samples.moved)
    assert_same_parameters(*models)


class Sees(ConvNet):
    """Notes which tensors of a batch are really there."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.seen: list[tuple[bool, ...]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(tuple(not isinstance(batch[name], Absent) for name in ("image", "label")))


class Augments(Sees):
    """Random changes in the transfer hooks: they must be the same for all stages."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        flip = torch.rand(len(batch["label"])) < 0.5
        return {"image": batch["image"] + flip[:, None, None, None], "label": (batch["label"] + flip) % 5}


def fit(kind: type[Sees], devices: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    model = kind("adamw")
    runner = pipeline(2, devices, {"num_microbatches": 3, **options}, max_epochs=2, limit_train_batches=3)
    runner.fit(model, loader(Sees, 24, 6, shuffle=True), loader(Sees, 12, 6, seed=1))
    data = runner.train_dataloader
    attributes = {name: getattr(data, name) for name in ("batch_size", "num_workers", "drop_last")}
    attributes["samples"] = len(data.dataset), len(data.sampler), len(data.batch_sampler)
    return {"weights": state(model), "seen": model.seen, "attributes": attributes}


# each time the first batches travel whole: what the stages need is known after the first
CASES: dict[str, tuple[Any, dict[str, Any], tuple[bool, bool], tuple[bool, bool]]] = {
    "by default": (Sees, {}, (True, True), (True, False)),
    "read by the first stage": (Sees, {"links": Links(reader="first")}, (False, True), (True, True)),
    "whole": (Sees, {"links": Links(send_batch="all")}, (True, True), (True, True)),
    "augmented": (Augments, {}, (True, True), (True, False)),
}


class ChangesLate(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            batch[0].mul_(2)


class ReplacesLate(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            batch[1] = batch[1] * 2


class AddsLate(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch.append(torch.ones(6))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch[:2])


class LooksAtInputs(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[1].sum()


class Every(Sampler[int]):
    """Divides samples among processes, and is no DistributedSampler; samplers of timm and transformers are like this.

    Args:
        data: the samples.
    """

    def __init__(self, data: Any) -> None:
        self.length, self.rank, self.num_replicas = len(data), dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.length, self.num_replicas))

    def __len__(self) -> int:
        return self.length // self.num_replicas


class ReadsAPart(MLP):
    """Divides the data among all processes, as a module for ddp may."""

    sampler: Any = DistributedSampler

    def train_dataloader(self) -> DataLoader[Any]:
        data = loader(MLP, 24, 6).dataset
        return DataLoader(data, 6, sampler=self.sampler(data))


class ReadsEvery(ReadsAPart):
    sampler = Every


class RunsWithin(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.validate(self, loader(MLP, 6, 6))


REFUSED = {
    RunsWithin: "trainer.validate() was called within another run",
    ReadsAPart: "DistributedSampler divides the data among all 2 processes",
    ReadsEvery: "Every divides the data among all 2 processes",
    ChangesLate: "a hook changed [0] of the batch after it was sent",
    ReplacesLate: "a hook changed [1] of the batch after it was sent",
    AddsLate: "a hook changed the number of tensors of the batch after it was sent",
    LooksAtInputs: "'[1]', a tensor of the batch that was not sent to this process",
}


def refusal(model: type[MLP]) -> str:
    with pytest.raises(AvgPipeError) as caught:
        pipeline(2, 2, max_epochs=1).fit(model(), None if issubclass(model, ReadsAPart) else loader(MLP, 24, 6))
    return str(caught.value)


class Divided(IterableDataset[Any]):
    """Divides its samples among all processes, as for ddp."""

    @property
    def share(self) -> range:
        rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return range(rank, 24, count)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[Any]:
        samples = loader(MLP, 24, 6).dataset
        return (samples[i] for i in self.share)


# workers of the dataloader, and who reads
WORKERS = ((0, "last"), (1, "last"), (0, "first"))


def fit_divided(devices: int, workers: int, reader: str) -> dict[str, Any]:
    data = DataLoader(Divided(), 6, num_workers=workers)
    runner, (model, _) = pipeline(2, devices, {"links": Links(reader=reader)}, max_epochs=1), twins(MLP)
    runner.fit(model, data, data)
    batches = runner.num_training_batches, runner.global_step
    return {"weights": state(model), "loss": runner.callback_metrics["val_loss"], "batches": batches}


def fit_all() -> tuple[dict[str, dict[str, Any]], list[str], list[int]]:
    fits = {name: fit(model, 2, options) for name, (model, options, _, _) in CASES.items()}
    fits |= {f"divided {case}": fit_divided(2, *case) for case in WORKERS}
    replicas = pipeline(2, 2, {"replicas": 2}, max_epochs=1)
    replicas.fit(ReadsEvery())
    samples = list(replicas.train_dataloader.sampler)
    fits["validated by replicas"] = dict(*replicas.validate(twins(MLP)[0], DataLoader(Divided(), 6), verbose=False))
    return fits, [refusal(model) for model in REFUSED], samples


in_two = processes.shared(2, lambda rank: fit_all())


@pytest.mark.parametrize("name", CASES)
def test_each_process_gets_what_it_needs(name: str, in_two: Any) -> None:
    model, _, *needed = CASES[name]
    one = fit(model, 1, {})
    for (rank, *_), expected in zip(in_two, needed, strict=True):
        assert len(rank[name]["seen"]) == 6 and rank[name]["seen"][0] == (True, True)
        assert set(rank[name]["seen"][2:]) == {expected}
        assert_equal(rank[name]["weights"], one["weights"])
        assert rank[name]["attributes"] == one["attributes"]


@pytest.mark.parametrize("case", WORKERS)
def test_data_that_divide_themselves_among_processes_are_read_as_a_whole(case: Any, in_two: Any) -> None:
    expected = fit_divided(1, *case)
    assert expected["batches"] == (4, 4)
    for rank, *_ in in_two:
        assert_equal(rank[f"divided {case}"], expected)


def test_each_replica_evaluates_data_that_divide_themselves_as_a_whole(in_two: Any) -> None:
    (expected,) = trainer().validate(twins(MLP)[0], DataLoader(Divided(), 6), verbose=False)
    for rank, *_ in in_two:
        assert rank["validated by replicas"] == pytest.approx(expected)


def test_a_hook_that_cannot_work_is_told_what_to_do(in_two: Any) -> None:
    for _, said, _ in in_two:
        for text, message in zip(said, REFUSED.values(), strict=True):
            assert message in text


def test_a_sampler_that_divides_samples_among_groups_is_left_as_it_is(in_two: Any) -> None:
    assert [samples for *_, samples in in_two] == [list(range(0, 24, 2)), list(range(1, 24, 2))]


class LooksAway(L.Callback):
    """Rank 0, with the last stage, is busy for long in the third batch; notes which batches the others then are at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = 0

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if not trainer.is_global_zero:
            (self.folder / f"{batch_idx} begun").touch()
        elif batch_idx == 2:
            threading.Event().wait(2.0)
            self.begun = len([*self.folder.glob("* begun")])


def begun_meanwhile(folder: Path) -> tuple[int, float]:
    looks = LooksAway(folder)
    strategy = {"links": Links(reader="first"), "num_microbatches": 2}
    runner = pipeline(2, 2, strategy, callbacks=[looks])
    (logged,) = runner.validate(twins(MLP)[0], loader(MLP, 80, 4), verbose=False)
    assert len([*folder.glob("* begun")]) == 20
    return looks.begun, logged["val_loss"]


def test_a_first_stage_that_reads_waits_in_evaluation_for_a_last_one_that_does_not_look(tmp_path: Path) -> None:
    """What it sends would fill memory: there are no backwards that hold it back."""
    (begun, logged), (_, same) = processes.everywhere(2, begun_meanwhile, tmp_path, folder=tmp_path)
    assert 3 <= begun <= 5
    (expected,) = pipeline(2).validate(twins(MLP)[0], loader(MLP, 80, 4), verbose=False)
    assert logged == same == pytest.approx(expected["val_loss"])


class Uses(Regression):
    """Inputs through views, a mask made from the batch that a late block takes, labels, and an unused tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    @staticmethod
    def example(size: int) -> Any:
        return {
            "x": torch.randn(size, 2, 4), "mask": torch.ones(size), "y": torch.randn(size, 8), "id": torch.arange(size),
        }  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        h = self.a(batch["x"].flatten(1))
        late = batch["mask"][:, None] * 2
        return nn.functional.mse_loss(self.c(self.b(h) * late), batch["y"])


def test_the_plan_says_what_each_stage_needs() -> None:
    engine = Engine(Uses(), 3, Uses.example(4), split_points=["b", "c"])
    needed = [[leaf.name for leaf in stage.leaves] for stage in engine.plan.stages]
    assert needed == [["['x']", "['mask']"], ["['mask']"], ["['mask']", "['y']"]]
    assert "each micro-batch sends ['x'], ['mask'] to stage 0 (72 B); ['mask'] to stage 1 (8 B)" in str(engine.plan)

"""Parallel models on two processes are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import AvgPipeError
from tests import processes
from tests.averaging.models import Models, Net
from tests.averaging.test_checkpoints import LATE
from tests.averaging.test_checkpoints import fit as fit_late
from tests.averaging.test_training import Poisoned, data
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, TiedTransformer, loader
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import pipeline

STRATEGY = {"num_pipelines": 3, "num_microbatches": 2}


def fit(folder: Path, devices: int, path: Path | None = None) -> dict[str, Any]:
    """Two epochs of seven batches: the last iteration of each has one batch for three pipelines."""
    torch.manual_seed(4 if path is None else 99)
    model, models = Net("adamw", warm_up=True), Models()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    runner = pipeline(2, devices, STRATEGY, callbacks=[models, saving], enable_checkpointing=True)
    runner.fit(model, ResumableLoader(Net, 56, 8), loader(Net, 16, 8), ckpt_path=path)
    predictions = runner.predict(model, loader(Net, 16, 8))
    return {
        "models": models.models,
        "left": state(model),
        "metrics": {name: value.item() for name, value in runner.callback_metrics.items()},
        "predictions": predictions,
        "steps": runner.global_step,
    }


def fit_tied(devices: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = TiedTransformer("adamw")
    strategy = {**STRATEGY, "averaging": Averaging(outer_lr=1.0)}
    runner = pipeline(3 if devices == 1 else 4, devices, strategy, max_epochs=1, gradient_clip_val=0.1)
    runner.fit(model, loader(TiedTransformer, 28, 4))
    return state(model)


def fit_poisoned(devices: int) -> Any:
    """A model is skipped whose gradient is NaN; by default all stop."""
    torch.manual_seed(0)
    model, options = Poisoned(), {"num_pipelines": 2, "num_microbatches": 2}
    runner = pipeline(2, devices, {**options, "averaging": Averaging(on_nonfinite="skip")}, max_epochs=1)
    runner.fit(model, data(3))
    with pytest.raises(AvgPipeError, match=r"pipeline 1, batch_idx 1: the gradient of 'layers\.0\.weight'"):
        pipeline(2, devices, options, max_epochs=1).fit(Poisoned(), data(3))
    return state(model), runner.strategy.skipped_models


class Counting(torch.utils.data.Dataset[Any]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return torch.ones(8), torch.zeros(8)


def reads(devices: int) -> list[int]:
    """Return how many batches were read at the beginning of each of three steps of two models, of twenty batches."""
    samples, seen = Counting(), list[int]()
    callback = LambdaCallback(on_train_batch_start=lambda *_: seen.append(samples.reads // 2))
    options = {"num_pipelines": 2, "num_microbatches": 2}
    runner = pipeline(2, devices, options, max_epochs=1, callbacks=[callback], limit_train_batches=3)
    runner.fit(MLP(), torch.utils.data.DataLoader(samples, 2))
    return seen


def all_of(folder: Path) -> Any:
    through = fit(folder / "two", 2)
    resumed = fit(folder / "again", 2, folder / "two" / "step=2.ckpt")
    moved = fit_late(2, devices=2, moves=["last"], averaging=LATE).left
    return through, resumed, fit_tied(2), moved, fit_poisoned(2), reads(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def in_two(folder: Path) -> list[Any]:
    return processes.everywhere(2, all_of, folder, folder=folder)


def test_two_processes_train_the_models_of_one(in_two: list[Any], folder: Path) -> None:
    expected = fit(folder / "one", 1)
    assert expected["steps"] == 6
    for found, resumed, *_ in in_two:
        assert found["steps"] == resumed["steps"] == 6
        assert_equal(found["left"], expected["left"])
        assert_equal(resumed["left"], expected["left"])
        assert found["metrics"] == expected["metrics"]
    assert_equal(in_two[0][0]["predictions"], expected["predictions"])

    for name in ("step=2", "step=6"):
        one, two = (torch.load(folder / d / f"{name}.ckpt", weights_only=True) for d in ("one", "two"))
        for key in ("state_dict", "optimizer_states"):
            assert_equal(two[key], one[key], key)
        ours, theirs = (saved["AvgPipeStrategy"]["ensemble"] for saved in (one, two))
        for key in ("models", "optimizers"):
            assert_equal(theirs[key], ours[key], key)


def test_so_they_do_with_a_weight_that_two_stages_use(in_two: list[Any]) -> None:
    expected = fit_tied(1)
    for _, _, found, *_ in in_two:
        assert_close(found, expected)


def test_stages_that_move_while_fragments_are_under_way_change_no_bit(in_two: list[Any]) -> None:
    expected = fit_late(2, averaging=LATE).left
    for *_, found, _, _ in in_two:
        assert_equal(found, expected)


def test_two_processes_skip_a_gradient_that_is_no_number_as_one_does(in_two: list[Any]) -> None:
    weights, _ = fit_poisoned(1)
    for *_, found, _ in in_two:
        assert_equal(found, (weights, 1))


def test_each_batch_of_a_limited_epoch_is_sent_while_the_one_before_it_is_used(in_two: list[Any]) -> None:
    assert reads(1) == [2, 4, 6]
    assert in_two[0][-1] == [3, 5, 6]

"""Checkpoints of parallel models: the reference for everybody, all of them to go on with the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_avgpipe import Averaging, AvgPipeStrategy
from tests.averaging.models import Models, Net, assert_equal, state
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import pipeline, trainer

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def fit(num_stages: int, seed: int = 4, path: Path | None = None, folder: Path | None = None, **strategy: Any) -> Any:
    """Two epochs of seven batches: with two pipelines four iterations each, the last of which is ragged."""
    torch.manual_seed(seed)
    model, models = Net("adamw", warm_up=True), Models()
    callbacks: list[Any] = [models]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    strategy = {
        "num_pipelines": 2,
        "num_microbatches": 2,
        "averaging": Averaging(every=3, outer_optimizer=NESTEROV),
        **strategy,
    }
    runner = pipeline(num_stages, strategy=strategy, callbacks=callbacks, enable_checkpointing=folder is not None)
    runner.fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
    models.left, models.steps = state(model), runner.global_step
    return models


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("through")
    torch.set_num_threads(1)
    return fit(2, folder=folder), folder


@pytest.mark.parametrize(("step", "num_stages"), [(1, 3), (2, 1), (3, 2), (4, 3), (6, 1)])
def test_a_resume_after_any_iteration_is_bitwise(never_stopped: Any, step: int, num_stages: int) -> None:
    expected, folder = never_stopped
    found = fit(num_stages, 99, folder / f"step={step}.ckpt")
    assert found.steps == expected.steps == 8
    assert_equal(found.left, expected.left)
    for one, other in zip(found.models, expected.models, strict=True):
        assert_equal(one, other)


def test_a_checkpoint_is_an_ordinary_one_of_the_reference(never_stopped: Any) -> None:
    expected, folder = never_stopped
    path = folder / "step=8.ckpt"
    assert_equal(state(Net.load_from_checkpoint(path, weights_only=True)), expected.reference)
    again = Net("adamw", warm_up=True)
    runner = trainer(max_epochs=3)
    runner.fit(again, ResumableLoader(Net, 56, 8), ckpt_path=path)
    assert runner.global_step > 8


@pytest.fixture(scope="module")
def reference_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    fit(2, folder=folder, averaging=Averaging(save_models=False))
    return folder


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"num_pipelines": 3}, "num_pipelines=3, but the checkpoint holds 2 parallel models: all pipelines start"),
        ({"num_pipelines": 2, "saved": False}, "num_pipelines=2, but the checkpoint holds one model: all pipelines"),
        ({"num_pipelines": 1}, "num_pipelines=1, but the checkpoint holds 2 parallel models: all pipelines start"),
        ({"num_pipelines": 1, "saved": False}, ""),
    ],
)
def test_other_parallel_models_start_from_the_reference(
    option: dict[str, Any], says: str, never_stopped: Any, reference_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    option = dict(option)
    saves = option.pop("saved", True)
    path = (never_stopped[1] if saves else reference_only) / "step=5.ckpt"
    saved = torch.load(path, weights_only=True)
    assert ("ensemble" in saved["AvgPipeStrategy"]) == saves

    class Begin(Models):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            now = {name: p.detach().clone() for name, p in module.named_parameters()}
            self.first = getattr(self, "first", now)

    caplog.clear()
    begin, model = Begin(), Net("adamw", warm_up=True)
    strategy = AvgPipeStrategy(num_stages=2, costs="flops", num_microbatches=2, **option)
    trainer(strategy=strategy, callbacks=[begin]).fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
    assert_equal(begin.first, {name: saved["state_dict"][name] for name in begin.first})
    assert says in caplog.text
    assert len(begin.models) == option["num_pipelines"]
    assert bool(says) == ("all pipelines start from its weights" in caplog.text)


def test_shards_hold_parallel_models_too(never_stopped: Any, tmp_path: Path) -> None:
    expected, _ = never_stopped
    fit(2, folder=tmp_path, save_distributed_checkpoint=True)
    found = fit(3, 99, tmp_path / "step=3.ckpt")
    assert_equal(found.left, expected.left)

"""Parallel models on two processes are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_avgpipe import Averaging
from tests import processes
from tests.averaging.models import Models, Net, assert_equal, state
from tests.models import loader
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import pipeline
from tests.weights.test_tied import TiedLanguageModel

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
    model = TiedLanguageModel()
    strategy = {**STRATEGY, "averaging": Averaging(outer_lr=1.0)}
    runner = pipeline(3 if devices == 1 else 4, devices, strategy, max_epochs=1, gradient_clip_val=0.1)
    runner.fit(model, loader(TiedLanguageModel, 28, 4))
    return state(model)


def both(rank: int, folder: Path) -> Any:
    through = fit(folder / "two", 2)
    resumed = fit(folder / "again", 2, folder / "two" / "step=2.ckpt")
    return through, resumed, fit_tied(2)


def test_two_processes_train_the_models_of_one(tmp_path: Path) -> None:
    expected = fit(tmp_path / "one", 1)
    results = processes.results(processes.run(2, both, tmp_path, folder=tmp_path))
    assert expected["steps"] == 6
    for found, resumed, _ in results:
        assert found["steps"] == resumed["steps"] == 6
        assert_equal(found["left"], expected["left"])
        assert_equal(resumed["left"], expected["left"])
        assert found["metrics"] == expected["metrics"]
    for one, other in zip(expected["predictions"], results[0][0]["predictions"], strict=True):
        assert torch.equal(one, other)

    for name in ("step=2", "step=6"):
        one, two = (torch.load(tmp_path / d / f"{name}.ckpt", weights_only=True) for d in ("one", "two"))
        assert_equal(one["state_dict"], two["state_dict"])
        ours, theirs = one["AvgPipeStrategy"]["ensemble"], two["AvgPipeStrategy"]["ensemble"]
        for a, b in zip(ours["models"], theirs["models"], strict=True):
            assert_equal(a, b)
        for a, b in zip(
            [*one["optimizer_states"], *(s for n in ours["optimizers"] for s in n)],
            [*two["optimizer_states"], *(s for n in theirs["optimizers"] for s in n)],
            strict=True,
        ):
            assert a["param_groups"] == b["param_groups"]
            assert a["state"].keys() == b["state"].keys()
            for number, entry in a["state"].items():
                assert_equal(entry, b["state"][number])

    for name, tensor in fit_tied(1).items():
        for _, _, tied in results:
            torch.testing.assert_close(tied[name], tensor, rtol=1e-5, atol=1e-6)

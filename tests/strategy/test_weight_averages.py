"""Averages of weights in two processes: the same weights and the same checkpoint as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from tests import processes
from tests.averaging.models import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline


class Normed(MLP):
    """With statistics, for which a last epoch passes without training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))


def averaged(rank: int, devices: int, path: Path) -> list[dict[str, Any]]:
    """Train, and train on from a checkpoint between two averages; the weights after both."""
    found = []
    for epochs in (3, 5):
        torch.manual_seed(3)
        module = Normed()
        saved = ModelCheckpoint(path, filename=f"{{epoch}}-{epochs}", save_top_k=-1, save_on_train_epoch_end=True)
        runner = pipeline(
            2, devices, {"num_microbatches": 2}, max_epochs=epochs,
            enable_checkpointing=True, callbacks=[StochasticWeightAveraging(0.02, swa_epoch_start=1), saved],
        )  # fmt: skip
        resumed = path / "epoch=1-3.ckpt" if epochs == 5 else None
        runner.fit(module, loader(MLP, 16, 4), ckpt_path=resumed, weights_only=False)
        found.append({key: value.clone() for key, value in module.state_dict().items()})
    return found


@pytest.mark.slow
def test_two_processes_average_like_one(tmp_path: Path) -> None:
    one = processes.results(processes.run(1, averaged, 1, tmp_path / "one", folder=tmp_path))[0]
    two = processes.results(processes.run(2, averaged, 2, tmp_path / "two", folder=tmp_path))
    assert_equal(two, [one, one])
    expected, found = (torch.load(tmp_path / sub / "epoch=3-5.ckpt", weights_only=False) for sub in ("one", "two"))
    assert any(state.get("n_averaged", 0) > 1 for state in expected["callbacks"].values())
    for key, state in expected["callbacks"].items():
        if "StochasticWeightAveraging" in key:
            assert_equal(state, found["callbacks"][key])


def kept_beside(rank: int, devices: int, path: Path) -> list[dict[str, Any]]:
    """Train with an average beside the weights, and train on; the weights after both, and what was logged."""
    found = []
    for epochs in (2, 3):
        torch.manual_seed(3)
        module = Normed()
        saved = ModelCheckpoint(path, filename=f"{{epoch}}-{epochs}", save_top_k=-1, save_on_train_epoch_end=True)
        average = EMAWeightAveraging(decay=0.5)
        runner = pipeline(
            2, devices, {"num_microbatches": 2, "costs": "measured"}, max_epochs=epochs,
            enable_checkpointing=True, callbacks=[average, saved],
        )  # fmt: skip
        resumed = path / "epoch=0-2.ckpt" if epochs == 3 else None
        data = loader(MLP, 16, 4)
        runner.fit(module, data, data, ckpt_path=resumed, weights_only=False)
        runner.save_checkpoint(path / f"after-{epochs}.ckpt")
        found.append({key: value.clone() for key, value in module.state_dict().items()})
        found.append({key: value.clone() for key, value in runner.callback_metrics.items()})
    return found


@pytest.mark.slow
def test_two_processes_keep_an_average_beside_the_weights_like_one(tmp_path: Path) -> None:
    one = processes.results(processes.run(1, kept_beside, 1, tmp_path / "one", folder=tmp_path))[0]
    two = processes.results(processes.run(2, kept_beside, 2, tmp_path / "two", folder=tmp_path))
    assert_equal(two, [one, one])
    for file in ("epoch=0-2.ckpt", "epoch=2-3.ckpt", "after-2.ckpt", "after-3.ckpt"):
        expected, found = (torch.load(tmp_path / sub / file, weights_only=False) for sub in ("one", "two"))
        for part in ("state_dict", "current_model_state", "averaging_state"):
            assert_equal(expected.get(part), found.get(part), f"{file} {part}")
        if not file.startswith("after"):
            with pytest.raises(AssertionError, match="differs"):
                assert_equal(expected["state_dict"], expected["current_model_state"])


def test_divided_checkpoints_have_no_average_beside_the_weights(tmp_path: Path) -> None:
    options = {"num_microbatches": 2, "save_distributed_checkpoint": True}
    refused = processes.run(2, refused_beside, options, folder=tmp_path)
    assert all("WeightAveraging puts averages in their place" in str(one.error) for one in refused)


def refused_beside(rank: int, options: dict[str, Any]) -> None:
    pipeline(2, 2, options, callbacks=[EMAWeightAveraging()]).fit(MLP(), loader(MLP, 16, 4))

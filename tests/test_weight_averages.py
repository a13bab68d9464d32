"""Stochastic weight averaging in two processes: the same weights and the same checkpoint as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from tests import processes
from tests.lightning_side.test_plain import same
from tests.models import MLP, loader
from tests.trainers import pipeline


class Normed(MLP):
    """With statistics, for which a last epoch passes without training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))


def averaged(rank: int, name: str, devices: int, path: Path) -> list[dict[str, Any]]:
    """Train, and train on from a checkpoint between two averages; the weights after both."""
    torch.set_num_threads(1)
    found = []
    for epochs in (3, 5):
        torch.manual_seed(3)
        module = {"MLP": MLP, "Normed": Normed}[name]()
        saved = ModelCheckpoint(path, filename=f"{{epoch}}-{epochs}", save_top_k=-1, save_on_train_epoch_end=True)
        runner = pipeline(
            2, devices, {"num_microbatches": 2}, max_epochs=epochs, enable_checkpointing=True,
            callbacks=[StochasticWeightAveraging(0.02, swa_epoch_start=1), saved],
        )  # fmt: skip
        resumed = path / "epoch=1-3.ckpt" if epochs == 5 else None
        runner.fit(module, loader(MLP, 16, 4), ckpt_path=resumed, weights_only=False)
        found.append({key: value.clone() for key, value in module.state_dict().items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", "Normed"])
def test_two_processes_average_like_one(name: str, tmp_path: Path) -> None:
    one = processes.results(processes.run(1, averaged, name, 1, tmp_path / "one", folder=tmp_path))[0]
    two = processes.results(processes.run(2, averaged, name, 2, tmp_path / "two", folder=tmp_path))
    assert same(two, [one, one])
    expected, found = (torch.load(tmp_path / sub / "epoch=3-5.ckpt", weights_only=False) for sub in ("one", "two"))
    assert any(state.get("n_averaged", 0) > 1 for state in expected["callbacks"].values())
    for key, state in expected["callbacks"].items():
        if "StochasticWeightAveraging" in key:
            assert same(state, found["callbacks"][key])

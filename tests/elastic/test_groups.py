"""Several groups of processes train the parallel models of one group."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from tests import processes
from tests.elastic.models import Batches, Models, Net, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


class Logged(Net):
    """Logs a sum, a metric object and what it returned, besides the loss."""

    def __init__(self) -> None:
        super().__init__("adamw", warm_up=True)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("sum", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("of_batch", self.mean(loss.detach(), len(batch[0])), on_step=True, on_epoch=False)
        self.log("object", self.mean, on_step=False, on_epoch=True)
        return loss


def share(groups: int, group: int) -> Batches:
    """The batches of one group: of eight in all, so four iterations an epoch."""
    return Batches(list(loader(Net, 64, 8))[group::groups])


def fit(folder: Path, groups: int, rank: int = 0, path: Path | None = None, stages: int = 1, models: int = 2) -> Any:
    torch.manual_seed(4 if path is None else 99)
    model, seen = Logged(), Models()
    torch.manual_seed(4)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    options = {"num_microbatches": 2, "num_pipelines": models // groups}
    runner = pipeline(
        stages, groups * stages, options, callbacks=[seen, saving], enable_checkpointing=True,
        use_distributed_sampler=False, gradient_clip_val=0.5,
    )  # fmt: skip
    runner.fit(model, share(groups, rank // stages), loader(Net, 16, 8), ckpt_path=path)
    validated = runner.validate(model, loader(Net, 20, 8), verbose=False)
    return {
        "models": seen.models,
        "left": state(model),
        "metrics": {name: value.item() for name, value in runner.callback_metrics.items()},
        "validated": validated,
        "steps": runner.global_step,
    }


def both(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    through = fit(folder / "two", 2, rank)
    return through, fit(folder / "again", 2, rank, folder / "one" / "step=4.ckpt")


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but running means, which groups sum in another order."""
    return {name: tensor for name, tensor in tensors.items() if "running" not in name}


def test_two_groups_train_and_save_the_models_of_two_pipelines(tmp_path: Path) -> None:
    expected = fit(tmp_path / "one", 1)
    results = processes.results(processes.run(2, both, tmp_path, folder=tmp_path))
    for g, (found, resumed) in enumerate(results):
        for run in (found, resumed):
            assert_equal(trained(run["models"][0]), trained(expected["models"][g]))
            assert_equal(trained(run["left"]), trained(expected["left"]))
            assert run["steps"] == expected["steps"] == 8
            assert run["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        for name, tensor in found["left"].items():
            torch.testing.assert_close(tensor, expected["left"][name])
    assert_equal(results[0][0]["left"], results[1][0]["left"])
    assert results[0][0]["validated"] == results[1][0]["validated"]

    # a checkpoint does not tell how many groups there were
    one, two = (torch.load(tmp_path / d / "step=8.ckpt", weights_only=True) for d in ("one", "two"))
    assert_equal(trained(one["state_dict"]), trained(two["state_dict"]))
    ours, theirs = one["AvgPipeStrategy"]["ensemble"], two["AvgPipeStrategy"]["ensemble"]
    for a, b in zip(ours["models"], theirs["models"], strict=True):
        assert_equal(trained(a), trained(b))
    for a, b in zip(ours["optimizers"], theirs["optimizers"], strict=True):
        for number, entry in a[0]["state"].items():
            assert_equal(entry, b[0]["state"][number])
    again = fit(tmp_path / "back", 1, path=tmp_path / "two" / "step=4.ckpt")
    assert_equal(trained(again["left"]), trained(expected["left"]))

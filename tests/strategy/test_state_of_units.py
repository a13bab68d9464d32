"""Hooks find, in each process, what submodules of all stages have changed; a wish to stop is heard by all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.strategy.test_attributes_of_steps import Layers
from tests.strategy.test_late_effects import batches
from tests.trainers import trainer


class Keeping(nn.Module):
    """A layer that counts, keeps numbers and statistics, and makes a buffer of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls, self.kept = nn.Linear(8, 8), nn.BatchNorm1d(8), 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        if not hasattr(self, "centre"):
            self.register_buffer("centre", x.detach().mean(0))
        self.calls += 1
        self.kept.append(x.detach().square().mean().item())
        return x - self.centre


class Reads(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.of_callback = 1 + module.b.calls


class Watching(Layers):
    """Its hooks read what a layer of the first stage keeps: those of rank 0, those of all processes, and a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Keeping()  # type: ignore[assignment]
        self.of_start = self.of_end = self.of_callback = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.of_start * self.of_end * self.of_callback
        return (self.through(batch[0]) - batch[1]).square().mean() / weight

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_start = 1 + self.b.calls

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("kept", sum(self.b.kept))  # type: ignore[arg-type]
        self.of_end = 1 + float(self.b.norm.running_mean.abs().sum())  # type: ignore[union-attr]
        self.b.kept.clear()  # type: ignore[union-attr, operator]

    def on_train_epoch_end(self) -> None:
        self.log("variance", self.b.norm.running_var.mean())  # type: ignore[union-attr]


class Stops(Layers):
    """The step, or a hook of rank 0, asks the trainer to stop."""

    in_step = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.through(batch[0]) - batch[1]).square().mean()
        if self.in_step and batch_idx == 1:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.in_step and batch_idx == 1:
            self.trainer.should_stop = True


class Measuring(Layers):
    class Measured(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.mean = MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            self.mean.update(x.detach())
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.b = self.Measured()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0]).square().mean()


class Replaces(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) - batch[1]).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            nn.utils.parametrizations.weight_norm(self.a)


def fitted(rank: int, make: Any, devices: int) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    module, strategy = make(), AvgPipeStrategy(
        num_stages=devices, num_microbatches=2, split_points=["c"] if devices > 1 else None, costs_cache=None,
        timeout=20, save_distributed_checkpoint=False,
    )  # fmt: skip
    callbacks = [Reads()] if make is Watching else []
    running = trainer(strategy=strategy, devices=devices, callbacks=callbacks, max_epochs=2)
    running.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return module.state_dict(), dict(running.callback_metrics), running.global_step


def test_hooks_read_what_submodules_of_another_process_keep(tmp_path: Path) -> None:
    expected, metrics, _ = fitted(0, Watching, 1)
    assert "b.centre" in expected  # which the layer has registered in its process
    for state, found, _ in processes.results(processes.run(2, fitted, Watching, 2, folder=tmp_path)):
        assert [name for name in expected if not torch.equal(expected[name], state[name])] == []
        assert found == metrics


@pytest.mark.parametrize("in_step", [True, False])
def test_a_wish_to_stop_of_the_step_or_of_a_hook_stops_all_processes(in_step: bool, tmp_path: Path) -> None:
    make = type("Stops", (Stops,), {"in_step": in_step})
    results = processes.results(processes.run(2, fitted, make, 2, folder=tmp_path))
    assert [steps for *_, steps in results] == [2, 2]


def test_a_metric_that_a_submodule_of_another_stage_updates_is_refused(tmp_path: Path) -> None:
    outcomes = processes.run(2, fitted, Measuring, 2, folder=tmp_path)
    assert "inside a submodule that runs on another stage than the loss" in str([outcome.error for outcome in outcomes])


def test_a_submodule_that_a_hook_replaces_is_named(tmp_path: Path) -> None:
    outcomes = processes.run(2, fitted, Replaces, 2, folder=tmp_path)
    said = "".join(outcome.error or "" for outcome in outcomes)
    assert "the module's parameters 'a.weight', 'a.parametrizations.weight.original0'" in said


class Prunes(Replaces):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            prune.l1_unstructured(self.a, "weight", amount=0.5)


def test_a_hook_may_prune_a_submodule_in_one_process() -> None:
    module, strategy = Prunes(), AvgPipeStrategy(num_stages=2, num_microbatches=2, costs_cache=None)
    trainer(strategy=strategy, max_epochs=2).fit(module, DataLoader(batches(), batch_size=None))  # type: ignore
    state = module.state_dict()
    assert {"a.weight_orig", "a.weight_mask"} <= state.keys() and "a.weight" not in state
    assert int(state["a.weight_mask"].sum()) == state["a.weight_mask"].numel() // 2

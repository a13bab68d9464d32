"""Training on the simulated device: the host's weights, no race, nothing freed early, no wait per micro-batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_avgpipe import Averaging, AvgPipeTuner
from tests.models import MLP, ConvNet, loader
from tests.simulated import device
from tests.simulated.accelerator import SimulatedAccelerator
from tests.trainers import pipeline

Simulated = Callable[..., Any]


def fit(
    on_device: bool, kind: type, strategy: dict[str, Any], options: dict[str, Any], count: int = 3, devices: int = 1
) -> dict[str, Tensor]:
    """Weights after training on batches of 8."""
    torch.manual_seed(4)
    module = kind()
    accelerator: Any = SimulatedAccelerator() if on_device else "cpu"
    runner = pipeline(devices=devices, strategy=strategy, accelerator=accelerator, max_epochs=1, **options)
    runner.fit(module, loader(kind, 8 * count, 8))
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


class Manual(MLP):
    """Steps itself, and clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        return loss


def compared(*args: Any) -> tuple[list[str], list[str]]:
    """Names of weights that differ from the host's, and what was found."""
    with device.reported() as report:
        ours = fit(True, *args)
    return [name for name, tensor in fit(False, *args).items() if not torch.equal(tensor, ours[name])], list(
        report.errors
    )


@pytest.mark.parametrize("strategy", [{}, {"num_pipelines": 2}, {"recompute": True}], ids=str)
def test_weights_are_those_of_the_host(simulated: Simulated, strategy: dict[str, Any]) -> None:
    differ, errors = simulated(compared, MLP, {"num_microbatches": 4, **strategy}, {"gradient_clip_val": 0.1})
    assert not differ
    assert not errors


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_pipelines": 4},
        {"num_pipelines": 2, "averaging": Averaging(rolling=True)},
        {"weight_policy": "stash"},
        {"weight_policy": "spectrain"},
        {"schedule": "zb_h1"},
    ],
    ids=str,
)
def test_weights_of_other_schedules_and_policies_are_those_of_the_host(
    simulated: Simulated, strategy: dict[str, Any]
) -> None:
    assert simulated(compared, MLP, {"num_microbatches": 4, **strategy}, {}, 8) == ([], [])


class Counting(MLP):
    """Changes an attribute in each step, so that its pipelines share a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total = self.total + loss.detach()
        return loss + 0.1 * self.total


def beside(kind: type, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of weights that differ with and without streams of their own, and what was found."""
    one = fit(True, kind, strategy, options, 16)
    with device.reported() as report:
        averaging = dataclasses.replace(strategy.get("averaging", Averaging()), streams=True)
        several = fit(True, kind, {**strategy, "averaging": averaging}, options, 16)
    return [name for name, tensor in one.items() if not torch.equal(tensor, several[name])], list(report.errors)


class Logging(MLP):
    """Counts in a metric, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen(loss)
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        return loss


class Asking(Logging):
    """Asks for its device, and has parts that do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = L.LightningModule()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.ones(batch[0].shape, device=self.device) + torch.ones(1, device=self.part.device)
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


def test_modules_know_their_device_and_metric_objects_count_there(simulated: Simulated) -> None:
    assert simulated(compared, Asking, {"num_microbatches": 2}, {}) == ([], [])


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [
        (MLP, {"num_pipelines": 4}, {"gradient_clip_val": 0.1}),
        (MLP, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}, {}),
        (MLP, {"num_pipelines": 2, "recompute": True}, {}),
        (ConvNet, {"num_pipelines": 2}, {}),
        (Counting, {"num_pipelines": 2}, {}),
        (Logging, {"num_pipelines": 2, "recompute": True}, {}),
        (Logging, {"num_pipelines": 2}, {"accumulate_grad_batches": 2}),
    ],
    ids=str,
)
def test_pipelines_on_streams_of_their_own_train_what_they_train_on_one(
    simulated: Simulated, kind: type, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    assert simulated(beside, kind, {"num_microbatches": 4, **strategy}, options) == ([], [])


def resumed(folder: Path) -> tuple[list[str], list[str]]:
    """Names of weights that differ from those of one run after half of it was resumed, and what was found."""

    def trained(epochs: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        torch.manual_seed(4)
        module, strategy = MLP("adamw"), {"num_microbatches": 4, "num_pipelines": 2}
        keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        runner = pipeline(
            strategy=strategy, accelerator=SimulatedAccelerator(), max_epochs=epochs, callbacks=[keeps],
            enable_checkpointing=True,
        )  # fmt: skip
        runner.fit(module, loader(MLP, 32, 8), ckpt_path=ckpt_path)
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}

    with device.reported() as report:
        whole, rest = trained(2), trained(2, str(folder / "epoch=0.ckpt"))
    return [name for name, tensor in whole.items() if not torch.equal(tensor, rest[name])], list(report.errors)


def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(simulated: Simulated, tmp_path: Path) -> None:
    assert simulated(resumed, tmp_path) == ([], [])


def waits(
    count: int, kind: type, strategy: dict[str, Any], options: dict[str, Any], devices: int = 1
) -> Counter[tuple[str, str]]:
    """How often, by file of the package and function, the main thread waits during so many batches."""
    with device.reported() as report:
        fit(True, kind, strategy, options, count, devices)
    places: Counter[tuple[str, str]] = Counter()
    for wait, found in report.waits.items():
        if wait.thread == "MainThread":
            places[wait.file, wait.function] += found
    return places


def per_iteration(kind: type, strategy: dict[str, Any], options: dict[str, Any]) -> dict[tuple[str, str], float]:
    few, many = waits(4, kind, strategy, options), waits(8, kind, strategy, options)
    iterations = 4 / strategy.get("num_pipelines", 1)
    return {place: (found - few[place]) / iterations for place, found in many.items() if found != few[place]}


def waits_with(kind: type, options: dict[str, Any], *counts: int) -> list[dict[tuple[str, str], float]]:
    """Of the iterations of a few batches each, by the number of micro-batches."""
    return [per_iteration(kind, {"num_microbatches": count, **options}, {}) for count in counts]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (MLP, {}, {}),
        (ConvNet, {}, {("engine/loss.py", "_targets"): 1}),  # ignored targets are looked for
        pytest.param(
            MLP,
            {"num_pipelines": 2},
            {("strategy/gradient_check.py", "_check"): 1, ("averaging/integrity.py", "check"): 0.5},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_no_wait_per_micro_batch_and_two_at_most(
    simulated: Simulated, kind: type, options: dict[str, Any], expected: dict[tuple[str, str], float]
) -> None:
    assert simulated(waits_with, kind, options, 2, 8) == [expected, expected]


def tuned(strategy: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether the tuner takes lanes of one process to run in turns, and what was found."""
    tuner = AvgPipeTuner()
    with device.reported() as report:
        fit(True, MLP, strategy, {"callbacks": [tuner]}, 16)
    assert tuner.result is not None
    return tuner.result.profile.device.in_turns, list(report.errors)


def test_the_tuner_expects_nothing_side_by_side_of_lanes_that_share_a_stream(simulated: Simulated) -> None:
    assert simulated(tuned, {}) == (True, [])


def test_the_tuner_expects_pipelines_with_streams_of_their_own_side_by_side(simulated: Simulated) -> None:
    assert simulated(tuned, {"averaging": Averaging(streams=True)}) == (False, [])

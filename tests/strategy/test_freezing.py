"""What is frozen while training runs needs no backward, and no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.schedule import num_forward_only
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from tests import processes
from tests.averaging.models import assert_equal
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline, trainer

SIZE, MICRO_BATCHES, EPOCHS = 8, 4, 4
STAGES = ["backbone.2", "backbone.4"]


class FineTuned(Regression):
    """A backbone of four blocks, and a head."""

    example = staticmethod(MLP.example)

    def __init__(self, frozen: int = 0, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        parts = ((nn.Linear(8, 8), norm(8), nn.Tanh()) for _ in range(4))
        self.backbone = nn.Sequential(*(nn.Sequential(*block) for block in parts))
        self.backbone.append(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)))
        self.head = nn.Linear(8, 8)
        self.freeze(frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def freeze(self, blocks: int) -> None:
        for i, block in enumerate(self.backbone):
            block.requires_grad_(i >= blocks)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class InItsHook(FineTuned):
    """Freezes in a hook that only rank 0 runs."""

    def on_train_epoch_end(self) -> None:
        self.freeze({0: 2, 1: 1, 2: 4}.get(self.current_epoch, 0))


class AtEpochs(L.Callback):
    def __init__(self, blocks: dict[int, int]) -> None:
        self.blocks = blocks

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.blocks:
            pl_module.freeze(self.blocks[trainer.current_epoch])


class AtSteps(AtEpochs):
    def on_train_epoch_start(self, *_: Any) -> None:
        """Between batches instead."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.blocks:
            pl_module.freeze(self.blocks[trainer.global_step])


def thawing() -> list[L.Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)]


# who freezes -> module, callbacks, and how many stages of three run forwards only in each of eight iterations
SCENARIOS: dict[str, tuple[Any, Any, str]] = {
    "before training": (lambda: FineTuned(3), list, "11111111"),
    "an epoch's begin": (FineTuned, lambda: [AtEpochs({1: 2, 2: 4, 3: 1})], "00112200"),
    "unfrozen": (lambda: FineTuned(4), lambda: [AtEpochs({1: 3, 3: 0})], "22111100"),
    "between batches": (FineTuned, lambda: [AtSteps({1: 2, 3: 4, 4: 1, 7: 2})], "01120001"),
    "a hook of rank 0": (InItsHook, list, "00110022"),
    "Lightning": (lambda: FineTuned(norm=nn.LayerNorm), thawing, "22220000"),
}


def fit(
    rank: int, scenario: str, devices: int = 1, strategy: dict[str, Any] | None = None, path: Path | None = None,
    **options: Any,
) -> tuple[FineTuned, str]:  # fmt: skip
    """Train with three stages; returns the module, and how many of them ran forwards only, in each iteration."""
    torch.manual_seed(3)
    make, callbacks, _ = SCENARIOS[scenario]
    module, lanes, seen = make(), Pipeline.lanes, []

    def noted(self: Any, step: str, schedule: Any, task: Any, *args: Any) -> Any:
        if task.trains and self.number == 0:
            seen.append(str(num_forward_only(schedule)))
        return lanes(self, step, schedule, task, *args)

    chosen: dict[str, Any] = {"num_microbatches": MICRO_BATCHES, "split_points": STAGES, **(strategy or {})}
    runner = pipeline(3 if devices == 1 else 2, devices, chosen, callbacks=callbacks(), max_epochs=EPOCHS, **options)
    with mock.patch.object(Pipeline, "lanes", noted):
        runner.fit(module, loader(FineTuned, 2 * SIZE, SIZE), loader(FineTuned, SIZE, SIZE))
    if path is not None and rank == 0:
        torch.save(module.state_dict(), path)
    return module, "".join(seen)


@pytest.fixture(scope="module")
def plainly() -> Iterator[Any]:
    """What one process makes of a scenario, with the same micro-batches."""
    found: dict[str, dict[str, Tensor]] = {}

    def train(scenario: str) -> dict[str, Tensor]:
        if scenario not in found:
            torch.manual_seed(3)
            make, callbacks, _ = SCENARIOS[scenario]
            module = make()
            options = {"accumulate_grad_batches": MICRO_BATCHES, "max_epochs": EPOCHS, "callbacks": callbacks()}
            size = SIZE // MICRO_BATCHES
            trainer(**options).fit(module, loader(FineTuned, 2 * SIZE, size), loader(FineTuned, SIZE, SIZE))
            found[scenario] = module.state_dict()
        return found[scenario]

    yield train


OTHERWISE = [("an epoch's begin", {"recompute": True}), ("an epoch's begin", {"schedule": "afab"})]


@pytest.mark.parametrize(
    ("scenario", "strategy"),
    [*((scenario, {}) for scenario in SCENARIOS), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERWISE)],
)
def test_frozen_stages_run_forwards_only_and_nothing_changes(
    scenario: str, strategy: dict[str, Any], plainly: Any
) -> None:
    module, forward_only = fit(0, scenario, 1, strategy)
    assert forward_only == SCENARIOS[scenario][2]
    assert_equal(module.state_dict(), plainly(scenario))


def test_parallel_models_are_those_of_stages_with_backwards() -> None:
    strategy = {"num_pipelines": 2, "recompute": True}
    module, forward_only = fit(0, "an epoch's begin", 1, strategy)
    assert set(forward_only) == set("012")
    with mock.patch.object(ScheduleControl, "freeze"):
        other, forward_only = fit(0, "an epoch's begin", 1, strategy)
    assert set(forward_only) == {"0"}
    assert_equal(module.state_dict(), other.state_dict())


@pytest.mark.parametrize("scenario", ["an epoch's begin", pytest.param("a hook of rank 0", marks=pytest.mark.slow)])
def test_processes_agree_on_what_is_frozen(scenario: str, plainly: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    outcomes = processes.run(2, fit, scenario, 2, {"split_points": ["backbone.2"]}, path, folder=tmp_path)
    (_, first), (_, second) = processes.results(outcomes)
    assert first == second == SCENARIOS[scenario][2].replace("2", "1")
    assert_equal(torch.load(path, weights_only=True), plainly(scenario))


def only_here(rank: int) -> None:
    class OnRankZero(AtEpochs):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                super().on_train_epoch_start(trainer, pl_module)

    SCENARIOS["rank 0"] = (FineTuned, lambda: [OnRankZero({1: 2})], "")
    fit(rank, "rank 0", 2, {"split_points": ["backbone.2"]})


def test_processes_that_freeze_differently_end_with_an_error(tmp_path: Path) -> None:
    for outcome in processes.run(2, only_here, folder=tmp_path):
        assert outcome.error is not None and "'backbone.0.0.bias', 'backbone.0.0.weight'" in outcome.error


class Skipping(FineTuned):
    """Some batches have no loss at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss

    def on_after_backward(self) -> None:
        self.backwards = getattr(self, "backwards", 0) + 1


def skipping(rank: int) -> int:
    SCENARIOS["skips"] = (lambda: Skipping(3), list, "")
    module, forward_only = fit(rank, "skips", 2, {"split_points": ["backbone.2"]})
    assert forward_only == "1" * 2 * EPOCHS
    return int(module.backwards)


@pytest.mark.slow
def test_processes_without_backwards_know_which_batches_are_skipped(tmp_path: Path) -> None:
    assert processes.results(processes.run(2, skipping, folder=tmp_path)) == [EPOCHS, EPOCHS]


class Asking(FineTuned):
    """What comes out of frozen layers asks for a gradient nevertheless, as adapters with checkpoints want it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone[2:](self.backbone[:2](x).requires_grad_()))


def test_a_value_may_ask_for_a_gradient_behind_frozen_stages() -> None:
    SCENARIOS["asks"] = (lambda: Asking(2), list, "")
    _, forward_only = fit(0, "asks")
    assert forward_only == "1" * 2 * EPOCHS

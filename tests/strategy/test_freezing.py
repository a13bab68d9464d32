"""What is frozen while training runs needs no backward, and no number changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.schedule import num_forward_only
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from tests import processes
from tests.comparing import assert_equal
from tests.models import Regression, loader
from tests.trainers import BATCH, MICROBATCHES, loaders, pipeline, single

EPOCHS = 4
STAGES = ["backbone.2", "backbone.4"]


class FineTuned(Regression):
    """A backbone of four blocks, and a head."""

    backwards = 0

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


class Asking(FineTuned):
    """What comes out of frozen layers asks for a gradient nevertheless, as adapters with checkpoints want it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone[2:](self.backbone[:2](x).requires_grad_()))


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
    "asking behind frozen stages": (lambda: Asking(2), list, "11111111"),
    "Lightning": (lambda: FineTuned(norm=nn.LayerNorm), thawing, "22220000"),
}


def fit(scenario: str, devices: int = 1, strategy: dict[str, Any] | None = None) -> tuple[FineTuned, str]:
    """Train with three stages; returns the module, and how many of them ran forwards only, in each iteration."""
    torch.manual_seed(3)
    make, callbacks, _ = SCENARIOS[scenario]
    module, lanes, seen = make(), Pipeline.lanes, []

    def noted(self: Any, step: str, schedule: Any, task: Any, *args: Any) -> Any:
        if task.trains and self.number == 0:
            seen.append(str(num_forward_only(schedule)))
        return lanes(self, step, schedule, task, *args)

    chosen: dict[str, Any] = {"num_microbatches": MICROBATCHES, "split_points": STAGES, **(strategy or {})}
    runner = pipeline(3 if devices == 1 else 2, devices, chosen, callbacks=callbacks(), max_epochs=EPOCHS)
    with mock.patch.object(Pipeline, "lanes", noted):
        runner.fit(module, loader(FineTuned, 2 * BATCH, BATCH), loader(FineTuned, BATCH, BATCH))
    return module, "".join(seen)


@pytest.fixture(scope="module")
def plainly() -> Iterator[Any]:
    """What one process makes of a scenario, with the same micro-batches."""
    found: dict[str, dict[str, Tensor]] = {}

    def train(scenario: str) -> dict[str, Tensor]:
        if scenario not in found:
            torch.manual_seed(3)
            make, callbacks, _ = SCENARIOS[scenario]
            module, (batches, _) = make(), loaders(FineTuned, 2 * BATCH)
            single(max_epochs=EPOCHS, callbacks=callbacks()).fit(module, batches, loader(FineTuned, BATCH, BATCH))
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
    module, forward_only = fit(scenario, 1, strategy)
    assert forward_only == SCENARIOS[scenario][2]
    assert_equal(module.state_dict(), plainly(scenario))


def test_parallel_models_are_those_of_stages_with_backwards() -> None:
    strategy = {"num_pipelines": 2, "recompute": True}
    module, forward_only = fit("an epoch's begin", 1, strategy)
    assert set(forward_only) == set("012")
    with mock.patch.object(ScheduleControl, "freeze"):
        other, forward_only = fit("an epoch's begin", 1, strategy)
    assert set(forward_only) == {"0"}
    assert_equal(module.state_dict(), other.state_dict())


class OnRankZero(AtEpochs):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            super().on_train_epoch_start(trainer, pl_module)


class SlowsOnRankZero(L.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            trainer.optimizers[0].param_groups[0]["lr"] /= 2


class Skipping(FineTuned):
    """Some batches have no loss at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss

    def on_after_backward(self) -> None:
        self.backwards += 1


TWO = {"split_points": ["backbone.2"]}
SCENARIOS["skips"] = (lambda: Skipping(3), list, "1" * 2 * EPOCHS)
SCENARIOS["rank 0 only"] = (FineTuned, lambda: [OnRankZero({1: 2})], "")
SCENARIOS["a rate of rank 0"] = (FineTuned, lambda: [SlowsOnRankZero()], "")


def in_rank(scenarios: Sequence[str]) -> tuple[dict[str, tuple[dict[str, Tensor], int, str]], list[str]]:
    """What becomes of scenarios, and the errors of those that are not the same everywhere."""
    found = {scenario: fit(scenario, 2, TWO) for scenario in scenarios}
    errors = []
    for scenario in ("rank 0 only", "a rate of rank 0"):
        with pytest.raises(AvgPipeError) as caught:
            fit(scenario, 2, TWO)
        errors.append(str(caught.value))
    states = {name: (module.state_dict(), module.backwards, only) for name, (module, only) in found.items()}
    return states, errors


@pytest.mark.parametrize(
    "scenarios", [("an epoch's begin",), pytest.param(("a hook of rank 0", "skips"), marks=pytest.mark.slow)]
)
def test_processes_agree_on_what_is_frozen_or_end_with_an_error(
    scenarios: Sequence[str], plainly: Any, tmp_path: Path
) -> None:
    for found, (error, of_rate) in processes.everywhere(2, in_rank, scenarios, folder=tmp_path):
        assert re.match("'lr' of parameter group 0 of optimizer 0 is .* on rank 0 and .* on rank 1", of_rate)
        for scenario, (weights, backwards, forward_only) in found.items():
            assert forward_only == SCENARIOS[scenario][2].replace("2", "1")
            if scenario == "skips":
                assert backwards == EPOCHS
            else:
                assert_equal(weights, plainly(scenario))
        assert "'backbone.0.0.bias', 'backbone.0.0.weight'" in error

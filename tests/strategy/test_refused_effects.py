"""What a step does that its stages cannot do together is refused by name, before an optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_avgpipe.errors import AvgPipeError, CaptureError, PartitionError, StepChangedError
from tests import processes
from tests.models import MLP, loader
from tests.trainers import pipeline


class StepsSchedule(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        try:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        except Exception:  # of ours too, which must not be lost
            return loss
        return loss


def test_a_step_that_changes_the_learning_rate_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_refused_effects.py:29 in training_step the step changes hyper-param"):
        pipeline(2).fit(StepsSchedule(), loader(MLP, 16, 8))


class ReadsMomentum(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + len(self.optimizers().state))  # type: ignore[union-attr]


def refusal(rank: int, model: type[MLP]) -> str:
    try:
        pipeline(2, 2).fit(model(), loader(MLP, 16, 8))
    except AvgPipeError as error:
        return str(error)
    return ""


def test_a_step_that_reads_the_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    refusals = processes.results(processes.run(2, refusal, ReadsMomentum, folder=tmp_path))
    assert any("uses the state of an optimizer, of which each process has only the part" in text for text in refusals)


class CountsOperations(MLP):
    begin = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < self.begin:
            return super().training_step(batch, batch_idx)
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(batch, batch_idx)
        return loss * counter.get_total_flops()


@pytest.mark.parametrize(("begin", "error"), [(0, PartitionError), (1, StepChangedError)])
def test_a_mode_that_would_see_the_operations_of_one_stage_is_refused(begin: int, error: type[Exception]) -> None:
    module = CountsOperations()
    module.begin = begin
    with pytest.raises(error, match=r"the step is in a _?FlopCounterMode"):
        pipeline(2).fit(module, loader(MLP, 16, 8))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_backward_that_changes_what_later_forwards_read_is_refused() -> None:
    module = MLP()
    module.layers[0] = Checkpointed(spectral_norm(nn.Linear(8, 8)))
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4}
    with pytest.raises(StepChangedError, match=r"the backward of a micro-batch changes '.*_u'"):
        pipeline(2, strategy=options).fit(module, loader(MLP, 16, 8))


class AssignsSubmodule(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[0] = self.layers[2]  # type: ignore[index]
        return super().training_step(batch, batch_idx)


def test_a_step_that_assigns_a_submodule_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"assigns a submodule, so that .*'layers.2.weight' is 'layers.0"):
        pipeline(2).fit(AssignsSubmodule(), loader(MLP, 16, 8))

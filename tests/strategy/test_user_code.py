"""What user code sees of the engine: its own errors, and each batch as a whole."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_avgpipe.errors import StageError
from tests.models import MLP, loader
from tests.trainers import pipeline


class Blown(Exception):
    """No exception that anybody else knows."""


class Fails(MLP):
    fuse: type[Exception] = Blown

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.last:
            raise self.fuse("the fuse has blown")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("last", "count", "note"),
    [
        (0, "auto", "while training_step was followed on a first micro-batch"),
        (0, "auto", "was tried as 1, because training_step fails on 1 of the 8 samples of a batch: Blown: the fuse"),
        (0, 4, "of the 8 samples of a batch; a step that needs all of them at once trains with num_microbatches=1"),
        (1, "auto", "stage 0 of 2 (rank 0) failed in F0"),
    ],
)
def test_an_exception_of_the_step_comes_as_it_is_with_a_note(last: int, count: Any, note: str) -> None:
    with pytest.raises(Blown) as caught:
        pipeline(2, strategy={"num_microbatches": count}).fit(Fails(last), loader(MLP, 16, 8))
    assert any(note in line for line in caught.value.__notes__)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (1, "failed in F0: StopIteration: the fuse has blown"),
        (0, r"Fails.training_step raises StopIteration \(the fuse has blown\)"),  # while it is captured
    ],
)
def test_stop_iteration_in_a_step_does_not_end_the_epoch(last: int, said: str) -> None:
    module = Fails(last)
    module.fuse = StopIteration
    with pytest.raises(StageError, match=said):
        pipeline(2, strategy={"verify": False}).fit(module, loader(MLP, 16, 8))


class Logs(MLP):
    """Logs something else beside its loss."""

    wrong: tuple[Any, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log(*self.wrong)
        return loss


TWICE = MisconfigurationException, "twice in `training_step` with different arguments"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (("value", "text"), ValueError, "self.log(value, text)` was called"),
        (("value", torch.ones(2)), ValueError, "single element"),
        (("value/dataloader_idx_0", 1.0), MisconfigurationException, "should not contain information about"),
        (("value", MeanMetric()), MisconfigurationException, "Could not find the `LightningModule` attribute"),
        (("train_loss", 1.0, True), *TWICE),
    ],
)
def test_a_wrong_log_is_an_error_of_its_line(wrong: Any, error: type[Exception], message: str) -> None:
    """But for a name that is logged in two ways, which are compared behind the step."""
    module = Logs()
    module.wrong = wrong
    with pytest.raises(error) as caught:
        pipeline(2).fit(module, loader(MLP, 16, 8))
    assert message in str(caught.value)
    assert "self.log(*self.wrong)" in "".join(traceback.format_exception(caught.value)) or message == TWICE[1]


def test_gradients_are_cleared_between_the_forward_and_the_backward() -> None:
    class Order(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[str] = []
            self.gradients: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.order.append("step")
            return loss

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.order.append("zero_grad")
            self.gradients.append(all(p.grad is not None for p in self.parameters()))

        def on_before_backward(self, loss: Tensor) -> None:
            self.order.append("backward")
            self.gradients.append(any(p.grad is not None for p in self.parameters()))

    module = Order()
    strategy = {"num_microbatches": 2}
    pipeline(3, strategy=strategy, max_epochs=1, accumulate_grad_batches=2).fit(module, loader(MLP, 24, 8))
    first, other = ["step", "zero_grad", "backward", "step"], ["step", "backward", "step"]
    assert module.order == first + other + first
    assert module.gradients == [False, False, True, True, False]  # (there at the clearing), there at the backward


def test_a_module_that_was_trained_can_be_saved_with_its_trainer(tmp_path: Path) -> None:
    runner = pipeline(2, max_steps=1)
    runner.fit(MLP(), loader(MLP, 8, 8))
    torch.save(runner, tmp_path / "trainer.pt")
    again: L.Trainer = torch.load(tmp_path / "trainer.pt", weights_only=False)
    again.validate(again.lightning_module, loader(MLP, 8, 8), verbose=False)
    assert "val_loss" in again.callback_metrics

"""Hooks that may change gradients see those of every parallel model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import Optimizer

from lightning_avgpipe import Averaging
from tests.averaging.models import Net, assert_equal, state, train
from tests.averaging.test_training import every
from tests.models import loader
from tests.trainers import pipeline


class Quiet(Net):
    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.0)


def change(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:  # a process has those of its own stages
            parameter.grad.clamp_(-0.01, 0.002)


class AfterBackward(Quiet):
    def on_after_backward(self) -> None:
        change(self)


class BeforeStep(Quiet):
    """Looks at the optimizer, and changes its learning rate relative to what it was."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()


class Clips(Quiet):
    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        change(self)


class Callback(L.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        change(module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AfterBackward, dict),
        (BeforeStep, dict),
        (Clips, dict),
        (Quiet, lambda: {"callbacks": [Callback()]}),
        (Quiet, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ],
)
def test_models_that_never_meet_have_the_gradients_of_independent_runs_bitwise(
    kind: Callable[[], Any], options: Callable[[], dict[str, Any]]
) -> None:
    torch.manual_seed(3)
    found = train(kind(), loader(Net, 48, 8), 2, averaging=Averaging(alpha=0.0, outer_lr=1.0), trainer=options())
    for n, model in enumerate(found.models):
        torch.manual_seed(3)
        alone = kind()
        pipeline(2, strategy={"num_microbatches": 2}, max_epochs=1, **options()).fit(alone, every(2, n))
        assert_equal(state(alone), model)


def test_a_pipeline_without_a_batch_has_no_gradients_to_look_at() -> None:
    class Looks(Quiet):
        def __init__(self) -> None:
            super().__init__()
            self.backwards = self.steps = 0

        def on_after_backward(self) -> None:
            self.backwards += 1
            assert all(parameter.grad is not None for parameter in self.parameters())

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.steps += 1
            self.log("norm", torch.tensor(float(self.steps)), on_step=True)

    model = Looks()
    found = train(model, loader(Net, 40, 8))  # of the third iteration only pipeline 0 has a batch
    assert (model.backwards, model.steps) == (5, 5)
    assert found.trainer.callback_metrics["norm"] == 5  # pipeline 0's in the last iteration

"""What the step asks of a node must be the same where it is executed and on the last stage, whose run counts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import StepChangedError
from tests.models import MLP, loader
from tests.trainers import pipeline


class _Body(MLP):
    """Its step computes between the first units, which a first stage executes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first, *others = self.layers
        return nn.functional.mse_loss(nn.Sequential(*others)(self.between(first(x))), y)

    def between(self, x: Tensor) -> Tensor:
        return x

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class _Scaled(_Body):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + time.perf_counter_ns() * 1e-12)


class _Chosen(_Body):
    def between(self, x: Tensor) -> Tensor:
        return x.clamp(min=-float(time.perf_counter_ns()), max=None)


class _Ungraded(_Body):
    def between(self, x: Tensor) -> Tensor:
        with open("calls", "ab+") as file:  # what lies on a disk nobody puts back
            file.write(b".")
            even = file.tell() % 2 == 0
        with torch.set_grad_enabled(even):
            return x * 2


@pytest.mark.parametrize(("model", "what"), [(_Scaled, "mul"), (_Chosen, "clamp"), (_Ungraded, "mul")])
def test_what_differs_between_stages_is_an_error_before_the_first_step(model: Any, what: str) -> None:
    trainer = pipeline(2, strategy={"num_microbatches": 1, "verify": False}, max_epochs=1)
    message = rf"test_attestation.py:\d+ in between the step asks .*{what}.*where stage 0 executed it"
    with pytest.raises(StepChangedError, match=message):
        trainer.fit(model(), loader(MLP, 16, 8))
    assert trainer.global_step == 0
    with pytest.raises(StepChangedError, match=message):
        pipeline(2, strategy={"num_microbatches": 1}).validate(model(), loader(MLP, 16, 8))

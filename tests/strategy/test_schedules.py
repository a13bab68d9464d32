"""Schedules by name, with the strategy: every one trains the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.errors import ConfigurationError
from tests.models import MLP, LSTMStack, Regression, TinyTransformer
from tests.trainers import assert_defaults_equal_accumulation, trainer


@pytest.mark.parametrize(("model", "schedule"), [(TinyTransformer, "zb_h1"), (LSTMStack, "zb_h2")])
def test_weights_equal_accumulation_bit_for_bit(model: type[Regression], schedule: str) -> None:
    torch.manual_seed(1)
    assert_defaults_equal_accumulation(model(), model.example(8), 3, schedule=schedule, num_microbatches=4)


def weights(schedule: str, accumulate: int, num_pipelines: int, precision: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = MLP("adamw")
    options: dict[str, Any] = {"costs": "flops", "num_pipelines": num_pipelines, "num_microbatches": 4}
    fitter = trainer(
        strategy=AvgPipeStrategy(num_stages=3, schedule=schedule, **options), max_epochs=1,  # type: ignore[arg-type]
        accumulate_grad_batches=accumulate, precision=precision, gradient_clip_val=0.1,
    )  # fmt: skip
    fitter.fit(model, DataLoader([MLP.example(8) for _ in range(4)], batch_size=None))
    return copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize(("accumulate", "num_pipelines", "precision"), [(2, 1, "bf16-mixed"), (1, 2, "32-true")])
def test_halves_combine_with_accumulation_clipping_precision_and_parallel_models(
    accumulate: int, num_pipelines: int, precision: str
) -> None:
    expected = weights("1f1b", accumulate, num_pipelines, precision)
    found = weights("zb_h1", accumulate, num_pipelines, precision)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_tuner_refuses_a_schedule_that_it_cannot_predict() -> None:
    fitter = trainer(strategy=AvgPipeStrategy(num_stages=2, schedule="zb_h1"), callbacks=[AvgPipeTuner()])
    with pytest.raises(ConfigurationError, match=r"predicts 'advance_forward', '1f1b', 'afab', but .*'zb_h1'"):
        fitter.fit(MLP(), DataLoader([MLP.example(8)], batch_size=None))

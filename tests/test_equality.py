"""The gold standard: a pipeline trains the same weights as one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.comparing import assert_same_parameters
from tests.driver import Engine, by_hand
from tests.models import MODELS, Regression

SCHEDULES = ("afab", "1f1b", "advance_forward")
STEPS = 3
BATCH = 10  # not divisible by 3 nor by 8: ragged micro-batches


def batches(model: type[Regression]) -> list[Any]:
    return [model.example(BATCH) for _ in range(STEPS)]


def pair(model: type[Regression], optimizer: str = "sgd") -> tuple[Regression, Regression]:
    torch.manual_seed(1)
    one = model(optimizer)
    one.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    return one, copy.deepcopy(one)


# stages and micro-batches, with the optimizers in turns
USUAL = {(1, 3), (2, 8), (3, 1), (4, 3)}
ALL = [(k, m, ("sgd", "adamw")[(k + i) % 2]) for k in (1, 2, 3, 4) for i, m in enumerate((1, 3, 8))]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "optimizer"),
    [pytest.param(*case, marks=() if case[:2] in USUAL else pytest.mark.slow) for case in ALL],
)
@pytest.mark.parametrize("model", MODELS)
def test_weights_after_three_steps_equal_one_process_bitwise(
    model: type[Regression], num_stages: int, num_microbatches: int, optimizer: str
) -> None:
    data = batches(model)
    plain = by_hand(pair(model, optimizer)[0], data, num_microbatches)
    piped = pair(model, optimizer)[0]
    engine = Engine(piped, num_stages, data[0], num_microbatches)
    for schedule in SCHEDULES:
        piped.load_state_dict(pair(model, optimizer)[1].state_dict())
        step = piped.configure_optimizers()
        for i, batch in enumerate(copy.deepcopy(data)):
            step.zero_grad()
            engine.train(batch, schedule, i, advance=1 if schedule == "advance_forward" else 0)
            step.step()
        assert_same_parameters(plain, piped)

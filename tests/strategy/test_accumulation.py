"""Accumulating batches on top of micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.driver import assert_same_parameters
from tests.models import MLP, UNet, loader
from tests.trainers import both, loaders, staged, trainer, twins


@pytest.mark.parametrize(
    ("model", "accumulate", "batches", "steps"),
    [(MLP, 4, 8, 4), (UNet, 2, 8, 8), (MLP, 2, 5, 6)],  # the last batches of an epoch are a step, even if they are few
)
def test_accumulated_batches_equal_one_device_bitwise(
    model: type[Any], accumulate: int, batches: int, steps: int
) -> None:
    make, options = partial(model, "adamw"), {"accumulate": accumulate, "gradient_clip_val": 0.1}
    one, two = both(make, loaders(model, 8 * batches), **options)
    assert two.global_step == one.global_step == steps


def test_a_scheduler_of_accumulation_is_followed() -> None:
    plain, piped = twins(MLP)
    small, large = loaders(MLP, 64)
    one = trainer(max_epochs=4, callbacks=[GradientAccumulationScheduler({0: 4, 1: 16, 3: 8})])
    two = staged(max_epochs=4, callbacks=[GradientAccumulationScheduler({1: 4, 3: 2})])
    one.fit(plain, small)
    two.fit(piped, large)
    assert two.global_step == one.global_step == 8 + 2 + 2 + 4
    assert_same_parameters(plain, piped)


def test_a_validation_between_accumulated_batches_leaves_the_gradients_alone() -> None:
    models, data = twins(MLP), (loader(MLP, 64, 8), loader(MLP, 8, 4))
    for model, interval in zip(models, (1, 1.0), strict=True):
        runner = staged(val_check_interval=interval, num_sanity_val_steps=0, max_epochs=1, accumulate=4)
        runner.fit(model, *data)
    assert_same_parameters(*models)

"""What the averaging step keeps, and what it is equal to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.averaging import averaging_step
from lightning_avgpipe.averaging.averaging_step import AveragingStep, average

SHAPES = ((3, 5), (7,), (2, 2, 2))
OUTER = {
    "sgd": partial(torch.optim.SGD, lr=1.0),
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
}

Model = list[Tensor]


def models(count: int, dtype: torch.dtype = torch.float32) -> tuple[list[Model], Model]:
    """Some models, and a reference that is their mean."""
    generator = torch.Generator().manual_seed(count)
    made = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(count)]
    return made, mean(made)


def mean(made: list[Model]) -> Model:
    return [torch.stack(same).double().mean(0).to(same[0].dtype) for same in zip(*made, strict=True)]


def update(made: list[Model], active: int, seed: int) -> list[Model]:
    """Local steps of the first models; tells the mean of their updates."""
    generator = torch.Generator().manual_seed(seed)
    updates = [[0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in m] for m in made[:active]]
    for model, changes in zip(made, updates, strict=False):
        torch._foreach_add_(model, changes)
    return mean(updates)


@pytest.mark.parametrize("active", [4, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("outer", [0.5, 4.0, *OUTER])
def test_the_reference_stays_the_mean_of_the_models(outer: Any, alpha: float, active: int) -> None:
    made, reference = models(4)
    optimizer = OUTER[outer](reference) if outer in OUTER else None
    for i in range(30):
        update(made, active, i)
        if optimizer is None:
            average(made, reference, alpha, outer, active)
        else:
            AveragingStep(made, reference, active).end_with(optimizer, alpha)
        for found, expected in zip(reference, mean(made), strict=True):
            assert (found - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("active", [4, 1, 3])
@pytest.mark.parametrize("outer_lr", [0.5, 1.0, 4.0])
def test_the_reference_moves_by_the_mean_update_of_those_that_had_a_batch(outer_lr: float, active: int) -> None:
    made, reference = models(4, torch.float64)
    before = [t.clone() for t in reference]
    expected = update(made, active, 0)
    average(made, reference, 0.25, outer_lr, active)
    for new, old, change in zip(reference, before, expected, strict=True):
        torch.testing.assert_close(new, old + outer_lr * change, rtol=0, atol=1e-14)


def test_the_formula_is_that_of_the_documentation() -> None:
    made, reference = models(3, torch.float64)
    update(made, 3, 0)
    y, z = torch.stack([m[0] for m in made]), reference[0].clone()
    alpha, outer_lr = 0.3, 1.7
    centre = z + outer_lr * (y.mean(0) - z)
    expected = centre + (1 - alpha) * (y - y.mean(0))
    average(made, reference, alpha, outer_lr, 3)
    torch.testing.assert_close(reference[0], centre, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.stack([m[0] for m in made]), expected, rtol=0, atol=1e-14)


def test_an_outer_sgd_is_an_outer_lr() -> None:
    results = []
    for use in (
        lambda made, z: average(made, z, 0.25, 0.7, 3),
        lambda made, z: AveragingStep(made, z, 3).end_with(torch.optim.SGD(z, lr=0.7), 0.25),
    ):
        made, reference = models(4, torch.float64)
        update(made, 3, 0)
        use(made, reference)
        results.append([*reference, *(t for m in made for t in m)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_without_attraction_and_with_the_mean_update_models_keep_their_bits() -> None:
    made, reference = models(4)
    update(made, 4, 0)
    before = [[t.clone() for t in m] for m in made]
    average(made, reference, 0.0, 1.0, 4)
    assert all(torch.equal(new, old) for a, b in zip(made, before, strict=True) for new, old in zip(a, b, strict=True))


def test_full_attraction_makes_all_models_the_reference() -> None:
    made, reference = models(3)
    update(made, 3, 0)
    average(made, reference, 1.0, 3.0, 3)
    for model in made:
        assert all(torch.equal(new, centre) for new, centre in zip(model, reference, strict=True))


def test_half_precision_is_averaged_in_single() -> None:
    made, reference = models(4, torch.bfloat16)
    wide = [[t.float() for t in m] for m in made], [t.float() for t in reference]
    average(made, reference, 0.25, 2.0, 4)
    average(*wide, 0.25, 2.0, 4)
    for found, expected in zip((*reference, *made[3]), (*wide[1], *wide[0][3]), strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))


def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (averaging_step._CHUNK_BYTES, 1):
        monkeypatch.setattr(averaging_step, "_CHUNK_BYTES", size)
        made, reference = models(3)
        update(made, 2, 0)
        average(made, reference, 0.25, 2.0, 2)
        results.append([*reference, *(t for m in made for t in m)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

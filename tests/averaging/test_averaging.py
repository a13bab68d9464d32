"""The averaging step, with and without a barrier: what it is equal to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.averaging import averaging_step
from lightning_avgpipe.averaging.averaging_step import AveragingStep, average
from lightning_avgpipe.averaging.staggered import StaggeredAveraging

SHAPES = ((3, 5), (7,), (2, 2, 2))

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


# -- without a barrier -----------------------------------------------------------------------------------------------


def test_the_formulas_are_those_of_the_documentation() -> None:
    alpha, rate, count = 1 / 3, 1.7, 3
    made, reference = models(count, torch.float64)
    x, z = [m[0].clone() for m in made], reference[0].clone()
    averaging = StaggeredAveraging(made, reference, alpha, rate)
    for iteration in range(4):
        known = z
        for n, model in enumerate(made):
            before = model[0].clone()
            update([model], 1, 10 * iteration + n)
            delta = model[0] - before
            averaging.end(n)
            x[n] = x[n] + rate * delta - alpha * (x[n] - known)
            z = z + rate * delta / count
    torch.testing.assert_close(reference[0], z, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([m[0] for m in made]), torch.stack(x), rtol=0, atol=1e-12)


def test_half_precision_is_mixed_in_single() -> None:
    made, reference = models(2, torch.bfloat16)
    made[0][0] += 1.0
    wide = [[t.float() for t in m] for m in made], [t.float() for t in reference]
    averaging = StaggeredAveraging(made, reference, 0.5, 1.5)
    other = StaggeredAveraging(*wide, 0.5, 1.5)
    made[0][1].mul_(0.5)
    wide[0][0][1].copy_(made[0][1])
    averaging.end(0)
    other.end(0)
    for found, expected in zip([*reference, *made[0]], [*wide[1], *wide[0][0]], strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))

"""Averaging without a barrier: what it keeps, and what it is equal to."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_avgpipe.averaging.staggered import StaggeredAveraging

SHAPES = ((3, 5), (7,))

Model = list[Tensor]


def models(count: int, dtype: torch.dtype = torch.float64) -> tuple[list[Model], Model]:
    """Some models, and a reference that is their mean."""
    generator = torch.Generator().manual_seed(count)
    made = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(count)]
    return made, mean(made)


def mean(made: list[Model]) -> Model:
    return [torch.stack(same).double().mean(0).to(same[0].dtype) for same in zip(*made, strict=True)]


def updates(count: int, iterations: int) -> list[list[Model]]:
    generator = torch.Generator().manual_seed(7)
    return [
        [[0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(count)]
        for _ in range(iterations)
    ]


def step(model: Model, update: Model) -> None:
    torch._foreach_add_(model, [u.to(t.dtype) for u, t in zip(update, model, strict=True)])


def train(outer_lr: float, made: list[Model], reference: Model, changes: list[list[Model]]) -> None:
    averaging = StaggeredAveraging(made, reference, 1 / len(made), outer_lr)
    for iteration in changes:
        for n, update in enumerate(iteration):
            step(made[n], update)
            averaging.end(n)


def test_the_formulas_are_those_of_the_documentation() -> None:
    alpha, rate, count = 1 / 3, 1.7, 3
    changes, (made, reference) = updates(count, 4), models(count)
    x, z = [m[0].clone() for m in made], reference[0].clone()
    for iteration in changes:
        known = z
        for n, (delta, _) in enumerate(iteration):
            x[n] = x[n] + rate * delta - alpha * (x[n] - known)
            z = z + rate * delta / count
    train(rate, made, reference, changes)
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

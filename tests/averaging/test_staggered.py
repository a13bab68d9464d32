"""Averaging without a barrier: what it keeps, and what it is equal to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from lightning_avgpipe.errors import ScheduleError

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


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("outer_lr", [1.0, 1.7])
def test_the_reference_is_the_mean_of_the_models_when_all_have_ended(outer_lr: float, count: int) -> None:
    made, reference = models(count)
    for k in range(1, 30, 7):
        train(outer_lr, made, reference, updates(count, k))
        for found, expected in zip(reference, mean(made), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


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


def test_models_drift_no_further_apart_than_their_updates_take_them() -> None:
    made, reference = models(4, torch.float32)
    train(1.0, made, reference, updates(4, 300))
    assert all((t - centre).abs().max() < 1.5 for m in made for t, centre in zip(m, reference, strict=True))
    drift = [found - expected for found, expected in zip(reference, mean(made), strict=True)]
    assert all(d.abs().max() < 1e-5 for d in drift)


def test_models_end_in_turn() -> None:
    made, reference = models(2)
    averaging = StaggeredAveraging(made, reference, 0.5, 1.0)
    with pytest.raises(ScheduleError, match="turn of model 0"):
        averaging.end(1)


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


class InTurns:
    """Stands for the connection of a group to others, which take turns in this process."""

    def __init__(self, sums: list[Model], count: int) -> None:
        self.sums, self.count, self.begun = sums, count, 0

    def begin_sum(self, tensors: Model) -> Callable[[], None]:
        number, self.begun = self.begun, self.begun + 1
        if number == len(self.sums):
            self.sums.append([torch.zeros_like(t) for t in tensors])
        torch._foreach_add_(self.sums[number], tensors)
        return lambda: torch._foreach_copy_(tensors, self.sums[number])


def grouped(made: list[Model], reference: Model, groups: int, alpha: float) -> tuple[list[StaggeredAveraging], Any]:
    """The averaging of each group, and its reference."""
    sums: list[Model] = []
    centres = [[t.clone() for t in reference] for _ in range(groups)]
    size = len(made) // groups
    found: Any = [
        StaggeredAveraging(made[g * size :][:size], centre, alpha, 1.7, InTurns(sums, groups))  # type: ignore[arg-type]
        for g, centre in enumerate(centres)
    ]
    return found, centres


@pytest.mark.parametrize(("groups", "size"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_groups_have_one_reference_which_is_the_mean_of_all_models(groups: int, size: int, alpha: float) -> None:
    count = groups * size
    made, reference = models(count)
    averaging, centres = grouped(made, reference, groups, alpha)
    for t, iteration in enumerate(updates(count, 30)):
        for n, update in enumerate(iteration):
            step(made[n], update)
            averaging[n // size].end(n % size)
        if t % 7 == 3:  # which changes nothing of what follows
            for one in averaging:
                one.catch_up()
            for found in centres:
                for tensor, expected in zip(found, mean(made), strict=True):
                    torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)
    apart = max(float((t - centre).abs().max()) for m in made for t, centre in zip(m, centres[0], strict=True))
    assert (apart < 1.0) == (alpha > 0)  # else as far as they began, and as updates took them

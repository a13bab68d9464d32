"""The averaging step, with and without a barrier: what it is equal to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.averaging.averaging_step import average
from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from tests.comparing import assert_equal

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


def test_a_parameter_is_averaged_the_same_whatever_its_size_and_whatever_is_beside_it() -> None:
    made, reference = models(2)
    update(made, 1, 0)
    alone = [[t.clone() for t in m] for m in (*made, reference)]
    large = [torch.full((17 * 1024**2,), float(i)) for i in range(3)]  # so much is averaged in parts
    average([[large[i], *m] for i, m in enumerate(made)], [large[2], *reference], 0.25, 2.0, 1)
    average(alone[:2], alone[2], 0.25, 2.0, 1)
    assert_equal((*made, reference), alone)
    assert [t[-1].item() for t in large] == [t[0].item() for t in large]


def together(made: list[Model], reference: Model) -> None:
    average(made, reference, 0.25, 2.0, len(made))


def one_by_one(made: list[Model], reference: Model) -> None:
    averaging = StaggeredAveraging(made, reference, 0.5, 1.5)
    made[0][1].mul_(0.5)
    averaging.end(0)


@pytest.mark.parametrize("use", [together, one_by_one])
def test_half_precision_is_averaged_in_single(use: Callable[[list[Model], Model], None]) -> None:
    made, reference = models(4, torch.bfloat16)
    made[0][0] += 1.0
    wide = [[t.float() for t in m] for m in made], [t.float() for t in reference]
    use(made, reference)
    use(*wide)
    for found, expected in zip((*reference, *made[3], *made[0]), (*wide[1], *wide[0][3], *wide[0][0]), strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))

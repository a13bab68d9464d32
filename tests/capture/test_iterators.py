"""Iterators: a step that takes items from one that outlives it is not divided, since nobody can put them back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import AvgPipeError, StepChangedError
from tests.models import MLP, loader
from tests.trainers import pipeline


class Taking(MLP):
    """A step, or a submodule, that takes an item each time."""

    def __init__(self, items: Any, inside: bool) -> None:
        super().__init__()
        self.items = items
        if inside:
            self.layers.append(Scaled(items))

    def loss(self, batch: Any) -> Tensor:
        scale = 1.0 if isinstance(self.layers[-1], Scaled) else float(next(self.items))
        return super().loss(batch) * scale


class Scaled(nn.Module):
    def __init__(self, items: Any) -> None:
        super().__init__()
        self.items = items
        self.weight = nn.Parameter(torch.ones(()))
        self.takes = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (float(next(self.items)) if self.takes else 1.0)


class Noting(Taking):
    """Beside an iterator that nobody advances the step changes a list."""

    def loss(self, batch: Any) -> Tensor:
        self.others[1].append(len(batch))
        return super().loss(batch)


class Later(Taking):
    """A step, or a submodule, that takes an item from the second step on."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(self.layers[-1], Scaled):
            self.layers[-1].takes = self.global_step > 0
        return super().loss(batch) if self.global_step else MLP.loss(self, batch)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Taking, AvgPipeError, "which nobody can put back"),
        (Later, StepChangedError, "and did not when it was captured"),
    ],
)
def test_a_step_that_takes_items_is_refused_by_name(kind: Any, error: Any, message: str, inside: bool) -> None:
    with pytest.raises(error, match=f"takes items from the iterator 'items', {message}"):
        pipeline(2, max_epochs=1).fit(kind(itertools.count(1), inside), loader(MLP, 16, 8))


def test_an_iterator_that_nobody_advances_is_no_obstacle() -> None:
    model = Noting(itertools.repeat(1.0), False)
    model.others = iter([1, 2, 3]), [0]
    pipeline(2, max_epochs=1).fit(model, loader(MLP, 16, 8))
    assert next(model.others[0]) == 1

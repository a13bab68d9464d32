"""Branches that chance decides: each micro-batch decides anew, and all stages decide alike."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.driver import Engine, assert_same_parameters
from tests.models import MLP, Regression

M = 4


def of_torch() -> float:
    return torch.rand(1).item()


def of_torch_as_an_index() -> float:
    return torch.randint(0, 2, ()).item() * 0.6


def of_python() -> float:
    return random.random()


def of_numpy() -> float:
    return float(np.random.beta(1.0, 1.0))


def by_shuffling() -> float:
    order = [0.0, 1.0]
    random.shuffle(order)
    return order[0]


CHANCES = [of_torch, of_torch_as_an_index, of_python, of_numpy, by_shuffling]
Chance = Callable[[], float]


class Block(nn.Module):
    """Residual; by chance nothing but its input."""

    def __init__(self, chance: Chance | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if self.chance is not None and self.chance() < 0.5:
            return x
        return x + self.second(self.first(x).tanh())


class Deciding(Regression):
    """Three blocks and a head.

    Args:
        chance: a number between 0 and 1.
    """

    inner = False

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="chance")
        self.chance = chance
        self.late = False
        self.blocks = nn.ModuleList(Block(chance if self.inner else None) for _ in range(3))
        self.head = nn.Linear(8, 8)

    example = staticmethod(MLP.example)

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Scaling(Deciding):
    """One number for all stages."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 if self.chance() < 0.5 else 1.0
        for block in self.blocks:
            x = block(x) * scale
        return self.head(x)


class ScalingLate(Deciding):
    """The same, but it draws nothing before training has begun."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 if self.late and self.chance() < 0.5 else 1.0
        for block in self.blocks:
            x = block(x) * scale
        return self.head(x)


class Between(Deciding):
    """A branch of glue between blocks, whose input they use twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.chance() < 0.5:
                x = x * 0.5
        return self.head(x)


class Mixing(Deciding):
    """The inputs are mixed on the first stage, the losses on the last."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, order = self.chance(), torch.randperm(len(x))
        result = self(share * x + (1 - share) * x[order])
        losses = [(result - target).square().mean() for target in (y, y[order])]
        return share * losses[0] + (1 - share) * losses[1]


def trained(model: Deciding, num_stages: int, **options: Any) -> tuple[Deciding, list[float]]:
    """A copy of the model after three steps, and the losses."""
    torch.manual_seed(3)
    model = copy.deepcopy(model)
    batch = model.example(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = Engine(model, num_stages, batch, M, **options)
    model.late = True
    losses = []
    for iteration in range(3):
        optimizer.zero_grad()
        losses += engine.train(batch, iteration=iteration)
        optimizer.step()
    return model, [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("kind", "chance"),
    [*((Scaling, chance) for chance in CHANCES), (ScalingLate, of_python), (Between, of_python), (Mixing, of_numpy)],
)
def test_all_stages_decide_alike_and_every_micro_batch_anew(kind: type[Deciding], chance: Chance) -> None:
    torch.manual_seed(0)
    model = kind(chance)
    whole, losses = trained(model, 1)
    assert len({round(loss, 4) for loss in losses[::M]}) > 1
    for num_stages, options in [(2, {}), (3, {}), (2, {"recompute": True}), (2, {"recompute": ["blocks.*"]})]:
        staged, others = trained(model, num_stages, **options)
        assert others == losses
        assert_same_parameters(whole, staged, exact=False)

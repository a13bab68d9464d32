"""Stages are those of the way on which chance leaves out nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Planner

Chance = Callable[[], float]


class Dropping(nn.Module):
    """A stack that leaves out each of its layers with a probability."""

    def __init__(self, chance: Chance, probability: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.chance, self.probability, self.runs = chance, probability, 0

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            if not self.training or self.chance() >= self.probability:
                x = layer(x)
        return x.sum()


class OneOf(Dropping):
    """Runs one of two layers, never both."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(chance)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.one(x) if self.chance() < 0.5 else self.other(x)
        return self.layers[2](x).sum()


class OneOfList(OneOf):
    """So that it is known where the other one belongs."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[self.chance() < 0.5](x)
        return self.layers[2](x).sum()


def planned(net: Dropping, num_stages: int = 2) -> CallGraph:
    return (
        Planner(Divisible(net), num_stages).plan(Step("training_step", net.training_step, (torch.ones(2, 8), 0))).graph
    )


def test_what_never_runs_at_once_is_refused_by_name() -> None:
    with pytest.raises(PartitionError, match=r"training_step leaves out submodules by chance, .*: (one|other) did not"):
        planned(OneOf(random.random))


def test_what_never_runs_at_once_is_on_the_stage_of_its_neighbour_in_a_list() -> None:
    net = OneOfList(random.random)
    plan = Planner(Divisible(net), 2).plan(Step("training_step", net.training_step, (torch.ones(2, 8), 0)))
    first, last = (set(stage.parameters) for stage in plan.stages)
    assert first == {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert last >= {"layers.2.weight", "layers.5.weight"}

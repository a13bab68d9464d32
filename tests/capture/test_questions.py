"""Modules whose own code reads numbers of values: what they call may differ between micro-batches."""

from __future__ import annotations

import copy
import random
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from tests.comparing import assert_same_gradients
from tests.driver import Engine, accumulate
from tests.trainers import pipeline


class Experts(nn.Module):
    """Calls only those experts that have something to do."""

    def __init__(self, asks_for: str) -> None:
        super().__init__()
        self.asks_for = asks_for
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def used(self, chosen: Tensor) -> Any:
        if self.asks_for == "a number":
            return [i for i in range(4) if (chosen == i).any()]
        if self.asks_for == "a length":
            return [i for i in range(4) if len(torch.where(chosen == i)[0])]
        if self.asks_for == "the length of a selection":
            return [i for i in range(4) if chosen[chosen == i].numel()]
        return (nn.functional.one_hot(chosen, 4).sum(0) > 0).nonzero().squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for i in self.used(chosen):
            rows = chosen == i
            out[rows] = self.experts[i](x[rows])
        return x + out


class Mixture(L.LightningModule):
    def __init__(self, asks_for: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(asks_for) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("asks_for", ["a number", "as many as there are", "a length", "the length of a selection"])
def test_experts_that_are_called_when_needed_may_differ_between_micro_batches(asks_for: str) -> None:
    torch.manual_seed(0)
    plain, batch = Mixture(asks_for, 4), torch.randn(24, 16)
    plain.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    module = copy.deepcopy(plain)
    engine = Engine(module, 3, batch, 6)
    accumulate(plain, batch, 6)
    engine.train(batch)
    assert_same_gradients(plain, module)
    assert {node.name for node in engine.plan.graph.nodes} >= {f"layers.{i}" for i in range(4)}


def test_a_cut_among_units_whose_calls_depend_on_numbers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0' reads numbers of values and is divided between stages"):
        pipeline(max_epochs=1).fit(Mixture("a length", 1), torch.utils.data.DataLoader(torch.ones(24, 16), 8))


# -- layers that chance leaves out -----------------------------------------------------------------------------------


class OneOf(nn.Module):
    """Runs one of two layers, never both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.one(x) if random.random() < 0.5 else self.other(x)
        return self.layers[2](x).sum()


class OneOfList(OneOf):
    """So that it is known where the other one belongs."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[random.random() < 0.5](x)
        return self.layers[2](x).sum()


def planned(net: OneOf) -> Plan:
    step = Step("training_step", net.training_step, (torch.ones(2, 8), 0))
    return Planner(Divisible(net), 2).plan(step, Conditions(build("1f1b", 2, 1)))


def test_what_never_runs_at_once_is_refused_by_name() -> None:
    with pytest.raises(PartitionError, match=r"training_step leaves out submodules by chance, .*: (one|other) did not"):
        planned(OneOf())


def test_what_never_runs_at_once_is_on_the_stage_of_its_neighbour_in_a_list() -> None:
    first, last = (set(stage.parameters) for stage in planned(OneOfList()).stages)
    assert first == {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert last >= {"layers.2.weight", "layers.5.weight"}

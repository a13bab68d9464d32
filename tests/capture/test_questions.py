"""Modules whose own code reads numbers of values: what they call may differ between micro-batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.trainers import assert_defaults_equal_accumulation, pipeline


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
    plan = assert_defaults_equal_accumulation(Mixture(asks_for, 4), torch.randn(24, 16), num_stages=3)
    assert {node.name for node in plan.graph.nodes} >= {f"layers.{i}" for i in range(4)}


def test_a_cut_among_units_whose_calls_depend_on_numbers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0' reads numbers of values and is divided between stages"):
        pipeline(max_epochs=1).fit(Mixture("a length", 1), torch.utils.data.DataLoader(torch.ones(24, 16), 8))

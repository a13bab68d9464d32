"""Closing: which modules become one unit again, and what stays as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.driver import Engine, assert_same_gradients


class Block(nn.Module):
    """Two layers, dropout in its own code, and a buffer that it changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.two(self.drop(F.dropout(self.one(x), 0.1, self.training)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).sum()


def test_gradients_do_not_depend_on_which_units_are_open() -> None:
    batch, modules = torch.randn(4, 8), []
    for num_stages, recompute in ((1, []), (3, []), (3, ["blocks.0.two"]), (3, ["blocks"])):
        torch.manual_seed(0)
        module: Any = Net()
        engine = Engine(module, num_stages, batch, recompute=recompute)
        engine.train(batch, iteration=3)
        modules.append(module)
        if num_stages == 3:
            units = engine.plan.graph.units
            assert any(unit.endswith(".one") for unit in units), units
            assert any(unit.startswith("blocks.") and unit.count(".") == 1 for unit in units), units
    for module in modules[1:]:
        assert_same_gradients(modules[0], module)
        assert all(torch.equal(a, b) for a, b in zip(modules[0].buffers(), module.buffers(), strict=True))

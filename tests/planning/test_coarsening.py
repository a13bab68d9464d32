"""Closing: which modules become one unit again, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.refinement import Closing, closing
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


def opened(module: Net, cut: str, keep: Sequence[str] = ()) -> Closing | None:
    """Capture with all blocks open, and close what a cut before a unit leaves whole."""
    units = Divisible(module).refine(Divisible(module).units(), [f"blocks.{i}" for i in range(len(module.blocks))])
    graph = capture("training_step", module.training_step, (torch.randn(2, 8), 0), module, units)
    cuts = [next(node.index for node in graph.nodes if node.name == cut)]
    found = closing(Divisible(module), graph, cuts, keep)
    if found is not None:
        coarse = capture("training_step", module.training_step, (torch.randn(2, 8), 0), module, found.units)
        assert found.is_met_by(coarse, cuts)
    return found


def test_only_the_block_that_is_cut_stays_open() -> None:
    found = opened(Net(), "blocks.1.two")
    assert found is not None
    parts = ("blocks.1.one", "blocks.1.two", "blocks.1.drop")
    assert found.units == ("blocks.0", *parts, "blocks.2", "blocks.3", "head")
    assert [name for name in found.names if name.startswith("blocks.0")] == ["blocks.0"]


class TakesPart(Net):
    """The step itself calls a part of block 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.blocks[0].one(batch), batch_idx)


class Borrowing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.borrowed[0]


class Borrows(Net):
    """Block 0 uses a parameter of the last one, which is not registered with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Borrowing()
        self.blocks[0].borrowed = [self.blocks[-1].one.weight]


class Idle(Net):
    """Block 0 has a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].idle = nn.Linear(8, 8)


class Hooked(Net):
    """Somebody collects what a part of block 0 returns."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.blocks[0].one.register_forward_hook(lambda module, args, output: self.collected.append(output))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.collected.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + self.collected[0].mean()


class Observing(Block):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if (tracer := StepTracer.current()) is not None:  # as self.log does
            tracer.observe(lambda value: None, (result.mean(),), {})
        return result


class Observed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Observing()


@pytest.mark.parametrize("make", [TakesPart, Borrows, Idle, Hooked, Observed])
def test_a_module_that_is_more_than_its_parts_stays_open(make: Callable[[], Net]) -> None:
    found = opened(make(), "blocks.1.two")
    assert found is not None
    assert {"blocks.0.one", "blocks.0.two"} < set(found.units)
    assert "blocks.2" in found.units


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

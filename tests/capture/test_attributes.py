"""Attributes that a step assigns: where a stage may end that has read one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.planning.divisible import Divisible


class Recurrent(nn.Module):
    """Only the second unit takes what the step before left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.hidden: Any = None

    def begin(self, x: Tensor) -> Any:
        return torch.zeros(len(x), 4)

    def training_step(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = self.begin(x)
        hidden = self.hidden.detach()
        x = self.cell(torch.cat([self.embed(x), hidden], 1)[:, :4])
        loss = self.head(x).mean()
        self.hidden = x
        return loss


class LikeWeight(Recurrent):
    """As Lightning's demo of an LSTM does."""

    def begin(self, x: Tensor) -> Tensor:
        return self.embed.weight.new_zeros(len(x), 4) + torch.zeros_like(self.head.weight)[:1]


class Asks(Recurrent):
    """What free code computes from the attribute may lead anywhere."""

    def training_step(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = self.begin(x)
        return super().training_step(x * 2 if self.hidden.sum() > 1 else x)


class BeginsLate(Recurrent):
    """Until the last stage has assigned it, the attribute is None: on other stages for ever."""

    def training_step(self, x: Tensor) -> Tensor:
        x = self.cell(self.embed(x if self.hidden is None else x * 2))
        self.hidden = x.detach()
        return self.head(x).mean()


class OtherLayout(Recurrent):
    """What is assigned first is not like what is assigned last."""

    def training_step(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(1)
        x = self.cell(self.embed(x if isinstance(self.hidden, Tensor) else x * 2))
        loss = self.head(x).mean()
        self.hidden = (x.detach(),)
        return loss


def legal(module: Any) -> list[str]:
    """Nodes before which the step may be cut."""
    graph = capture("training_step", module.training_step, (torch.randn(4, 4),), module, Divisible(module).units())
    return [node.name for node in graph.nodes[1:] if graph.obstacles[node.index] is None]


@pytest.mark.parametrize(
    ("model", "expected"),
    [(Recurrent, ["cat"]), (LikeWeight, ["cat"]), (Asks, []), (BeginsLate, ["head", "mean"]), (OtherLayout, [])],
)
def test_a_stage_that_takes_an_attribute_comes_to_its_last_assignment(model: type, expected: list[str]) -> None:
    assert legal(model()) == expected


class Keeps(nn.Module):
    """Lists, dicts and objects that live longer than a step; a test says what the step does with them."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.outputs: list[Any] = []
        self.by_name: Any = defaultdict(list)
        self.count = {"steps": 0, "losses": []}
        self.step = step

    def loss(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.head(self.cell(self.embed(x * factor))).mean()

    def training_step(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def appends(self: Any, x: Tensor) -> Tensor:
    self.outputs.append(self.loss(x))
    return self.outputs[-1]


def clears(self: Any, x: Tensor) -> Tensor:
    self.outputs.clear()
    loss = self.loss(x)
    self.outputs.append(loss)
    return loss


def counts_items(self: Any, x: Tensor) -> Tensor:
    self.count["steps"] += 1
    loss = self.loss(x)
    self.count["losses"].append(loss)
    return loss


def changes_twice(self: Any, x: Tensor) -> Tensor:
    self.outputs.append(0)
    loss = self.loss(x, len(self.outputs))
    self.outputs.append(1)
    return loss


def changes_another_item(self: Any, x: Tensor) -> Tensor:
    self.count["steps"] += 1
    loss = self.loss(x, self.count.get("last", 0))
    self.count["last"] = self.count["steps"]
    return loss


def makes_what_it_reads(self: Any, x: Tensor) -> Tensor:
    loss = self.loss(x, len(self.by_name["loss"]))
    self.by_name["loss"].append(0)
    return loss


def reads_in_a_loop(self: Any, x: Tensor) -> Tensor:
    loss = torch.zeros(())
    for i in range(2):
        loss = loss + self.loss(x, len(self.outputs) + i)
        self.outputs.append(loss)
    return loss


@pytest.mark.parametrize("step", [appends, clears])
def test_what_is_only_added_to_is_not_read(step: Any) -> None:
    assert legal(Keeps(step))[:3] == ["cell", "head", "mean"]


@pytest.mark.parametrize(
    "step", [counts_items, changes_twice, changes_another_item, makes_what_it_reads, reads_in_a_loop]
)
def test_what_is_read_keeps_a_stage_up_to_its_last_change(step: Any) -> None:
    assert not {"cell", "head"} & set(legal(Keeps(step)))

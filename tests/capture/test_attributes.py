"""Attributes that a step assigns: where a stage may end that has read one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.units import initial_units


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
    graph = capture("training_step", module.training_step, (torch.randn(4, 4),), module, initial_units(module))
    return [node.name for node in graph.nodes[1:] if graph.obstacles[node.index] is None]


@pytest.mark.parametrize(
    ("model", "expected"),
    [(Recurrent, ["cat"]), (LikeWeight, ["cat"]), (Asks, []), (BeginsLate, ["head", "mean"]), (OtherLayout, [])],
)
def test_a_stage_that_takes_an_attribute_comes_to_its_last_assignment(model: type, expected: list[str]) -> None:
    assert legal(model()) == expected


def test_a_tensor_like_a_parameter_is_free() -> None:
    class Like(Recurrent):
        def training_step(self, x: Tensor) -> Tensor:
            weight = self.head.weight
            start = weight.new_full((4,), 2.0) + torch.ones_like(weight) + weight.new_empty(4).zero_()
            return self.head(self.cell(self.embed(x + start))).mean() + torch.rand_like(weight).mean()

    module = Like()
    graph = capture("training_step", module.training_step, (torch.randn(4, 4),), module, initial_units(module))
    assert [node.name for node in graph.nodes][:4] == ["embed", "cell", "head", "mean"]
    assert "rand_like" in [node.name for node in graph.nodes]

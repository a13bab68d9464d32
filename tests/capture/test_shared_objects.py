"""Objects that several modules hold: where a stage may end if one of them is changed, and read elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lightning_avgpipe.capture.capturing import capture

ALL = ["1", "2", "3", "4"]


class Box:
    def __init__(self) -> None:
        self.count = 0
        self.other = 0


class Layer(nn.Module):
    def __init__(self, number: int, owner: Counting) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.box, self.number, self.reader, self.writer = owner.box, number, owner.reader, owner.writer

    def forward(self, x: Tensor) -> Tensor:
        if self.reader == self.number:
            x = x * (1 + count(self.box))
        x = self.linear(x)
        if self.writer == self.number:
            increase(self.box)
        return x


class Counting(nn.Module):
    """Counts in an object: in a layer, or in the code before or behind them."""

    def __init__(self, box: Any, writer: Any, reader: Any, once: bool = False) -> None:
        super().__init__()
        self.box, self.writer, self.reader, self.once = box, writer, reader, once
        self.layers = nn.Sequential(*(Layer(number, self) for number in range(5)))

    def training_step(self, x: Tensor) -> Tensor:
        if self.reader == "begin":
            x = x * (1 + count(self.box))
        x = self.layers(x)
        if self.reader == "end":
            x = x * (1 + count(self.box))
        if self.writer == "end" and not (self.once and count(self.box)):
            increase(self.box)
        return x.mean()


def count(box: Any) -> int:
    return int(box[0]) if isinstance(box, np.ndarray) else box.count


def increase(box: Any) -> None:
    if isinstance(box, np.ndarray):
        box[0] += 1
    else:
        box.count += 1


def legal(module: nn.Module) -> list[str]:
    """Numbers of the layers with which a stage may begin."""
    units = [f"layers.{number}" for number in range(5)]
    graph = capture("training_step", module.training_step, (torch.randn(4, 4),), module, units)
    nodes = (node for node in graph.nodes[1:] if node.kind == "call")
    return [node.name[-1] for node in nodes if graph.obstacles[node.index] is None]


BOXES = {"object": Box, "namespace": lambda: SimpleNamespace(count=0), "array": lambda: np.zeros(1)}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize(
    ("writer", "reader", "expected"),
    [
        (2, None, ALL),  # nobody else reads it
        (2, 2, ALL),
        (1, 3, ["1", "4"]),  # both are on one stage
        (3, 1, ["1", "4"]),
        (1, "end", ["1"]),  # which the last stage reads
        (3, "begin", []),  # which all read
    ],
)
def test_who_reads_what_a_unit_changes_is_on_its_stage(
    box: Callable[[], Any], writer: Any, reader: Any, expected: list[str]
) -> None:
    assert legal(Counting(box(), writer, reader)) == expected


class Calling(nn.Module):
    """Layers that call one function which they hold."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = partial(function)  # as transformers keeps the function that checkpoints its layers

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def test_what_torch_keeps_in_a_function_at_its_first_call_forbids_no_cut() -> None:
    first_call = _disable_dynamo(lambda x: x.tanh())  # like torch.utils.checkpoint.checkpoint, but never called before
    module = nn.Module()
    module.layers = nn.Sequential(*(Calling(first_call) for _ in range(5)))
    module.training_step = lambda x: module.layers(x).mean()
    assert legal(module) == ALL

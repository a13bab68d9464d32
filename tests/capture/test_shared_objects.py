"""Objects that several modules hold: where a stage may end if one of them is changed, and read elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


GENERATORS: list[Callable[[], Any]] = [
    lambda: torch.Generator().manual_seed(1), lambda: random.Random(1), lambda: np.random.default_rng(1)
]  # fmt: skip


class Noise(nn.Module):
    """Draws from a generator in some of its layers, and in the code behind others."""

    def __init__(self, generator: Any, layers: Collection[int], behind: Collection[int]) -> None:
        super().__init__()
        self.behind, self.generator = behind, generator
        self.layers = nn.ModuleList(NoisyLayer(generator if number in layers else None) for number in range(5))

    def training_step(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.behind:
                x = x * drawn(self.generator)
        return x.mean()


class NoisyLayer(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.generator is None else x * drawn(self.generator)


def drawn(generator: Any) -> float:
    return float(torch.rand((), generator=generator)) if isinstance(generator, torch.Generator) else generator.random()


@pytest.mark.parametrize("generator", GENERATORS, ids=["torch", "Python", "NumPy"])
@pytest.mark.parametrize(
    ("layers", "behind", "expected"),
    [
        ((2,), (), ALL),
        ((1, 3), (), ["1", "4"]),  # one process has both
        ((1,), (3,), ["1"]),  # a later stage would draw what is drawn behind layer 3 without the layer's numbers
        ((3,), (1,), ["1"]),
    ],
)
def test_who_draws_from_one_generator_is_on_one_stage(
    generator: Callable[[], Any], layers: Collection[int], behind: Collection[int], expected: list[str]
) -> None:
    assert legal(Noise(generator(), layers, behind)) == expected

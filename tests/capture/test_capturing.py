"""Capture: what a step calls, what flows between the calls, and where it may be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.planning.divisible import Divisible


class Two(nn.Module):
    """Two layers and whatever a test does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def graph_of(module: nn.Module, step: Any, *args: Any, units: Sequence[str] | None = None) -> CallGraph:
    return capture("step", step, args, module, units or Divisible(module).units())


def names(graph: CallGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_only_what_is_needed_later_crosses_a_cut() -> None:
    module = Two()

    def step(x: Tensor) -> Tensor:
        h = module.a(x)
        wide = h.repeat(1, 8)
        narrow = wide.sum(1, keepdim=True).expand(-1, 4)
        return module.b(narrow) + h.mean()

    graph = graph_of(module, step, torch.randn(3, 4))
    assert names(graph) == ["a", "repeat", "sum", "expand", "b", "mean", "add"]
    shapes = [[graph.values[v].shape for v in graph.live(p)] for p in range(1, 5)]
    assert shapes == [[(3, 4)], [(3, 4), (3, 32)], [(3, 4), (3, 1)], [(3, 4), (3, 4)]]
    assert graph.boundary_bytes[1] == 3 * 4 * 4
    assert graph.boundary_bytes[3] == (12 + 3) * 4


def test_a_buffer_that_is_changed_on_both_sides_of_a_cut_forbids_it() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    module = Normed()
    graph = graph_of(module, lambda x: module.norm(F.relu(module.norm(x))), torch.randn(3, 4))
    assert all("which the step changes, is used by unit 'norm'" in str(graph.obstacles[p]) for p in (1, 2))
    assert "call each layer for all inputs before the next layer is called" in str(graph.obstacles[1])


def test_a_buffer_of_unknown_numbers_that_nobody_changes_forbids_no_cut() -> None:
    module = nn.ModuleDict({"unit": nn.Linear(4, 4)})
    module["unit"].register_buffer("smallest", torch.full((2,), float("nan")))
    graph = graph_of(module, lambda x: module["unit"](F.relu(module["unit"](x))), torch.randn(3, 4))
    assert graph.obstacles[1] is None and graph.obstacles[2] is None


def test_an_encoder_that_is_called_layer_by_layer_for_both_inputs_may_be_cut_inside() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def step(one: Tensor, other: Tensor) -> Tensor:
        for layer in layers:
            one, other = layer(one), layer(other)
        return (one - other).square().mean()

    graph = graph_of(layers, step, torch.randn(3, 4), torch.randn(3, 4))
    begins = [names(graph).index(f"{n}.0") for n in (1, 2)]
    assert [graph.obstacles[position] for position in begins] == [None, None]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = checkpoint(lambda x: self.b(x) * self.scale + h, h.relu(), use_reentrant=self.use_reentrant)
        return self.c(y)


def test_a_unit_that_is_given_other_weights_forbids_cuts() -> None:
    module = Two()

    def step(x: Tensor) -> Tensor:
        averaged = {name: p.detach().clone() for name, p in module.a.named_parameters()}
        return module.b(module.a(x)) - torch.func.functional_call(module.a, averaged, (x,))

    obstacles = graph_of(module, step, torch.randn(3, 4)).obstacles
    assert all("unit 'a' has tensors of the step as its weights" in (why or "") for why in obstacles[1:-1])
    assert all("use them in the forward of one submodule" in (why or "") for why in obstacles[1:-1])


def test_a_buffer_that_the_step_assigns_anew_is_used_on_the_last_stage_and_what_helps_is_said() -> None:
    module = Two()
    module.register_buffer("mean", torch.zeros(4))

    def assigning(x: Tensor) -> Tensor:
        module.mean = 0.9 * module.mean + 0.1 * x.mean(0)
        return module.b(module.a(x - module.mean))

    def writing(x: Tensor) -> Tensor:
        module.mean.copy_(0.9 * module.mean + 0.1 * x.mean(0))  # type: ignore[operator]
        return module.b(module.a(x - module.mean))

    obstacles = graph_of(module, assigning, torch.randn(3, 4)).obstacles
    assert all("buffer 'mean'" in (why or "") and "write into it instead" in (why or "") for why in obstacles[1:-1])
    assert graph_of(module, writing, torch.randn(3, 4)).obstacles[-2] is None


def test_no_cut_lies_in_a_checkpointed_region() -> None:
    module = Checkpointed(use_reentrant=False)
    graph = graph_of(module, module, torch.randn(3, 4))
    assert names(graph) == ["a", "relu", "b", "mul", "add", "c"]
    assert [obstacle is None for obstacle in graph.obstacles[1:6]] == [True, True, False, False, True]
    assert "it lies in a region of torch.utils.checkpoint at test_capturing.py" in str(graph.obstacles[3])


def test_a_reentrantly_checkpointed_region_is_one_node_with_all_that_it_uses() -> None:
    module = Checkpointed(use_reentrant=True)
    graph = graph_of(module, module, torch.randn(3, 4))
    assert names(graph) == ["a", "relu", "b", "c"]
    region = graph.nodes[2]
    assert region.kind == "region"
    assert region.parameters == ("b.weight", "b.bias", "scale")
    assert region.inputs == (1, 0)  # relu's result, and h through the closure
    assert graph.live(2) == (0, 1)


# -- objects that several modules hold: where a stage may end if one is changed, and read elsewhere ------------------


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

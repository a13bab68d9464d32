"""Capture: what a step calls, what flows between the calls, and where it may be cut."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import CaptureError, PartitionError
from lightning_avgpipe.planning.divisible import Divisible, Step


class Two(nn.Module):
    """Two layers and whatever a test does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def graph_of(module: nn.Module, step: Any, *args: Any, units: Sequence[str] | None = None) -> CallGraph:
    return capture("step", step, args, module, units or Divisible(module).units())


def names(graph: CallGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_nodes_are_calls_and_the_glue_on_their_values() -> None:
    module = Two()
    graph = graph_of(module, lambda x: module.b(F.relu(module.a(x + 1)) * 2).sum(), torch.randn(3, 4))
    assert names(graph) == ["a", "relu", "mul", "b", "sum"]
    assert [node.kind for node in graph.nodes] == ["call", "glue", "glue", "call", "glue"]
    assert graph.nodes[0].parameters == ("a.weight", "a.bias")
    assert "test_capturing.py" in graph.nodes[1].source


def test_questions_about_shapes_are_no_nodes() -> None:
    module = Two()

    def step(x: Tensor) -> Tensor:
        h = module.a(x)
        assert h.shape == (3, 4) and h.size(0) == len(h) == 3 and h.dtype == torch.float32 and h.requires_grad
        return module.b(h)

    assert names(graph_of(module, step, torch.randn(3, 4))) == ["a", "b"]


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


def test_values_that_share_memory_are_not_cut_before_a_write() -> None:
    module = Two()

    def step(x: Tensor) -> Tensor:
        h = module.a(x)
        left = h[:, :2]
        y = module.b(h.clone())
        left.zero_()
        return (y + h).sum() + left.sum()

    graph = graph_of(module, step, torch.randn(3, 4))
    cut = names(graph).index("b")
    assert "the results of 'a' and '__getitem__' share memory, which zero_() at test_capturing.py" in str(
        graph.obstacles[cut]
    )


def test_a_buffer_that_is_changed_on_both_sides_of_a_cut_forbids_it() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    module = Normed()
    graph = graph_of(module, lambda x: module.norm(F.relu(module.norm(x))), torch.randn(3, 4))
    assert all("which the step changes, is used by unit 'norm'" in str(graph.obstacles[p]) for p in (1, 2))
    assert "call each layer for all inputs before the next layer is called" in str(graph.obstacles[1])


def test_an_encoder_that_is_called_layer_by_layer_for_both_inputs_may_be_cut_inside() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def step(one: Tensor, other: Tensor) -> Tensor:
        for layer in layers:
            one, other = layer(one), layer(other)
        return (one - other).square().mean()

    graph = graph_of(layers, step, torch.randn(3, 4), torch.randn(3, 4))
    begins = [names(graph).index(f"{n}.0") for n in (1, 2)]
    assert [graph.obstacles[position] for position in begins] == [None, None]


def test_capture_puts_attributes_buffers_and_random_state_back() -> None:
    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.outputs: list[Tensor] = []
            self.nested: dict[str, Any] = {"total": torch.zeros(1), "by_loader": [[], []]}
            self.nested["itself"] = self.nested
            self.calls = 0
            self.cache: Tensor | None = None

    module = Counting()

    def step(x: Tensor) -> Tensor:
        module.calls += 1
        module.cache = torch.ones(1)
        y = module.norm(module.b(module.a(x) + torch.randn(3, 4)))
        module.outputs.append(y)
        module.nested["total"] += 1
        module.nested["by_loader"][1].append(y)
        return y

    state = torch.get_rng_state()
    graph = graph_of(module, step, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert (module.calls, module.outputs, module.cache) == (0, [], None)
    assert (module.nested["total"].item(), module.nested["by_loader"]) == (0.0, [[], []])
    assert module.norm.num_batches_tracked == 0
    assert torch.equal(module.norm.running_mean, torch.zeros(4))
    assert graph.nodes[-1].states == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert graph.drawing


def test_a_training_step_without_loss_is_refused() -> None:
    module = Two()
    with pytest.raises(CaptureError, match="returned dict instead of a loss"):
        capture("training_step", lambda x: {"value": module.a(x)}, (torch.randn(3, 4),), module, ["a"])


def test_containers_are_opened_and_units_are_refined() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    module.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    units = Divisible(module).units()
    assert units == ("blocks.0", "blocks.1", "head.0", "head.1")
    finer = Divisible(module).refine(units, ["blocks.1", "head.0"])
    assert finer[:3] == ("blocks.0", "blocks.1.self_attn", "blocks.1.linear1")
    assert "head.0" in finer
    assert Divisible(module).split(units, ["blocks.1.norm1"])[1] == "blocks.1.self_attn"
    with pytest.raises(PartitionError, match=r"did you mean 'blocks\.1\.norm1'"):
        Divisible(module).split(units, ["blocks.1.nrom1"])


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


def test_a_reentrantly_checkpointed_region_may_call_a_module_that_is_no_submodule() -> None:
    module, loose = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))), nn.Tanh()
    step = lambda x: checkpoint(lambda h: loose(h), module(x), use_reentrant=True).sum()  # noqa: E731
    assert names(graph_of(module, step, torch.randn(3, 4))) == ["0", "1.0", "a function", "sum"]


class Remembers(nn.Module):
    """Two layers; it is known of what they gave whether anybody still has it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.given: list[weakref.ref[Tensor]] = []

    def training_step(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        self.given = [weakref.ref(h), weakref.ref(y)]
        return y.square().mean()


def test_nothing_of_what_a_step_computed_stays_behind_not_even_for_the_garbage_collector() -> None:
    module = Remembers()
    gc.collect()
    gc.disable()
    try:
        seen: list[weakref.ref[Tensor]] = []

        def run(x: Tensor) -> Tensor:
            loss = module.training_step(x)
            seen.extend(module.given)
            return loss

        graph = capture("training_step", run, (torch.randn(3, 4),), module, ("a", "b"))
        assert names(graph)[:2] == ["a", "b"] and len(seen) >= 2
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_a_step_is_followed_to_its_end_when_another_is_followed_within_it() -> None:
    outer, inner = Two(), Two()

    def step(x: Tensor) -> Tensor:
        h = outer.a(x)
        assert names(graph_of(inner, lambda x: inner.b(inner.a(x)), torch.randn(3, 4))) == ["a", "b"]
        return outer.b(h).sum()

    assert names(graph_of(outer, step, torch.randn(3, 4))) == ["a", "b", "sum"]


def test_a_later_capture_watches_from_the_beginning_what_an_earlier_one_saw_change() -> None:
    module, runs = Two(), list[int]()
    module.config = SimpleNamespace(kind=None)

    def step(x: Tensor) -> Tensor:
        runs.append(len(runs))
        module.config.kind = module.config.kind or "regression"
        return module.b(module.a(x)).sum()

    subject, of_step = Divisible(module), Step("step", step, (torch.randn(3, 4),))
    first, before = subject.capture(of_step), len(runs)
    again = subject.capture(of_step)
    assert (again.nodes, again.holders, again.reads) == (first.nodes, first.holders, first.reads)
    assert 0 < len(runs) - before < before


def test_operations_of_modules_within_units_are_counted() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4))
    graph = graph_of(module, lambda x: module(x).sum(), torch.randn(3, 4), units=["0", "1"])
    assert dict(graph.inner_flops) == {"0.0": 2 * 3 * 4 * 8, "0.1": 0}


def test_operations_of_a_module_that_the_step_makes_count_once_in_the_one_that_makes_it() -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Linear(4, 8, device=x.device)(x)

    module = nn.Sequential(nn.Sequential(Makes(), nn.Linear(8, 4)))
    graph = graph_of(module, lambda x: module(x).sum(), torch.randn(3, 4), units=["0"])
    assert dict(graph.inner_flops) == {"0.0": 2 * 3 * 4 * 8, "0.1": 2 * 3 * 8 * 4}

"""Difficult steps, cut at every place where they may be cut: objects that units write to, and glue between them."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from lightning_avgpipe.weights.tied import TiedParameters
from tests.threads import alone

WIDTH = 4


class Cache:
    """Keys by layer, and how many there are."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four layers of a kind, and a loss."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer(i) for i in range(4)])

    def training_step(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SharesKeys(Layer):
    """The second half of the layers reads the keys that the first one left, and how many layers there were."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        if self.index < 2:
            cache.keys[self.index] = self.linear(x)
            cache.length += 1
            return torch.tanh(cache.keys[self.index])
        return torch.tanh(self.linear(x) * cache.keys[self.index - 2] * cache.length)


class KeyValueSharing(Net):
    layer = SharesKeys

    def training_step(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.square().mean() * cache.get_seq_length()


class Appends(Layer):
    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        x = super().forward(x)
        states.append(x * 2)
        return x


class HiddenStates(Net):
    """Units append to a list; the step adds up what is in it."""

    layer = Appends

    def training_step(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, states)
        return x.mean() + sum(len(states) * state.square().mean() for state in states)


class LeavesPenalty(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.penalty = x.square().mean()
        return x


class Penalties(Net):
    """Units leave losses in attributes, as mixtures of experts do."""

    layer = LeavesPenalty

    def training_step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.abs().mean() + sum(layer.penalty for layer in self.layers)


class Distribution(Layer):
    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(self.linear(x), torch.ones(()))


class Posterior(Net):
    """A unit returns an object that holds tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Distribution(1)

    def training_step(self, x: Tensor) -> Tensor:
        posterior = self.layers[1](self.layers[0](x))
        h = self.layers[3](self.layers[2](posterior.mean))
        return h.mean() - posterior.log_prob(x).mean()


@dataclass
class State:
    x: Tensor
    history: tuple[Tensor, ...] = ()
    steps: int = 0


class Advances(Layer):
    def forward(self, state: State) -> State:
        state.x = super().forward(state.x)
        state.history = (*state.history, state.x)
        state.steps += 1
        return state


class StateObject(Net):
    """One object goes through all units, which change it and return it."""

    layer = Advances

    def training_step(self, x: Tensor) -> Tensor:
        state = State(x)
        first = state
        for layer in self.layers:
            state = layer(state)
        assert first is state
        return state.steps * state.x.mean() + torch.stack(state.history[::2]).square().mean()


class WritesInPlace(Layer):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = super().forward(x)
        cache.keys[0][:, self.index] = x[:, 0]
        return x + cache.keys[0].mean(-1, keepdim=True)


class StaticCache(Net):
    """Units write into a tensor that lies in an object."""

    layer = WritesInPlace

    def training_step(self, x: Tensor) -> Tensor:
        cache = Cache()
        cache.keys[0] = torch.zeros(len(x), 4)
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().mean()


class Table(nn.Module):
    """Makes a table of positions when it is first called, as Lightning's demo transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def made(self, x: Tensor) -> Tensor:
        table = torch.zeros(x.size(0), x.size(1))
        table[:, 0::2] = torch.sin(torch.arange(x.size(0)).unsqueeze(1) + 1.0)
        return table

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = self.made(x)
        return self.linear(x) * self.table[: len(x)]


class Positions(Net):
    """A unit that makes a table is called on several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def training_step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.table(layer(x))
        return x.square().mean()


class Scale(Table):
    def made(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape) * x.detach().abs().max()


class PeeksAtNumbers(Table):
    def made(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, x.abs().max().item())


class Weighs(Table):
    def made(self, x: Tensor) -> Tensor:
        return self.linear.weight.detach().sum().expand(x.shape)


class Starts(Table):
    def made(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, random.random())


class Scales(Net):
    """What the first call of a unit makes of its numbers, the second one reads."""

    table: Callable[[], Table] = Scale

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = type(self).table()

    def training_step(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[1](self.layers[0](x)))
        return self.layers[3](self.layers[2](x)).square().mean()


# -- glue ------------------------------------------------------------------------------------------------------------


MODELS = [KeyValueSharing, HiddenStates, Penalties, Posterior, StateObject, StaticCache, Positions, Scales]
SAMPLES = [torch.randn(3, WIDTH) for _ in range(3)]


def graph_of(module: Any) -> CallGraph:
    return capture("training_step", module.training_step, (SAMPLES[0].clone(),), module, Divisible(module).units())


def trained(
    module: Any, graph: CallGraph, cuts: tuple[int, ...], apart: bool, samples: list[Tensor] = SAMPLES
) -> list[Any]:
    """Run all micro-batches through the stages of these cuts; the modules in which gradients are."""
    programs = stage_programs(graph, cuts)
    cluster = alone(len(programs))
    modules = [copy.deepcopy(module) if apart else module for _ in programs]
    stages = [
        Stage(p, m, cluster.device, TiedParameters(m, cluster, {})) for p, m in zip(programs, modules, strict=True)
    ]
    tasks = [
        Task(lambda i, x, m=m: m.training_step(x), [(x.clone(),) for x in samples], lambda i, loss: loss)
        for m in modules
    ]

    def passed(message: Any) -> Any:
        return pickle.loads(pickle.dumps(message)) if apart else message

    # a stage is ahead of the next one by a micro-batch, as in any schedule
    messages: dict[tuple[int, int], Any] = {}
    for time in range(len(samples) + len(stages)):
        for k in range(len(stages)):
            if 0 <= (i := time - k) < len(samples):
                messages[k, i] = passed(stages[k].perform(Action(FORWARD, i), tasks[k], messages.get((k - 1, i))))
    for i in range(len(samples)):
        message = None
        for stage, task in zip(reversed(stages), reversed(tasks), strict=True):
            message = passed(stage.perform(Action(BACKWARD, i), task, message))
    return modules


def assert_gradients_are_those_of(plain: nn.Module, modules: list[Any], where: Any = "") -> None:
    """The gradients of the stages' modules together, to rounding."""
    for name, parameter in plain.named_parameters():
        found = [g for m in dict.fromkeys(modules) if (g := m.get_parameter(name).grad) is not None]
        assert (parameter.grad is None) == (not found), (where, name)
        if parameter.grad is not None:
            expected = parameter.grad
            torch.testing.assert_close(sum(found), expected, rtol=1e-6, atol=1e-7, msg=f"{where} {name}")


def places(graph: CallGraph, kind: str = "") -> list[int]:
    """Where the graph may be cut, before nodes of a kind."""
    legal = [p for p in range(1, len(graph.nodes)) if graph.obstacles[p] is None]
    return [p for p in legal if graph.nodes[p].kind == kind or not kind]


@pytest.mark.parametrize("model", MODELS)
def test_every_legal_cut_gives_the_same_gradients(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain: Any = model()
    module: Any = copy.deepcopy(plain)
    for x in SAMPLES:
        plain.training_step(x.clone()).backward()
    graph = graph_of(module)
    between = tuple(places(graph, "call"))
    assert len(between) >= 2, graph.obstacles
    for cuts, apart in [*(((p,), True) for p in places(graph)), (between, False), (between, True)]:
        assert_gradients_are_those_of(plain, trained(copy.deepcopy(module), graph, cuts, apart), cuts)


def test_a_table_that_a_unit_makes_lasts_and_grows_on_every_stage() -> None:
    plain: Any = Positions()
    module: Any = copy.deepcopy(plain)
    samples = [torch.randn(n, WIDTH) for n in (3, 2, 5, 3)]
    for x in samples:
        plain.training_step(x).backward()
    graph = graph_of(module)
    cuts = tuple(places(graph, "call"))
    assert len(cuts) == 7
    found = trained(module, graph, cuts, apart=True, samples=samples)
    assert_gradients_are_those_of(plain, found)
    assert {len(m.table.table) for m in found if m.table.table is not None} == {5}


def test_what_cannot_be_sent_stays_on_one_stage() -> None:
    class Locks(Layer):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys[self.index] = lambda: x  # type: ignore[assignment]
            return super().forward(x)

    module: Any = KeyValueSharing()
    module.layers = nn.ModuleList([Layer(0), Layer(1), Locks(2), Layer(3)])
    graph = graph_of(module)
    assert [graph.obstacles[p] is None for p in (1, 2, 3)] == [True, True, False]
    assert "leaves in an object what cannot be sent to another stage" in str(graph.obstacles[3])


@pytest.mark.parametrize("table", [PeeksAtNumbers, Weighs, Starts])
def test_what_a_unit_makes_of_numbers_and_reads_later_stays_on_its_stage(table: type[Table]) -> None:
    graph = graph_of(type("Model", (Scales,), {"table": table})())
    assert [graph.obstacles[p] is None for p in (1, 2, 3)] == [True, False, True]
    assert "unit 'layers.1' at" in str(graph.obstacles[2])
    assert "reads an attribute of its own" in str(graph.obstacles[2])

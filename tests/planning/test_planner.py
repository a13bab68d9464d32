"""The planner refines by counting and cuts by measured times; here the times are recorded ones."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Costs, Link
from lightning_avgpipe.planning.costs import Costing
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.memory import UpdateScheme
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.planning.trained import TrainedParameters, num_frozen
from lightning_avgpipe.schedule import build
from tests.models import Regression, loader
from tests.planning.known_costs import of_nodes
from tests.trainers import trainer
from tests.zoo.own_models import ReversibleDropout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for block in self.blocks:
            batch = block(batch)
        return batch.sum()


Recorder = Callable[[Callable[[str], float]], list[CallGraph]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Costs by name take the place of a measurement; returns the graphs that were measured."""

    def install(seconds: Callable[[str], float]) -> list[CallGraph]:
        seen: list[CallGraph] = []

        def measure(graph: CallGraph, *args: Any) -> Costs:
            seen.append(graph)
            times = [seconds(node.name) if node.kind == "call" else 0.0 for node in graph.nodes]
            return replace(of_nodes(times), stash_bytes=(100,) * len(times), links=(), measured=True)

        monkeypatch.setattr("lightning_avgpipe.planning.costs.measure", measure)
        return seen

    return install


def planned(module: nn.Module, num_stages: int, conditions: Conditions | None = None, **options: Any) -> Any:
    planner = Planner(Divisible(module), num_stages, **{"costing": Costing("measured"), **options})
    conditions = conditions or Conditions(build("1f1b", num_stages, 1))
    return planner.plan(Step("training_step", module.training_step, (torch.randn(2, 8), 0)), conditions)


def by_block(name: str) -> float:
    """The first block takes six times as long as each of the others; its parts share its time."""
    share = 0.25 if ".parts." in name else 1.0
    return (6.0 if name.startswith("blocks.0") else 1.0) * share


def test_units_that_measure_heavy_are_opened(recorded: Recorder) -> None:
    seen = recorded(by_block)
    plan = planned(Net(), 2)
    assert seen[0].units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")  # counted, they are balanced
    assert plan.stages[0].units == ("blocks.0.parts.0", "blocks.0.parts.1", "blocks.0.parts.2")
    assert [stage.forward + stage.backward for stage in plan.stages] == pytest.approx([4.5, 4.5])
    assert plan.measured


def test_units_next_to_a_cut_are_opened_for_a_finer_balance(recorded: Recorder) -> None:
    recorded(lambda name: 0.25 if ".parts." in name else 1.0)
    plan = planned(Net(9), 2)
    assert plan.stages[0].share == pytest.approx(0.5)
    assert any(".parts." in unit for unit in plan.graph.units) and "blocks.0" in plan.graph.units


def test_a_forecast_simulates_the_schedule(recorded: Recorder) -> None:
    recorded(lambda name: 1.0)
    links = (Link(per_byte=1 / 64, latency=0.25),)
    plan = planned(Net(), 2, Conditions(build("1f1b", 2, 2), links))
    # two blocks a stage: F 2/3, B 4/3 s; the boundary of 2 x 8 floats takes 1 s and a latency
    assert plan.stages[0].boundary_bytes == 64
    assert plan.forecast.iteration_s == pytest.approx(2 / 3 + 1.25 + 2 * 2.0 + 1.25 + 4 / 3)
    assert plan.forecast.bubble == pytest.approx(1 - 4.0 / plan.forecast.iteration_s)
    assert str(plan).splitlines()[-1] == "expected: 8.50 s an iteration, 53% idle (1f1b, 2 micro-batches)"


class Bulge(nn.Module):
    """Twelve layers; what crosses the middle is wide."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 8, 8, 8, 8, 256, 8, 8, 8, 8, 8, 8]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()


@pytest.mark.parametrize(("schedule", "models", "first"), [("1f1b", 1, 5), ("afab", 1, 6), ("1f1b", 2, 6)])
def test_a_schedule_that_waits_for_transfers_has_less_even_stages_with_less_traffic(
    schedule: str, models: int, first: int, recorded: Recorder
) -> None:
    recorded(lambda name: 1.0)
    wide_s = 2.0  # less than a stage's 6 s
    conditions = Conditions(build(schedule, 2, 8), (Link(per_byte=wide_s / 2048),), num_pipelines=models)
    plan = planned(Bulge(), 2, conditions, updates=UpdateScheme(rolling=models > 1))
    assert [len(stage.units) for stage in plan.stages] == [first, 12 - first]


class Calls(list[str]):
    """A list that can be referred to weakly."""


@pytest.mark.parametrize("frozen", [False, True])
def test_a_further_plan_does_not_measure_what_an_earlier_one_has_measured(frozen: bool) -> None:
    calls = Calls()
    counted = weakref.ref(calls)  # what a hook holds is put back after measuring
    net = Net()
    net.blocks[2].register_forward_pre_hook(lambda *_: counted().append("blocks.2"))
    planner, args = Planner(Divisible(net), 2, ["blocks.2"], costing=Costing("measured")), (torch.randn(4, 8), 0)
    conditions = Conditions(build("1f1b", 2, 1))
    planner.plan(Step("training_step", net.training_step, args), conditions)
    first = len(calls)
    net.blocks[0].requires_grad_(not frozen)
    assert planner.plan(Step("training_step", net.training_step, args), conditions).measured
    assert 0 < len(calls) - first < first


def test_a_replica_stashes_the_micro_batches_of_its_turns(recorded: Recorder) -> None:
    recorded(lambda name: 1.0)
    schedule = build("afab", 2, 8)
    alone = planned(Net(), 2, Conditions(schedule)).stages[0].memory
    shared = planned(Net(), 2, Conditions(schedule), replicas=(1, 4), split_points=["blocks.2"]).stages
    assert shared[0].memory == alone
    whole = planned(Net(), 2, Conditions(schedule), split_points=["blocks.2"]).stages[1].memory
    assert shared[1].memory.stash == whole.stash / 4 and shared[1].memory.persistent == whole.persistent


class Forces(nn.Linear):
    """Returns a derivative, as potentials of molecules do."""

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


class Slope(nn.Module):
    """Returns a derivative of what other units have computed, as layers for forces do."""

    def forward(self, energy: Any, positions: Any) -> Any:
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True, allow_unused=True)
        return -slope


class Potential(Net):
    """Has positions after its first block."""

    def __init__(self) -> None:
        super().__init__(2)
        self.slope = Slope()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embedded, positions = self.blocks[0](batch), batch.clone().requires_grad_()
        return self.slope(self.blocks[1](embedded * positions).square(), positions).square().sum()


def with_forces() -> Net:
    net = Net()
    net.blocks[0].parts[1] = Forces(8, 8)
    return net


@pytest.mark.parametrize(
    ("make", "reason"), [(with_forces, "it runs a backward itself"), (Potential, "'slope' does not run alone")]
)
def test_a_step_that_runs_a_backward_is_counted_where_it_cannot_be_measured(
    make: Callable[[], Net], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = make()
    planner = Planner(Divisible(net), 2, ["blocks.0.parts.2"], costing=Costing("measured"))
    step = Step("training_step", net.training_step, (torch.randn(4, 8), 0))
    assert not planner.plan(step, Conditions(build("1f1b", 2, 1))).measured
    assert f"training_step: {reason}" in caplog.text


def test_a_module_that_calls_its_layers_in_an_autograd_function_is_a_unit() -> None:
    net = ReversibleDropout()
    divisible, step = Divisible(net), Step("training_step", net.training_step, (net.example(4, 1), 0))
    graph = divisible.capture(step, ["layers.0", "layers.1.linear", "layers.1.drop", "layers.2", "layers.3"])
    assert [node.name for node in graph.nodes if node.kind == "call"] == [f"layers.{i}" for i in range(4)]
    assert not divisible.opens("layers.1") and "_CallsAgain.apply()" in divisible.whole(graph.units)["layers.1"]


# -- what cannot be divided is named with its share of the time, and what to do --------------------------------------


class Recurrent(Regression):
    """Nearly all of the time is in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(8, 128, num_layers=3, batch_first=True)
        self.head = nn.Linear(128, 8)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 32, 8), torch.randn(size, 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[0])


def test_a_stage_with_nearly_all_of_the_time_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="of the time: 2 stages are at most 1.0. times as fast as one") as caught:
        strategy = AvgPipeStrategy(num_stages=2, costs="flops")
        trainer(strategy=strategy).fit(Recurrent(), loader(Recurrent, 16, 8))
    (text,) = [str(w.message) for w in caught if "times as fast" in str(w.message)]
    assert "unit 'encoder' is one operation for all of its layers; chain several with num_layers=1" in text


def test_a_second_device_is_proposed_for_a_stage_that_cannot_be_divided() -> None:
    class Wide(Regression):
        """The last of five layers takes half of the time."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
            self.head = nn.Linear(64, 4 * 64, bias=False)

        @staticmethod
        def example(size: int) -> Any:
            return torch.randn(size, 64), torch.randn(size, 4 * 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x))

    strategy = AvgPipeStrategy(num_stages=4, costs="flops")
    trainer(strategy=strategy, max_epochs=1).fit(Wide(), loader(Wide, 16, 8))
    assert "4 stages are at most 2.0" in strategy.plan.note
    assert "(replicas=[1, 1, 2]), as many devices are at most 4.0" in strategy.plan.note


def test_an_even_plan_is_not_commented(recwarn: pytest.WarningsRecorder) -> None:
    strategy = AvgPipeStrategy(num_stages=2, costs="flops")

    class Even(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 128)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    trainer(strategy=strategy, max_epochs=1).fit(Even(), loader(Recurrent, 16, 8))
    assert strategy.plan is not None and not strategy.plan.note
    assert not [w for w in recwarn if "times as fast" in str(w.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*torch.jit.*is not supported")
def test_too_few_cuts_are_explained_by_what_takes_the_time() -> None:
    class Scripted(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
            self.encoder, self.head = torch.jit.script(layers), nn.Identity()  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

    with pytest.raises(PartitionError, match="100% of the time: unit 'encoder' is a TorchScript module") as caught:
        trainer(strategy=AvgPipeStrategy(num_stages=2)).fit(Scripted(), loader(Recurrent, 16, 8))
    assert "lower num_stages to 1, or change what cannot be divided" in str(caught.value)


# -- which stages have nothing to train follows from what the step did when it was captured --------------------------


WIDTH = 4


class Branching(nn.Module):
    """Four layers; the first two are a branch of its own, which comes back by a sum in place."""

    def __init__(self, detached: bool = False, asks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.detached = detached
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x)
        if self.asks:
            a.requires_grad_()
        b = self.layers[1](a)
        if self.detached:
            b = b.detach()
        c = self.layers[2](b)
        c += b
        return self.layers[3](c).sum()


def frozen(module: Branching, at_capture: Collection[int], now: Collection[int]) -> int:
    """How many of four stages are frozen now; both arguments are numbers of layers that are."""
    for i, layer in enumerate(module.layers):
        layer.requires_grad_(i not in at_capture)
    planner = Planner(Divisible(module), 4, [f"layers.{i}" for i in (1, 2, 3)])
    conditions = Conditions(build("1f1b", 4, 1))
    plan = planner.plan(Step("training_step", module.forward, (torch.randn(2, WIDTH),)), conditions)
    trained = TrainedParameters(plan.graph, plan.cuts, module)
    for i, layer in enumerate(module.layers):
        layer.requires_grad_(i not in now)
    assert trained.frozen_stages == num_frozen(plan.graph, plan.cuts, trained.names)
    return trained.frozen_stages


def test_what_is_frozen_now_counts_not_what_was() -> None:
    subsets: list[tuple[int, ...]] = [(), (0,), (0, 1), (0, 1, 2), (1,), (1, 2), (0, 2)]
    expected = {(): 0, (0,): 1, (0, 1): 2, (0, 1, 2): 3, (1,): 0, (1, 2): 0, (0, 2): 1}
    for at_capture in subsets:
        assert {now: frozen(Branching(), at_capture, now) for now in subsets} == expected


def test_what_is_detached_needs_no_backward() -> None:
    module = Branching(detached=True)
    step = Step("training_step", module.forward, (torch.randn(2, WIDTH),))
    graph = Planner(Divisible(module), 1).plan(step, Conditions(build("1f1b", 1, 1))).graph
    behind = 1 + next(node.index for node in graph.nodes if node.name == "detach")
    assert num_frozen(graph, (behind,), graph.trained) == 1
    assert num_frozen(graph, (behind - 1,), graph.trained) == 0  # it is the next stage that detaches


def test_what_asks_for_a_gradient_by_itself_always_does() -> None:
    # the first stage has asked for it after its last layer: it needs no backward for that
    assert frozen(Branching(asks=True), (0, 1, 2), (0, 1, 2)) == 1

"""Broadcast forward: its schedule, and training with it, which ends with the weights of 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging, AvgPipeStrategy, Broadcast
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.execution import Compiler
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.errors import ConfigurationError, ScheduleError, StepChangedError
from lightning_avgpipe.schedule import FORWARD, StageCosts, build, check, of_function, simulate
from tests import processes
from tests.comparing import assert_equal, assert_same_gradients, state
from tests.driver import Engine
from tests.models import MLP, Blocks, CountingLinear, LSTMStack, TinyTransformer, UNet, loader
from tests.trainers import assert_defaults_equal_accumulation, trainer


def fitted(schedule: Any, num_stages: int = 3, model: Any = Blocks, **options: Any) -> tuple[Any, AvgPipeStrategy]:
    """Train, the last batch of an epoch being small; weights, buffers and metrics."""
    torch.manual_seed(1)
    module = model()
    of_trainer = {name: options.pop(name) for name in ("gradient_clip_val", "devices") if name in options}
    given = {"costs": "flops", "num_microbatches": 4, **options}
    strategy = AvgPipeStrategy(num_stages=num_stages, schedule=schedule, **given)
    runner = trainer(strategy=strategy, **of_trainer)
    runner.fit(module, loader(model, 40, 16), loader(model, 8, 4))
    assert runner.callback_metrics
    return (state(module), dict(runner.callback_metrics)), strategy


@pytest.mark.parametrize(
    "options",
    [
        {"num_pipelines": 2},
        pytest.param({"recompute": True, "gradient_clip_val": 0.1, "num_stages": 5}, marks=pytest.mark.slow),
        pytest.param({"verify": True}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_the_weights_of_1f1b_and_logs_the_same(options: dict[str, Any]) -> None:
    found, strategy = fitted(Broadcast(4), **options)
    expected, _ = fitted("1f1b", **options)
    assert_equal(found, expected)
    assert strategy.plan.forecast.schedule == "broadcast"


@pytest.mark.parametrize("schedule", ["broadcast", Broadcast()])
def test_with_defaults_it_equals_accumulation(schedule: Any) -> None:
    torch.manual_seed(1)
    assert_defaults_equal_accumulation(MLP(), MLP.example(8), 3, schedule=schedule, num_microbatches=4)


@pytest.mark.slow
def test_copies_of_weights_count_in_the_plan_and_the_measured_peak() -> None:
    points = {"split_points": ["layers.2", "layers.3"], "costs": "measured", "costs_cache": None}
    _, strategy = fitted(Broadcast(), **points)
    _, plain = fitted("1f1b", **points)
    assert strategy.plan is not None and plain.plan is not None
    (ours, theirs), mid = ([s.plan.stages for s in (strategy, plain)], strategy.plan.stages[1])  # type: ignore[union-attr]
    weights = 4 * (mid.num_parameters + 2 * 8) + 8  # and the buffers of a batch norm
    assert ours[2].memory.persistent - theirs[2].memory.persistent == weights
    assert ours[2].memory.stash >= theirs[2].memory.stash + ours[1].memory.stash
    assert ours[1].memory.stash < theirs[1].memory.stash
    assert strategy.peak_memory_bytes[2] >= plain.peak_memory_bytes[2] + weights - 64


class Frozen(MLP):
    """Its first layers are not trained in the second epoch."""

    def on_train_epoch_start(self) -> None:
        self.layers[:4].requires_grad_(self.current_epoch == 0)


def test_where_stages_run_forwards_only_it_is_1f1b() -> None:
    points = {"split_points": ["layers.4", "layers.6"], "model": Frozen}
    found, _ = fitted("broadcast", **points)
    expected, _ = fitted("1f1b", **points)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"averaging": Averaging(rolling=True), "num_pipelines": 2},
            r"Averaging\(rolling=True\) with schedule=.*broadcast.* leave it out",
        ),
        ({"weight_policy": "stash"}, "weight_policy='stash' with schedule='broadcast'"),
        ({"replicas": [1, 2, 1]}, "and schedule='broadcast': replicas of single stages need forwards and backwards"),
        ({"advance": 1}, "advance=1 has no meaning for schedule='broadcast'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AvgPipeStrategy(num_stages=3, schedule="broadcast", **options)


def fitted_in_three() -> Any:
    return fitted("broadcast", devices=3)[0]


@pytest.mark.slow
def test_three_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    expected, _ = fitted("1f1b")
    ranks = processes.everywhere(3, fitted_in_three, folder=tmp_path)
    assert_equal(ranks, [expected] * 3)


# -- who is what, what a message takes through a mid, and when it gains over 1F1B ------------------------------------


def test_every_size_is_complete_and_finishes() -> None:
    for num_stages, num_microbatches in itertools.product(range(1, 9), range(1, 9)):
        schedule = Broadcast()(num_stages, num_microbatches)
        check(schedule)
        found = simulate(schedule, StageCosts.uniform(num_stages, 1, 2)).iteration_s
        assert found == 3 * (num_microbatches + num_stages - 1) + (num_microbatches - 1) * (num_stages > 2)


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_a_message_takes_two_latencies_and_one_and_a_segment_of_transfers_through_a_mid(segments: int) -> None:
    costs = StageCosts.uniform(3, 1, 2, send_s=4, latency_s=0.25)
    spans = simulate(Broadcast(segments)(3, 1), costs).spans
    (leaf,) = (span for span in spans if span.stage == 2 and span.action.kind.counts_as is FORWARD)
    assert leaf.begin_s == pytest.approx(1 + 2 * 0.25 + (1 + 1 / segments) * 4)
    assert leaf.end_s - leaf.begin_s == 2  # the mid's forward and its own
    (graph,) = (span for span in spans if span.stage == 1 and span.action.kind.counts_as is FORWARD)
    assert graph.begin_s == pytest.approx(1 + 0.25 + 4)


@pytest.mark.parametrize(("ratio", "gain"), [(0, 0.84), (0.5, 1.00), (1, 1.07), (2, 1.11)])
def test_it_gains_where_a_transfer_takes_longer_than_half_a_forward(ratio: float, gain: float) -> None:
    costs = StageCosts.uniform(12, 1, 2, send_s=ratio)
    plain, ours = (simulate(schedule, costs).iteration_s for schedule in (build("1f1b", 12, 16), Broadcast()(12, 16)))
    assert plain / ours == pytest.approx(gain, abs=0.006)


@pytest.mark.parametrize(
    "rows",
    [
        ("F0 F1 B0 B1", "F0 B0 G1 B1", "D0 B0 D1 B1"),  # not always
        ("F0 F1 B0 B1", "G0 B0 G1 B1", "F0 B0 F1 B1"),  # the last stage lacks what the mid would send
        ("F0 F1 B0 B1", "F0 B0 F1 B1", "D0 B0 D1 B1"),  # it has what it needs already
        ("F0 F1 B0 B1", "F0 F1 B0 B1", "G0 B0 G1 B1"),  # there is nobody behind the last stage
    ],
)
def test_who_builds_graphs_late_has_one_before_that_sends_and_one_behind_that_runs_both(rows: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"a stage that runs graph \(G\) runs no other forwards, has one that"):
        of_function(lambda num_stages, num_microbatches: rows, 3, 2)


def test_it_can_be_trained_with() -> None:
    assert of_function(Broadcast(), 4, 4).relays == {2}
    assert of_function(Broadcast(), 2, 4).rows == build("1f1b", 2, 4).rows  # nobody is in the middle
    with pytest.raises(ConfigurationError, match="Broadcast: segments=0: must be an integer from 1"):
        Broadcast(0)


# -- doubles: a stage runs the forwards of the stage before with a copy of its weights, and nothing changes ----------


def engine(module: nn.Module, num_stages: int, batch: Any, **options: Any) -> Engine:
    relays = sorted(Broadcast()(num_stages, 1).relays)
    return Engine(module, num_stages, batch, 4, relays=relays, **options)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    module = kind()
    module.log = lambda *args, **kwargs: None  # type: ignore[assignment,method-assign]  # no trainer here
    return module


def dropping() -> TinyTransformer:
    return TinyTransformer(dropout=0.3, layers=5)


@pytest.mark.parametrize(
    ("model", "num_stages", "compiled"),
    [
        (Blocks, 3, False), (Blocks, 4, False), (Blocks, 6, False), (dropping, 5, False), (dropping, 3, True),
        (LSTMStack, 4, False), (UNet, 3, False),
    ],
)  # fmt: skip
def test_gradients_and_buffers_are_those_of_1f1b_bit_for_bit(model: Any, num_stages: int, compiled: bool) -> None:
    found, expected = made(model), made(model)
    torch.manual_seed(1)
    batch = found.example(8)
    for module, schedule in ((found, "broadcast"), (expected, "1f1b")):
        compiler = Compiler({"backend": "eager"}) if compiled else None  # its code draws other numbers
        trained = engine(module, num_stages, batch, compiler=compiler)
        for iteration in range(2):
            losses = trained.train(batch, schedule, iteration)
            with torch.no_grad():  # as an optimizer that steps
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        assert len(losses) == 4
    assert_equal(found, expected)
    assert_same_gradients(found, expected)


class Watching(Observer):
    """Notes the weights that are in a layer when its hook runs, and in which action."""

    def __init__(self, layer: nn.Linear) -> None:
        self.action = ""
        self.seen: list[tuple[str, Tensor, bool]] = []
        layer.register_forward_pre_hook(self._note)

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.action = str(work.action)
        return do()

    def _note(self, layer: nn.Module, _: Any) -> None:
        weight: Any = layer.weight
        self.seen.append((self.action, weight.detach().clone(), weight is self.own))

    own: Any = None


def test_the_copy_equals_the_weights_before_each_iteration_whoever_changed_them() -> None:
    module, batch = made(Blocks), Blocks.example(8)
    trained = engine(module, 3, batch)
    mid: Any = next(u for u in trained.plan.stages[1].units if u.startswith("layers"))
    layer: Any = module.get_submodule(mid)
    watching = Watching(layer)
    watching.own = layer.weight
    for iteration in range(3):
        watching.seen.clear()
        before = layer.weight.detach().clone()
        trained.train(batch, "broadcast", iteration, observers=[watching])
        assert sorted(action for action, _, _ in watching.seen) == [f"{kind}{i}" for kind in "DG" for i in range(4)]
        for action, weight, own in watching.seen:
            assert torch.equal(weight, before), action
            assert own == action.startswith("G"), action
        assert layer.weight is watching.own
        with torch.no_grad():
            layer.weight.data = layer.weight + 1  # in other memory


# -- what is refused -------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Three layers, of which the second is in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.last(self.middle(self.first(batch))).square().mean()
        return loss


class Cooling(nn.Linear):
    """Changes a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return super().forward(x) * self.scale


class Collecting(nn.Linear):
    """Writes into a tensor of its own that is not a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.sums = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.sums += x.detach().sum(0)
        return super().forward(x)


@pytest.mark.parametrize(
    ("middle", "name"),
    [
        (lambda: CountingLinear(8, 8), "the attribute 'middle.calls'"),
        (Cooling, "the parameter 'middle.scale'"),
        (Collecting, "the attribute 'middle.sums'"),
    ],
)
def test_forwards_that_change_more_than_buffers_are_refused_by_name(middle: Any, name: str) -> None:
    batch = torch.randn(8, 8)
    with pytest.raises(ConfigurationError, match=rf"stage 2 runs the forwards of stage 1 .* these change {name}"):
        engine(Layered(middle()), 3, batch, split_points=["middle", "last"])
    module = Layered(nn.Linear(8, 8))
    module.first = middle()
    engine(module, 3, batch, split_points=["middle", "last"]).train(batch, "broadcast")  # it runs once there


class Whimsical(nn.Linear):
    """In training it does, later on, what it did not do at first: it changes its input."""

    changes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            x = x.detach()
            x += 1
        return super().forward(x)


def test_a_value_that_is_changed_while_others_may_read_it_is_an_error() -> None:
    module, batch = Layered(Whimsical(8, 8)), torch.randn(8, 8)
    trained = engine(module, 3, batch, split_points=["middle", "last"])
    trained.train(batch, "broadcast")
    module.middle.changes = True  # type: ignore[assignment]
    with pytest.raises(StepChangedError, match=r"value 'first', which stage 1 received, was changed in place"):
        trained.train(batch, "broadcast")

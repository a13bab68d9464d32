"""Backwards in halves: the same gradients as whole ones bit for bit, and it is logged which stages run them whole."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.schedule import StageCosts, Timeline, build, check, simulate
from lightning_avgpipe.systems.zero_bubble import INPUT_GRADIENT, WEIGHT_GRADIENT, halved
from tests.driver import Engine
from tests.models import MLP, loader
from tests.schedule.test_several_stages import stashed, thirds
from tests.trainers import pipeline

F = nn.functional
TOKENS, FLOATS = torch.arange(64).reshape(8, 8) % 32, torch.linspace(-1, 1, 64).reshape(8, 8)
MIXED = torch.arange(128.0).sin().reshape(16, 8)  # micro-batches go different ways


class Layers(nn.Module):
    """A loss over some layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.first, self.second = nn.LSTM(8, 8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        out = self.second(self.first(self.embedding(batch))[0])[0]
        return F.cross_entropy(self.head(out).flatten(0, 1), batch.flatten())


def convolutions() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(4)]
    return Layers(*blocks, nn.Flatten(), nn.Linear(192, 4))


def linears(count: int = 6) -> Layers:
    return Layers(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)))


def tied() -> Layers:
    """Layers that are called twice, on one stage and on two."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    return Layers(layers[0], layers[1], layers[1], layers[2], layers[0], nn.Tanh())


class Halves(nn.Linear):
    """Multiplies by its weight with a hook on what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


class OnNodes(nn.Linear):
    """Has hooks on nodes of autograd's graph, of which one halves what comes in."""

    calls: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda gradients: (self.calls.update(["before"]), gradients[0] * 0.5)[1:])
            out.grad_fn.register_hook(lambda *gradients: self.calls.update(["after"]))
        return out


class Retaining(nn.Linear):
    """Keeps the gradient of what it returns."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if out.requires_grad:
            out.retain_grad()
            self.kept.append(out)
        return out


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(super().forward(x))  # type: ignore[no-any-return]


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Adaptive(nn.Linear):
    """Takes some micro-batches twice."""

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(super().forward(x))
        return out + torch.tanh(super().forward(out)) if out.sum() > 0 else out


class CheckpointedAtTimes(Checkpointed):
    """Saves nothing of some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (super().forward(x) if x.sum() > 0 else nn.Linear.forward(self, x))


class Experts(nn.Module):
    """Sends each sample to two of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out, (shares, chosen) = x.clone(), self.gate(x).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            for share, choice in zip(shares.T, chosen.T, strict=True):
                (rows,) = torch.where(choice == number)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return out


def frozen() -> nn.Module:
    module = linears()
    module.layers[3].requires_grad_(False)
    return module


def gradients(
    engine: Engine, batch: Tensor, schedule: str, before: dict[str, Tensor], observers: Any = ()
) -> dict[str, Tensor | None]:
    """Of all weights, after two batches from the same state."""
    engine.module.load_state_dict(before)
    engine.module.zero_grad()
    for i in range(2):
        engine.train(batch.clone(), schedule, i, observers=observers)
    return {name: parameter.grad for name, parameter in engine.module.named_parameters()}


def differing(module: nn.Module, batch: Tensor, *schedules: str, recompute: Any = False) -> set[str]:
    """Weights whose gradients differ from those of 1F1B."""
    module.log = lambda *args, **kwargs: None  # type: ignore[assignment]
    engine = Engine(module, 3, batch.clone(), len(batch) // 2, recompute=recompute)
    before = copy.deepcopy(module.state_dict())
    expected = gradients(engine, batch, "1f1b", before)
    assert any(gradient is not None and gradient.any() for gradient in expected.values())
    found = set()
    for schedule in schedules:
        for name, gradient in gradients(engine, batch, schedule, before).items():
            other = expected[name]
            same = gradient is other if gradient is None or other is None else torch.equal(gradient, other)
            found |= set() if same else {name}
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (linears, FLOATS),
    "tied": (tied, FLOATS),
    "frozen": (frozen, FLOATS),
    "recurrent": (Recurrent, TOKENS),
    "convolutions": (convolutions, torch.linspace(-1, 1, 8 * 192).reshape(8, 3, 8, 8)),
    "hook on a value": (lambda: Layers(nn.Linear(8, 8), nn.Linear(8, 8), Halves(8, 8), nn.Linear(8, 8)), FLOATS),
    "hook on a node": (lambda: Layers(*(OnNodes(8, 8) for _ in range(4))), FLOATS),
    "function of Python": (lambda: Layers(*(Doubled(8, 8) for _ in range(4))), FLOATS),
    "checkpoint": (lambda: Layers(*(Checkpointed(8, 8) for _ in range(4))), FLOATS),
    "adaptive depth": (lambda: Layers(*(Adaptive(8, 8) for _ in range(6))), MIXED),
    "checkpoint at times": (lambda: Layers(*(CheckpointedAtTimes(8, 8) for _ in range(6))), MIXED),
    "experts": (lambda: Layers(*(Experts() for _ in range(6))), MIXED),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_whole_backwards_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    assert not differing(make(), batch, "zb_h1", "zb_h2")


@pytest.mark.parametrize("recompute", [True, ["layers.2", "layers.3"]])
def test_a_stage_that_repeats_its_forward_does_so_once_and_runs_whole(
    recompute: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    module, calls, now = linears(), Counter[str](), ""
    assert not differing(module, FLOATS, "zb_h1", recompute=recompute)
    module.layers[2][0].register_forward_hook(lambda *args: calls.update([now]))
    engine = Engine(module, 3, FLOATS, 4, recompute=recompute)
    with caplog.at_level(logging.WARNING):
        for now in ("1f1b", "zb_h1"):
            engine.train(FLOATS.clone(), now)
    assert calls["zb_h1"] == calls["1f1b"] >= 8
    assert any("runs backwards whole" in record.message for record in caplog.records)


class When(Observer):
    """Notes which of some weights get gradients in which kind of action on a stage."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        self.found: dict[str, set[str]] = {}
        self.calls: Counter[str] = Counter()
        self._stage, self._now = stage, ""
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._note(name))  # type: ignore[misc]

    def _note(self, name: str) -> None:
        self.calls[name] += 1
        self.found.setdefault(name, set()).add(self._now)

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self._now = str(work.action.kind)
        return do()


def test_weights_get_their_gradients_in_the_second_half_and_hooks_on_them_are_called_once() -> None:
    torch.manual_seed(0)
    module = linears()
    engine = Engine(module, 3, FLOATS, 4)
    when = When(module, 1)
    engine.train(FLOATS.clone(), "zb_h1", observers=[when])
    assert when.found == {name: {str(WEIGHT_GRADIENT)} for name, _ in module.named_parameters()}
    assert set(when.calls.values()) == {4}


def test_a_layer_that_is_called_twice_on_a_stage_has_its_gradient_with_the_first_half() -> None:
    torch.manual_seed(0)
    shared, first, last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    module = Layers(first, shared, nn.Tanh(), shared, last)
    engine = Engine(module, 2, FLOATS, 4, split_points=["layers.1"])
    when = When(module, 1)
    engine.train(FLOATS.clone(), "zb_h1", observers=[when])
    kinds = {name: {str(INPUT_GRADIENT if name.startswith("layers.1") else WEIGHT_GRADIENT)} for name in when.found}
    assert when.found == kinds and set(when.calls.values()) == {4}


def test_nothing_of_torch_stays_replaced() -> None:
    from torch.autograd.graph import saved_tensors_hooks

    before = Tensor.register_hook, saved_tensors_hooks.__enter__, set(vars(Tensor))
    Engine(linears(), 2, FLOATS, 4).train(FLOATS.clone(), "zb_h2")
    assert before == (Tensor.register_hook, saved_tensors_hooks.__enter__, set(vars(Tensor)))


def test_hooks_on_nodes_are_called_once_for_each_micro_batch() -> None:
    engine = Engine(Layers(*(OnNodes(8, 8) for _ in range(4))), 2, FLOATS, 4)
    for schedule in ("1f1b", "zb_h1"):
        OnNodes.calls.clear()
        engine.train(FLOATS.clone(), schedule)
        assert OnNodes.calls == {"before": 16, "after": 16}, schedule


@pytest.mark.parametrize(("schedule", "said"), [("zb_h1", 1), ("1f1b", 0)])
def test_the_plan_says_that_halves_of_small_layers_take_longer(
    schedule: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        pipeline(2, 1, {"schedule": schedule, "costs": "measured"}, max_epochs=1).fit(MLP(), loader(MLP, 8, 4))
    assert caplog.text.count(f"schedule='{schedule}' splits each backward in two") == said


def test_a_value_that_retains_its_gradient_has_it_once() -> None:
    torch.manual_seed(0)
    layers = [Retaining() for _ in range(4)]
    engine = Engine(Layers(*layers), 2, FLOATS, 4)
    found = []
    for schedule in ("1f1b", "zb_h1"):
        for layer in layers:
            layer.kept.clear()
        engine.train(FLOATS.clone(), schedule)
        found.append([t.grad.sum().item() for layer in layers for t in layer.kept if t.grad is not None])
    assert found[0] == found[1] and len(found[0]) == 16


A_HOOK, A_NODE = "a hook on a value", "a look at the grad_fn of a value, which may have got a hook"
CHECKPOINT = "a checkpoint, or other hooks on what is saved for backwards"
RECOMPUTE = "recompute, which would keep all that it repeats until then"
FUNCTION = "a function of Python (autograd.Function, a compiled module)"


@pytest.mark.parametrize(
    ("name", "recompute", "why"),
    [
        ("linear", False, {}), ("tied", False, {}), ("frozen", False, {}), ("recurrent", False, {}),
        ("convolutions", False, {}), ("hook on a value", False, {1: A_HOOK}),
        ("hook on a node", False, dict.fromkeys((2, 1, 0), A_NODE)),
        ("function of Python", False, dict.fromkeys((2, 1, 0), FUNCTION)),
        ("checkpoint", False, dict.fromkeys((2, 1, 0), CHECKPOINT)),
        ("linear", True, {1: RECOMPUTE, 0: RECOMPUTE}),  # the last backward follows at once
        ("linear", ["layers.2", "layers.3"], {2: CHECKPOINT, 1: CHECKPOINT}),
    ],
)  # fmt: skip
def test_it_is_logged_once_which_stages_run_backwards_whole_and_why(
    name: str, recompute: Any, why: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    make, batch = MODELS[name]
    engine = Engine(make(), 3, batch.clone(), 4, recompute=recompute)
    with caplog.at_level(logging.WARNING, "lightning_avgpipe.systems.zero_bubble"):
        for _ in range(2):
            engine.train(batch.clone(), "zb_h1")
    assert [record.args for record in caplog.records if "backwards whole" in record.message] == [*why.items()]


# -- idleness as the papers of the schedules have it for any durations -----------------------------------------------


SIZES = list(itertools.product(range(1, 6), range(1, 9)))  # K, M
SECONDS = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (1.0, 0.5, 1.0), (1.0, 1.0, 2.0), (1.0, 1.0, 0.0)]


def costs_of(num_stages: int, forward_s: float, input_s: float, weight_s: float) -> StageCosts:
    return halved(StageCosts.uniform(num_stages, forward_s, input_s + weight_s), (input_s,) * num_stages)


def idle_s(timeline: Timeline) -> list[float]:
    """Of each stage, from the begin of its first action to the end of its last."""
    spans = [[span for span in timeline.spans if span.stage == k] for k in range(timeline.num_stages)]
    return [
        max(s.end_s for s in of) - min(s.begin_s for s in of) - sum(s.end_s - s.begin_s for s in of) for of in spans
    ]


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (1.0, 2.0, 1.0)])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_stages_are_idle_for_as_long_as_the_papers_formulas_say(
    num_stages: int, seconds: tuple[float, float, float]
) -> None:
    """They hold where the weight half is not the longer one, for enough micro-batches."""
    f, i, w = seconds
    costs, num_microbatches = costs_of(num_stages, f, i, w), 3 * num_stages
    for name, each in {"1f1b": f + i + w, "zb_h1": f + i - w, "zb_h2": f + i - 2 * w}.items():
        timeline = simulate(build(name, num_stages, num_microbatches), costs)
        assert idle_s(timeline) == pytest.approx([(num_stages - 1 - k) * each for k in range(num_stages)]), name


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_every_size_is_complete_finishes_and_is_not_slower_than_1f1b(name: str) -> None:
    for k, m in SIZES:
        schedule, plain = build(name, k, m), build("1f1b", k, m)
        check(schedule)
        assert [len(row) for row in schedule] == [3 * m] * k
        for seconds in SECONDS:
            costs, least = costs_of(k, *seconds), m * sum(seconds) + (k - 1) * seconds[0]
            found = simulate(schedule, costs).iteration_s
            assert least - 1e-9 <= found <= simulate(plain, costs).iteration_s + 1e-9, (k, m, seconds)


def test_in_zbv_no_process_is_idle_between_its_first_action_and_its_last() -> None:
    for devices in (1, 2, 3, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            schedule = build("zbv", 2 * devices, num_microbatches)
            timeline = simulate(schedule, thirds(2 * devices))
            assert timeline.iteration_s == 6 * num_microbatches + devices - 1
            assert max(stashed(schedule)) <= 2 * devices  # of half the layers each: as the first stage of 1F1B


def test_in_zbv_messages_that_come_a_little_late_are_waited_for_at_the_ends_only() -> None:
    for devices in (2, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            late = replace(thirds(2 * devices), latency_s=(0.1,) * (2 * devices - 1))
            timeline = simulate(build("zbv", 2 * devices, num_microbatches), late)
            assert timeline.iteration_s == pytest.approx(6 * num_microbatches + 1.5 * (devices - 1))

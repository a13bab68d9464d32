"""Parameters that several stages use: a copy on each, one gradient, one entry in the optimizer."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.weights import tied
from tests import processes
from tests.comparing import assert_equal, assert_same_gradients, assert_same_parameters, state
from tests.driver import Engine, accumulate
from tests.models import Regression, TiedTransformer, loader
from tests.trainers import pipeline


class Recurrent(Regression):
    """One cell, called again and again, between an input and an output layer; a parameter outside of units."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.enter = nn.Linear(8, 8)
        self.cell = nn.GRUCell(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.leave = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = torch.zeros_like(x)
        for _ in range(4):
            h = self.cell(x, h) * self.scale
        return self.leave(h)


@pytest.mark.parametrize(("model", "num_stages"), [(TiedTransformer, 2), (TiedTransformer, 4), (Recurrent, 3)])
def test_gradients_are_those_of_the_plain_module_to_the_same_bit_with_every_schedule(
    model: type[Regression], num_stages: int
) -> None:
    torch.manual_seed(0)
    plain = model()
    modules = [copy.deepcopy(plain) for _ in range(3)]
    batch = model.example(7)
    losses = accumulate(plain, copy.deepcopy(batch), 3)
    for module, schedule in zip(modules, ("1f1b", "afab", "advance_forward"), strict=True):
        engine = Engine(module, num_stages, batch, 3)
        found = engine.train(copy.deepcopy(batch), schedule, advance=schedule == "advance_forward")
        assert_equal(found, losses)
        assert engine.plan.copied and "copied: " in str(engine.plan)
        assert_same_gradients(plain, module, summed=engine.plan.copied)
        assert_same_gradients(modules[0], module)
        # a parameter with copies is one object again
        assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert_same_parameters(plain, module)


@pytest.mark.parametrize("trained", [True, False])
def test_the_plan_says_whose_gradients_are_summed(trained: bool) -> None:
    model = TiedTransformer("adamw")
    for name in Engine(model, 2, model.example(4), 2).plan.copied:
        model.get_parameter(name).requires_grad_(trained)
    plan = str(Engine(model, 2, model.example(4), 2).plan)
    assert "copied: " in plan and ("; their gradients are summed" in plan) == trained


def fit(model: Regression, devices: int, num_stages: int, **options: Any) -> dict[str, Any]:
    runner = pipeline(num_stages, devices, {"num_microbatches": 3}, max_steps=3, **options)
    runner.fit(model, loader(type(model), 24, 6), loader(type(model), 6, 6, seed=1))
    optimizer = runner.optimizers[0]
    return {
        "weights": state(model),
        "optimized": sum(len(group["params"]) for group in optimizer.param_groups),
        "parameters": len(list(model.parameters())),
        "metrics": {key: value.item() for key, value in runner.callback_metrics.items()},
    }


class Drawn(Regression):
    """One matrix at both ends; random features in a buffer that nothing changes, a random order that no stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("features", torch.randn(8, 8))
        self.order = nn.Parameter(torch.randperm(64).float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x @ self.features)))


def fit_all(devices: int = 2) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    tied, recurrent = TiedTransformer("adamw"), Recurrent()
    return [fit(tied, devices, 2, gradient_clip_val=0.05), fit(recurrent, devices, 4, accumulate_grad_batches=2)]


def draw(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(5 + rank)
    drawn = Drawn()
    strategy = {"num_microbatches": 2, "split_points": ["between"]}
    pipeline(2, 2, strategy, max_epochs=1).fit(drawn, loader(Drawn, 16, 8))
    return state(drawn)


def roll(devices: int) -> dict[str, Tensor]:
    torch.manual_seed(6)
    model = TiedTransformer("adamw")
    strategy = {"num_pipelines": 2, "num_microbatches": 4, "averaging": Averaging(rolling=True)}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(TiedTransformer, 64, 8))
    return state(model)


def observed_roll() -> tuple[dict[str, Tensor], list[bool]]:
    """Train two rolling models in two processes; the weights, and whether something was done within each sum."""
    acted, within, as_written, perform = threading.Event(), [], tied.sum_in_order, Stage.perform

    def sum_in_order(*args: Any) -> Tensor:
        acted.clear()
        within.append(acted.wait(1.0))
        return as_written(*args)

    def performed(*args: Any) -> Any:
        acted.set()
        return perform(*args)

    with mock.patch.object(tied, "sum_in_order", sum_in_order), mock.patch.object(Stage, "perform", performed):
        return roll(2), within


in_two = processes.shared(2, lambda rank: (fit_all(), draw(rank), observed_roll()))


def test_two_processes_equal_one_bitwise(in_two: list[Any]) -> None:
    expected = fit_all(1)
    for rank, _, _ in in_two:
        for found, one in zip(rank, expected, strict=True):
            assert found["optimized"] == found["parameters"] == one["parameters"]
            assert found["metrics"] == one["metrics"]
            assert_equal(found["weights"], one["weights"])


def test_copies_and_buffers_begin_alike_though_each_process_draws_its_own(in_two: list[Any]) -> None:
    assert_equal(*(drawn for _, drawn, _ in in_two))


def test_a_rolling_pipeline_computes_while_gradients_of_another_are_summed(in_two: list[Any]) -> None:
    expected = roll(1)
    for _, _, (weights, within) in in_two:
        assert any(within)
        assert_equal(weights, expected)


def test_a_sparse_gradient_of_a_copied_parameter_is_refused() -> None:
    model = TiedTransformer("adamw")
    model.embed.sparse = True
    batch = model.example(4)
    with pytest.raises(AvgPipeError, match=r"gradient of 'embed\.weight' is sparse"):
        Engine(model, 2, batch, 2).train(batch)

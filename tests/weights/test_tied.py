"""Parameters that several stages use: a copy on each, one gradient, one entry in the optimizer."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.weights import tied
from tests import processes
from tests.averaging.models import assert_equal, state
from tests.driver import Engine, accumulate, assert_same_gradients, assert_same_parameters
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline


class TiedLanguageModel(Regression):
    """One matrix embeds the tokens and reads them out."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    @staticmethod
    def example(size: int) -> Any:
        return torch.randint(0, 11, (size, 5)), torch.randint(0, 11, (size, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class Recurrent(Regression):
    """One cell, called again and again, between an input and an output layer; a parameter outside of units."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.enter = nn.Linear(8, 8)
        self.cell = nn.GRUCell(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.leave = nn.Linear(8, 8)

    example = staticmethod(MLP.example)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = torch.zeros_like(x)
        for _ in range(4):
            h = self.cell(x, h) * self.scale
        return self.leave(h)


MODELS = [TiedLanguageModel, Recurrent]


@pytest.mark.parametrize(("model", "num_stages"), [(TiedLanguageModel, 2), (TiedLanguageModel, 4), (Recurrent, 3)])
def test_gradients_equal_those_of_the_plain_module(model: type[Regression], num_stages: int) -> None:
    torch.manual_seed(0)
    plain = model()
    piped = copy.deepcopy(plain)
    batch = model.example(7)
    losses = accumulate(plain, copy.deepcopy(batch), 3)
    engine = Engine(piped, num_stages, batch, 3)
    assert all(torch.equal(a, b) for a, b in zip(engine.train(copy.deepcopy(batch)), losses, strict=True))
    assert engine.plan.copied
    assert "copied: " in str(engine.plan)
    assert_same_gradients(plain, piped, summed=engine.plan.copied)
    assert_same_parameters(plain, piped)


@pytest.mark.parametrize("model", MODELS)
def test_the_schedule_does_not_change_a_bit(model: type[Regression]) -> None:
    torch.manual_seed(0)
    first = model()
    batch = model.example(8)
    others = [copy.deepcopy(first) for _ in range(2)]
    Engine(first, 3, batch, 4).train(batch, "afab")
    Engine(others[0], 3, batch, 4).train(batch, "1f1b")
    Engine(others[1], 3, batch, 4).train(batch, "advance_forward", advance=1)
    for other in others:
        assert_same_gradients(first, other)


def test_a_parameter_is_one_object_again_after_a_step() -> None:
    model = TiedLanguageModel()
    batch = model.example(4)
    Engine(model, 3, batch, 2).train(batch)
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters() if "weight" in name and "blocks" not in name] == [
        "embed.weight"
    ]


def fit(model: Regression, devices: int, num_stages: int, **options: Any) -> dict[str, Any]:
    runner = pipeline(num_stages, devices, {"num_microbatches": 3}, max_steps=3, **options)
    runner.fit(model, loader(type(model), 24, 6), loader(type(model), 6, 6, seed=1))
    optimizer = runner.optimizers[0]
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "optimized": sum(len(group["params"]) for group in optimizer.param_groups),
        "parameters": len(list(model.parameters())),
        "metrics": {key: value.item() for key, value in runner.callback_metrics.items()},
    }


class Drawn(Regression):
    """One matrix at both ends; random features in a buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("features", torch.randn(8, 8))

    example = staticmethod(MLP.example)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x @ self.features)))


def fit_all(rank: int, devices: int = 2) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    torch.manual_seed(5)
    tied, recurrent = TiedLanguageModel(), Recurrent()
    found = [fit(tied, devices, 2, gradient_clip_val=0.05), fit(recurrent, devices, 4, accumulate_grad_batches=2)]
    torch.manual_seed(5 + rank)
    drawn = Drawn()
    strategy = {"num_microbatches": 2, "split_points": ["between"]}
    pipeline(2, devices, strategy, max_epochs=1).fit(drawn, loader(Drawn, 16, 8))
    return found, state(drawn)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return processes.results(processes.run(2, fit_all, folder=tmp_path_factory.mktemp("two")))


def test_two_processes_equal_one_bitwise(in_two: list[Any]) -> None:
    expected, _ = fit_all(0, 1)
    for rank, _ in in_two:
        for found, one in zip(rank, expected, strict=True):
            assert found["optimized"] == found["parameters"] == one["parameters"]
            assert found["metrics"] == one["metrics"]
            assert_equal(found["weights"], one["weights"])


def test_copies_and_buffers_begin_alike_though_each_process_draws_its_own(in_two: list[Any]) -> None:
    (_, one), (_, other) = in_two
    assert_equal(one, other)


def test_a_sparse_gradient_of_a_copied_parameter_is_refused() -> None:
    model = TiedLanguageModel()
    model.embed.sparse = True
    batch = model.example(4)
    with pytest.raises(AvgPipeError, match=r"gradient of 'embed\.weight' is sparse"):
        Engine(model, 2, batch, 2).train(batch)


def rolls(rank: int) -> tuple[dict[str, Tensor], list[bool]]:
    """Train two rolling models in two processes; return the weights, and what happened within each sum."""
    torch.set_num_threads(1)
    acted, within, as_written, perform = threading.Event(), [], tied.sum_in_order, Stage.perform

    def sum_in_order(*args: Any) -> Tensor:
        acted.clear()
        within.append(acted.wait(1.0))
        return as_written(*args)

    def performed(*args: Any) -> Any:
        acted.set()
        return perform(*args)

    with mock.patch.object(tied, "sum_in_order", sum_in_order), mock.patch.object(Stage, "perform", performed):
        return rolled(2), within


def rolled(devices: int) -> dict[str, Tensor]:
    torch.manual_seed(6)
    model = TiedLanguageModel()
    strategy = {"num_pipelines": 2, "num_microbatches": 4, "averaging": Averaging(rolling=True)}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(TiedLanguageModel, 64, 8))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_rolling_pipeline_computes_while_gradients_of_another_are_summed(tmp_path: Path) -> None:
    expected = rolled(1)
    for weights, within in processes.results(processes.run(2, rolls, folder=tmp_path)):
        assert any(within)
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name

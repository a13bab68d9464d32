"""Parameters that several stages use: a copy on each, one gradient, one entry in the optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.errors import AvgPipeError
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


def begun_apart(rank: int) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(5 + rank)
    drawn = Drawn()
    strategy = {"num_microbatches": 2, "split_points": ["between"]}
    runner = pipeline(2, 2, strategy, max_epochs=1)
    runner.fit(drawn, loader(Drawn, 16, 8))
    return state(drawn), len(runner.optimizers[0].param_groups[0]["params"])


def test_copies_and_buffers_begin_alike_and_the_optimizer_has_one_entry(tmp_path: Path) -> None:
    (one, count), (other, same) = processes.results(processes.run(2, begun_apart, folder=tmp_path))
    assert_equal(one, other)
    assert count == same == len(list(Drawn().parameters()))


def test_a_sparse_gradient_of_a_copied_parameter_is_refused() -> None:
    model = TiedLanguageModel()
    model.embed.sparse = True
    batch = model.example(4)
    with pytest.raises(AvgPipeError, match=r"gradient of 'embed\.weight' is sparse"):
        Engine(model, 2, batch, 2).train(batch)

"""What is drawn depends on seed, iteration, micro-batch and the drawing module only."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.driver import Engine
from tests.models import MLP, Regression
from tests.trainers import pipeline


class Block(nn.Module):
    """Draws in its own code, in a function of its own code that sees the input, and in two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        x = self.drop(x) + torch.randn(8) * 0.1
        x = self.inner(self.second(x).tanh())
        return F.dropout(x, 0.1, self.training) + self.drop(x)


class Drawing(Regression):
    """Blocks, draws in the step's own code before and between them, and one block that is called twice."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    example = staticmethod(MLP.example)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * 0.01
        for block in self.blocks:
            x = block(F.dropout(x, 0.05, self.training))
        return self.blocks[0](x) * (1 + random.random())


def test_each_call_and_each_micro_batch_draws_anew() -> None:
    seen: list[Tensor] = []

    class Seen(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            masks = self.blocks[0].drop(torch.ones(64)), self.blocks[0].drop(torch.ones(64))
            seen.extend(mask.detach() for mask in masks)
            return super().forward(x)

    model = Seen()
    batch = model.example(4)
    engine = Engine(model, 1, batch, 2)
    seen.clear()
    engine.train(batch)
    engine.train(batch, iteration=1)
    assert len(seen) == 8
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_the_streams_of_the_user_go_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = Drawing()
    states = torch.get_rng_state(), random.getstate()
    batch = torch.ones(4, 8), torch.ones(4, 8)
    Engine(model, 2, batch, 2).train(batch)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_parallel_models_draw_different_numbers() -> None:
    class Seeing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.drop(self.first(x)))

    module, masks = Seeing(), []
    module.drop.register_forward_hook(lambda layer, args, output: masks.append(output.detach() != 0))
    running = pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 2, "split_points": ["last"]}, max_epochs=1)
    running.fit(module, DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 8)), batch_size=8))
    drawn = masks[-4:]  # of two micro-batches in each of two models; before that the step was followed
    assert len({mask.shape for mask in drawn}) == 1
    for i, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[i + 1 :])

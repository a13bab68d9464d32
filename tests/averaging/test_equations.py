"""Training with parallel models is what the equations say, written down once more without any pipeline."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_avgpipe import Averaging
from tests.averaging.models import Batches, train
from tests.models import MLP, loader


class Pairs(MLP):
    """A batch is a dict of the batches of two dataloaders."""

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, dict):
            return super().loss(batch)
        return super().loss(batch["one"]) + 0.5 * super().loss(batch["other"])


class Equations:
    """N models, their optimizers and their reference."""

    def __init__(self, module: MLP, num_pipelines: int, average_every: int = 1) -> None:
        self.models = [copy.deepcopy(module) for _ in range(num_pipelines)]
        self.optimizers: list[Any] = [model.configure_optimizers() for model in self.models]
        self.reference = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.average_every = average_every
        self.steps = self.waiting = self.active = 0

    def epoch(self, batches: Sequence[Any], accumulate: int, clip: float | None) -> None:
        n = len(self.models)
        groups = [batches[i : i + n] for i in range(0, len(batches), n)]
        fed = 0
        for i, group in enumerate(groups, 1):
            for model, batch in zip(self.models, group, strict=False):
                (model.loss(batch) / accumulate).backward()
            fed = max(fed, len(group))
            if i % accumulate == 0 or i == len(groups):
                self.step(fed, clip)
                fed = 0

    def step(self, fed: int, clip: float | None) -> None:
        for model, optimizer in list(zip(self.models, self.optimizers, strict=True))[:fed]:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        for model in self.models:
            model.zero_grad()
        self.steps += 1
        self.waiting += 1
        self.active = max(self.active, fed)
        if self.waiting == self.average_every:
            self.average()
            self.waiting = self.active = 0

    @torch.no_grad()
    def average(self) -> None:
        n = len(self.models)
        alpha, outer_lr = 1 / n, math.sqrt(n)
        for name, z in self.reference.items():
            models = [model.get_parameter(name) for model in self.models]
            mean = torch.stack([y.detach() for y in models]).mean(0)
            moved = z + outer_lr * n / self.active * (mean - z)
            for y in models:
                y.copy_(moved + (1 - alpha) * (y - mean))
            self.reference[name] = moved


class Endless(IterableDataset[Any]):
    """Does not know its length."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def of(samples: int) -> list[Any]:
    return list(loader(MLP, samples, 8))


def pairs() -> Any:
    return {"one": loader(MLP, 56, 8), "other": loader(MLP, 24, 8, seed=1)}


Data = Callable[[], Any]
EVEN: tuple[Data, Data] = (lambda: Batches(of(96)), lambda: of(96))
RAGGED: tuple[Data, Data] = (lambda: Batches(of(85)), lambda: of(85))  # eleven batches, the last one of five samples
UNSIZED: tuple[Data, Data] = (lambda: DataLoader(Endless(of(88)), batch_size=None), lambda: of(88))
COMBINED: tuple[Data, Data] = (pairs, lambda: [batch for batch, _, _ in CombinedLoader(pairs(), "max_size_cycle")])


@pytest.mark.parametrize(
    ("data", "options", "num_pipelines"),
    [
        (EVEN, {}, 2),
        (RAGGED, {"epochs": 2}, 3),
        (RAGGED, {"accumulate": 3, "clip": 0.05}, 2),
        (RAGGED, {"every": 3, "epochs": 2}, 3),
        (UNSIZED, {"accumulate": 4, "every": 2, "epochs": 2}, 2),
        (COMBINED, {"clip": 0.05}, 3),
    ],
)
def test_models_and_reference_are_those_of_the_equations(
    data: tuple[Data, Data], options: dict[str, Any], num_pipelines: int
) -> None:
    torch.manual_seed(3)
    module = Pairs().double()
    accumulate, clip, epochs = (options.get(name, default) for name, default in
                                (("accumulate", 1), ("clip", None), ("epochs", 1)))  # fmt: skip
    expected = Equations(module, num_pipelines, options.get("every", 1))
    batches = [doubled(batch) for batch in data[1]()]
    for _ in range(epochs):
        expected.epoch(batches, accumulate, clip)
    found = train(
        module,
        data[0](),
        num_stages=2,
        num_pipelines=num_pipelines,
        averaging=Averaging(every=options.get("every", 1)),
        trainer={
            "precision": "64-true",
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": clip,
            "max_epochs": epochs,
        },
    )
    assert found.trainer.global_step == expected.steps
    for name, tensor in expected.reference.items():
        torch.testing.assert_close(found.reference[name], tensor, rtol=0, atol=1e-12)
        for model, other in zip(found.models, expected.models, strict=True):
            torch.testing.assert_close(model[name], other.get_parameter(name).detach(), rtol=0, atol=1e-12)


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: doubled(part) for name, part in batch.items()}
    return tuple(tensor.double() for tensor in batch)

"""Training with parallel models is what the equations say, written down once more without any pipeline."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import Averaging
from tests.averaging.models import Batches, Unsized, train
from tests.models import MLP, loader


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


def of(samples: int) -> list[Any]:
    return list(loader(MLP, samples, 8))


@pytest.mark.parametrize(
    ("samples", "options", "num_pipelines"),
    [
        (96, {}, 2),
        (85, {"epochs": 2}, 3),  # eleven batches, the last one of five samples
        (85, {"accumulate": 3, "clip": 0.05}, 2),
        (85, {"every": 3, "epochs": 2}, 3),
        (88, {"accumulate": 4, "every": 2, "epochs": 2, "unsized": True}, 2),
    ],
)
def test_models_and_reference_are_those_of_the_equations(
    samples: int, options: dict[str, Any], num_pipelines: int
) -> None:
    torch.manual_seed(3)
    module = MLP().double()
    accumulate, clip, epochs = (options.get(name, default) for name, default in
                                (("accumulate", 1), ("clip", None), ("epochs", 1)))  # fmt: skip
    expected = Equations(module, num_pipelines, options.get("every", 1))
    batches = [doubled(batch) for batch in of(samples)]
    data = DataLoader(Unsized(of(samples)), batch_size=None) if "unsized" in options else Batches(of(samples))
    for _ in range(epochs):
        expected.epoch(batches, accumulate, clip)
    found = train(
        module,
        data,
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
    return tuple(tensor.double() for tensor in batch)

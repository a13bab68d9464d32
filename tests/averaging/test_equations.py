"""Training with parallel models is what the equations say, written down once more without any pipeline.

They meet after each step, or rarely, late and a fragment at a time: elastic averaging, local SGD, (streaming) DiLoCo.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_avgpipe import Averaging
from tests.averaging.models import Batches, Unsized, train
from tests.comparing import assert_close
from tests.models import MLP, loader

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class ByHand:
    """N models in one process, whose fragments are sent after a step and averaged some steps later."""

    def __init__(self, module: L.LightningModule, count: int, averaging: Averaging) -> None:
        self.models = [copy.deepcopy(module) for _ in range(count)]
        self.optimizers: list[Any] = [model.configure_optimizers() for model in self.models]
        self.reference = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.alpha = 1 / count if averaging.alpha is None else averaging.alpha
        self.outer_lr = math.sqrt(count) if averaging.outer_lr == "auto" else averaging.outer_lr
        make = averaging.outer_optimizer
        self.outer = None if make is None else make(list(self.reference.values()))
        self.every, self.delay = averaging.every, averaging.delay
        self.fragments: list[list[str]] = [[] for _ in range(averaging.fragments)]
        for name in self.reference:
            sizes = [sum(self.reference[n].numel() for n in names) for names in self.fragments]
            self.fragments[sizes.index(min(sizes))].append(name)
        self.steps = 0
        self.active = [0] * averaging.fragments  # models that had a batch since the fragment was sent
        self.under_way: list[tuple[int, int, list[str], list[dict[str, Tensor]]]] = []

    def epoch(self, batches: Sequence[Any], accumulate: int = 1, clip: float | None = None) -> None:
        n = len(self.models)
        bundles = [batches[i : i + n] for i in range(0, len(batches), n)]
        fed = 0
        for i, bundle in enumerate(bundles, 1):
            for model, batch in zip(self.models, bundle, strict=False):
                (model.loss(batch) / accumulate).backward()
            fed = max(fed, len(bundle))
            if i % accumulate == 0 or i == len(bundles):
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
        self.active = [max(before, fed) for before in self.active]
        for i in range(len(self.fragments)):
            if self.steps % self.every == self.every * (i + 1) // len(self.fragments) % self.every:
                self.send(i, self.delay)
        self.arrive()

    def send(self, i: int, delay: int) -> None:
        names = self.fragments[i]
        sent = [{name: model.get_parameter(name).detach().clone() for name in names} for model in self.models]
        self.under_way.append((self.steps + delay, self.active[i], names, sent))
        self.active[i] = 0

    @torch.no_grad()
    def arrive(self) -> None:
        while self.under_way and self.under_way[0][0] <= self.steps:
            _, active, names, sent = self.under_way.pop(0)
            means = {name: torch.stack([y[name] for y in sent]).mean(0) for name in names}
            for name in names:
                self.reference[name].grad = (self.reference[name] - means[name]) * len(sent) / active
            if self.outer is not None:
                self.outer.step()
            for name in names:
                z, gradient = self.reference[name], self.reference[name].grad
                if self.outer is None:
                    z -= self.outer_lr * gradient
                z.grad = None
                for y, model in zip(sent, self.models, strict=True):
                    since = model.get_parameter(name) - y[name]
                    model.get_parameter(name).copy_(z + (1 - self.alpha) * (y[name] - means[name]) + since)

    def end(self) -> None:
        """All that has not been averaged is averaged."""
        self.under_way = [(self.steps, *rest) for _, *rest in self.under_way]
        self.arrive()
        for i, active in enumerate(self.active):
            if active:
                self.send(i, 0)
                self.arrive()


def of(samples: int) -> list[Any]:
    return list(loader(MLP, samples, 8))


def doubled(batch: Any) -> Any:
    return tuple(tensor.double() for tensor in batch)


DILOCO = {"alpha": 1.0, "every": 4, "outer_optimizer": NESTEROV}


@pytest.mark.parametrize(
    ("samples", "count", "averaging", "options"),
    [
        pytest.param(96, 2, {}, {}, id="after each step"),
        # eleven batches, the last one of five samples
        pytest.param(85, 3, {}, {"max_epochs": 2}, id="a ragged end"),
        pytest.param(85, 2, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, id="accumulated"),
        pytest.param(85, 3, {"every": 3}, {"max_epochs": 2}, id="rarely"),
        pytest.param(
            88, 2, {"every": 2}, {"accumulate_grad_batches": 4, "max_epochs": 2, "unsized": True}, id="a stream"
        ),
        # eleven steps of two models, so training ends between meetings
        pytest.param(176, 2, {"alpha": 1.0, "every": 3, "outer_lr": 1.0}, {}, id="local SGD"),
        pytest.param(176, 2, {"alpha": 1.0, "every": 3, "outer_lr": 1.0, "fragments": 3, "delay": 2}, {}, id="late"),
        pytest.param(176, 2, DILOCO, {}, id="DiLoCo"),
        pytest.param(176, 2, {**DILOCO, "delay": 3}, {"gradient_clip_val": 0.05}, id="late DiLoCo"),
        pytest.param(176, 2, {**DILOCO, "fragments": 3}, {}, id="streaming DiLoCo"),
        pytest.param(176, 2, {**DILOCO, "fragments": 2, "delay": 1}, {}, id="late streaming DiLoCo"),
        pytest.param(
            176, 2, {**DILOCO, "alpha": 0.3, "every": 5, "fragments": 4, "delay": 3}, {}, id="streaming, elastic"
        ),
    ],
)
def test_models_and_reference_are_those_of_the_equations(
    samples: int, count: int, averaging: dict[str, Any], options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    module, options = MLP().double(), dict(options)
    expected = ByHand(module, count, Averaging(**averaging))
    data = DataLoader(Unsized(of(samples)), batch_size=None) if options.pop("unsized", False) else Batches(of(samples))
    for _ in range(options.get("max_epochs", 1)):
        expected.epoch(
            [doubled(batch) for batch in of(samples)],
            options.get("accumulate_grad_batches", 1),
            options.get("gradient_clip_val"),
        )
    found = train(
        module, data, num_stages=2, num_pipelines=count, averaging=Averaging(**averaging),
        trainer={"precision": "64-true", **options},
    )  # fmt: skip
    assert found.trainer.global_step == expected.steps
    plain = [*map(parameters, expected.models), expected.reference]
    assert_close([*found.models, found.reference], plain, rtol=0, atol=1e-12)
    expected.end()
    assert_close(parameters(module), expected.reference, rtol=0, atol=1e-12)


def parameters(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}

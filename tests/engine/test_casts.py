"""Casts of weights: once in an iteration, and gradients as with a cast for each micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.comparing import assert_same_gradients
from tests.driver import Engine, accumulate
from tests.models import MLP
from tests.trainers import both, loaders

WIDTH, NUM_MICROBATCHES = 8, 4


class Layers(nn.Module):
    """Layers in mixed precision, as Lightning sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def through(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with MixedPrecision("bf16-mixed", "cpu").forward_context():
            return self.through(batch).float().square().mean()


class Limited(nn.Module):
    """Some micro-batches change its weight, and not the one that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().sum() > 100:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return self.layer(x)


class Mapped(nn.Module):
    """A transform of torch.func calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.layer)(x)


class Within(Layers):
    """A layer is within another module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.a = layer


class Counted(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == (WIDTH, WIDTH):
            self.casts += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.fixture
def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3 * NUM_MICROBATCHES, WIDTH)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("afab", True), ("zb_h1", False)])
def test_gradients_are_those_of_a_cast_for_each_micro_batch(schedule: str, recompute: bool, batch: Tensor) -> None:
    module = Layers()
    plain = copy.deepcopy(module)
    accumulate(plain, batch, NUM_MICROBATCHES)
    Engine(module, 2, batch, NUM_MICROBATCHES, recompute=recompute).train(batch, schedule)
    assert_same_gradients(module, plain)


def test_a_weight_is_cast_once_in_an_iteration_and_again_in_the_next(batch: Tensor) -> None:
    engine = Engine(Layers(), 2, batch, NUM_MICROBATCHES)
    for iteration in range(2):
        with Counted() as counted:
            engine.train(batch, iteration=iteration)
        assert counted.casts == 3


class Clipped(MLP):
    """Clips its weights where gradients are cleared, in a way that no version shows."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.6, 0.6)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("static", ["auto", True])
def test_weights_that_a_hook_changes_between_micro_batches_are_cast_as_ever(static: Any) -> None:
    strategy = {"verify": False, "static_step": static}
    both(Clipped, loaders(Clipped, 16), precision="bf16-mixed", max_epochs=1, strategy=strategy)


@pytest.mark.parametrize("layer", [Limited, Mapped])
def test_weights_that_change_meanwhile_and_layers_under_transforms_are_cast_as_ever(layer: Any, batch: Tensor) -> None:
    batch[6] = 99.0
    module = Within(layer())
    plain, engine = copy.deepcopy(module), Engine(module, 2, batch, NUM_MICROBATCHES)
    accumulate(plain, batch, NUM_MICROBATCHES)
    engine.train(batch)
    assert_same_gradients(module, plain)
    assert layer is Mapped or torch.equal(module.a.layer.weight, plain.a.layer.weight)

"""Generators of random numbers of the model's own: stages draw what one process draws, or it is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import PartitionError, StepChangedError
from tests.zoo.comparison import alone, apart, assert_same, check, in_one_process, planned

GLOBAL = random.Random(5)


def number(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    if isinstance(generator, np.random.BitGenerator):
        return float(np.random.Generator(generator).random())
    return float(generator.random())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, generator: Any = None) -> Tensor:
        x = (x @ self.weight).tanh()
        return x if generator is None else x * (1 + number(generator))


class OfGlobal(Layer):
    def forward(self, x: Tensor, generator: Any = None) -> Tensor:
        return super().forward(x, None if generator is None else GLOBAL)


class Augmentation(nn.Module):
    """Without parameters, so every stage runs it where it depends on the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.calls = torch.Generator().manual_seed(4), 0

    def forward(self, x: Tensor, draws: bool = True) -> Tensor:
        self.calls += 1
        return x + self.calls + torch.randn(x.shape, generator=self.generator) if draws else x


class Model(L.LightningModule):
    """Batches say whether they are late ones; ``given`` says what a layer is given to draw from."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(self.layer() for _ in range(5))
        self.generator: Any = torch.Generator().manual_seed(2)

    def given(self, n: int, late: bool) -> Any:
        return None

    def forward(self, x: Tensor, late: bool) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x, self.given(n, late))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, late = batch
        return self(x, bool(late)).square().mean()

    validation_step = training_step


class Noisy(Model):
    def noisy(self, x: Tensor) -> Tensor:
        return x * (1 + number(self.generator))


# -- right ---------------------------------------------------------------------------------------------------------


class OneMadeByTheStep(Model):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        made = torch.Generator().manual_seed(int(x.abs().sum()))
        for layer in self.layers:
            x = layer(x, made)
        return x * number(made)


class SeededByTheStep(Noisy):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        self.generator.manual_seed(5 + late)
        for layer in self.layers:
            x = self.noisy(layer(x))
        return self.noisy(x) if late else x


class SeededForALayer(Model):
    def given(self, n: int, late: bool) -> Any:
        if n == 0:
            self.generator.manual_seed(5 + late)
        return self.generator if n in (2, 3) else None


class InFront(Noisy):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        return super().forward(self.noisy(x), late)


class Augmented(Model):
    def __init__(self) -> None:
        super().__init__()
        self.augmentation = Augmentation()

    def forward(self, x: Tensor, late: bool) -> Tensor:
        return super().forward(self.augmentation(x), late)


class OneLayerLate(Model):
    def given(self, n: int, late: bool) -> Any:
        return self.generator if n == 1 and late else None

    def forward(self, x: Tensor, late: bool) -> Tensor:
        self.layers[1](x, self.generator)
        return super().forward(x, late)


class InTheBatch(Model):
    """The batch has a generator for each micro-batch, from which layers and code between them draw."""

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        x, late = batch
        return [(part, late, torch.Generator().manual_seed(i)) for i, part in enumerate(x.tensor_split(count))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _, generator = batch
        for n, layer in enumerate(self.layers):
            x = layer(x * number(generator), generator if n > 2 else None)
        return x.square().mean()

    validation_step = training_step


RIGHT = [OneMadeByTheStep, SeededByTheStep, SeededForALayer, InFront, Augmented, OneLayerLate, InTheBatch]


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), torch.tensor(late)) for late in (False, False, True, True)]


@pytest.mark.parametrize("model", RIGHT)
def test_stages_draw_what_one_process_draws(model: type[Model]) -> None:
    check(model(), batches(), 2)


# -- refused when it happens ---------------------------------------------------------------------------------------


class AllLate(Model):
    def given(self, n: int, late: bool) -> Any:
        return self.generator if late else None


class OfGlobalLate(AllLate):
    layer = OfGlobal


class MadeLate(Model):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        made = random.Random(3) if late else None
        for layer in self.layers:
            x = layer(x, made)
        return x


class InFrontLate(Noisy):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        return super().forward(self.noisy(x) if late else x, late)


class InFrontThenLayerLate(InFront):
    def given(self, n: int, late: bool) -> Any:
        return self.generator if n == 4 and late else None


class AugmentedLate(Augmented):
    def forward(self, x: Tensor, late: bool) -> Tensor:
        return Model.forward(self, self.augmentation(x, late), late)


REFUSED = {
    AllLate: r"'generator' in unit 'layers.0'",
    OfGlobalLate: r"'global .*GLOBAL' in unit 'layers.0' .* \('layers.1'",
    MadeLate: "a generator that the step makes",
    InFrontLate: r"'generator' between submodules",
    InFrontThenLayerLate: r"'generator' in unit 'layers.4'",
    AugmentedLate: r"'augmentation.generator' between submodules",
}


@pytest.mark.parametrize("model", REFUSED)
@pytest.mark.parametrize("pipeline", [in_one_process, apart])
def test_what_stages_would_draw_each_for_itself_is_refused_by_name(
    model: type[Model], pipeline: Callable[..., Any]
) -> None:
    module = model()
    plan, validation = planned(module, 2, 2, batches()[0], None)
    expected = alone(module, 2, batches()[:2])
    if model is not OfGlobalLate:
        assert_same(expected, pipeline(module, plan, validation, 2, batches()[:2]))
    with pytest.raises(StepChangedError, match=f"draws random numbers from {REFUSED[model]}"):
        pipeline(module, plan, validation, 2, batches())


# -- refused before training ---------------------------------------------------------------------------------------


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = None

    def given(self, n: int, late: bool) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return self.generator


class KeptNumber(Noisy):
    """A layer draws, and a number that is drawn behind it is used at the end."""

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.layers[0](x, self.generator)
        drawn = number(self.generator)
        for layer in self.layers[1:]:
            x = layer(x)
        return x * drawn


@pytest.mark.parametrize(
    ("model", "message"),
    [(Lazy, "the step makes 'generator', .* once"), (KeptNumber, "'layers.0'.* and code between units draw from one")],
)
def test_what_no_cut_suits_is_refused_before_training(model: type[Model], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        planned(model(), 2, 2, batches()[0], None)

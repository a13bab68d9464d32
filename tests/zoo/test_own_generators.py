"""Generators of random numbers of the model's own: stages draw what one process draws, or it is refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import AvgPipeError, PartitionError, StepChangedError
from tests import processes
from tests.zoo.comparison import check, check_in_two_processes, in_stages

GLOBAL = random.Random(5)
Step = Callable[[Any, Tensor, bool], Tensor]


def number(generator: Any) -> float:
    return float(torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random())


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
    """Five layers; a test says what the step does with them. Batches say whether they are late ones."""

    def __init__(self, step: Step, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.step = step
        self.layers = nn.ModuleList(layer() for _ in range(5))
        self.generator: Any = torch.Generator().manual_seed(2)
        self.augmentation = Augmentation()
        self.lazy: Any = None

    def through(self, x: Tensor, given: Mapping[int, Any] | None = None) -> Tensor:
        """The layers, some of which are given a generator to draw from."""
        for n, layer in enumerate(self.layers):
            x = layer(x, (given or {}).get(n))
        return x

    def noisy(self, x: Tensor) -> Tensor:
        return x * (1 + number(self.generator))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, late = batch
        return self.step(self, x, bool(late)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def to_all(generator: Any) -> dict[int, Any]:
    return dict.fromkeys(range(5), generator)


def made(model: Callable[[], Model]) -> tuple[Model, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 4, generator=generator), torch.tensor(late)) for late in (False, False, True, True)]
    return model(), batches


# -- right ---------------------------------------------------------------------------------------------------------


def one_made_by_the_step(net: Any, x: Tensor, late: bool) -> Tensor:
    generator = torch.Generator().manual_seed(int(x.abs().sum()))
    return net.through(x, to_all(generator)) * number(generator)


def seeded_by_the_step(net: Any, x: Tensor, late: bool) -> Tensor:
    net.generator.manual_seed(5 + late)
    for layer in net.layers:
        x = net.noisy(layer(x))
    return net.noisy(x) if late else x


def seeded_for_a_layer(net: Any, x: Tensor, late: bool) -> Tensor:
    net.generator.manual_seed(5 + late)
    return net.through(x, {2: net.generator, 3: net.generator})


def in_front(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(net.noisy(x))


def augmented(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(net.augmentation(x))


def one_layer_late(net: Any, x: Tensor, late: bool) -> Tensor:
    net.layers[1](x, net.generator)
    return net.through(x, {1: net.generator} if late else None)


class InTheBatch(Model):
    """The batch has a generator for each micro-batch, from which layers and code between them draw."""

    def __init__(self) -> None:
        super().__init__(in_front)

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        x, late = batch
        return [(part, late, torch.Generator().manual_seed(i)) for i, part in enumerate(x.tensor_split(count))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _, generator = batch
        for n, layer in enumerate(self.layers):
            x = layer(x * number(generator), generator if n > 2 else None)
        return x.square().mean()


STEPS = (one_made_by_the_step, seeded_by_the_step, seeded_for_a_layer, in_front, augmented, one_layer_late)
RIGHT: dict[str, Callable[[], Model]] = {
    **{step.__name__: partial(Model, step) for step in STEPS},
    "in_the_batch": InTheBatch,
}


@pytest.mark.parametrize("name", RIGHT)
def test_stages_draw_what_one_process_draws(name: str) -> None:
    check(partial(made, RIGHT[name]), 2)


def test_stages_of_two_processes_draw_what_one_draws(tmp_path: Path) -> None:
    check_in_two_processes({name: partial(made, model) for name, model in RIGHT.items()}, 2, tmp_path)


# -- refused -------------------------------------------------------------------------------------------------------


def all_late(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(x, to_all(net.generator) if late else None)


def made_late(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(x, to_all(random.Random(3)) if late else None)


def in_front_late(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(net.noisy(x) if late else x)


def in_front_then_layer_late(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(net.noisy(x), {4: net.generator} if late else None)


def augmented_late(net: Any, x: Tensor, late: bool) -> Tensor:
    return net.through(net.augmentation(x, late))


REFUSED: dict[Callable[[], Model], str] = {
    partial(Model, all_late): r"'generator' in unit 'layers.0'",
    partial(Model, all_late, OfGlobal): r"'global .*GLOBAL' in unit 'layers.0' .* \('layers.1'",
    partial(Model, made_late): "a generator that the step makes",
    partial(Model, in_front_late): r"'generator' between submodules",
    partial(Model, in_front_then_layer_late): r"'generator' in unit 'layers.4'",
    partial(Model, augmented_late): r"'augmentation.generator' between submodules",
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_stages_would_begin_to_draw_each_for_itself_is_refused_by_name(model: Callable[[], Model]) -> None:
    with pytest.raises(StepChangedError, match=f"draws random numbers from {REFUSED[model]}"):
        in_stages(partial(made, model), 2)


def refusals() -> list[str]:
    said = []
    for model in REFUSED:
        with pytest.raises(AvgPipeError) as caught:
            in_stages(partial(made, model), 2, 2)
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_two_processes_refuse_it_too(tmp_path: Path) -> None:
    for texts in processes.everywhere(2, refusals, folder=tmp_path):
        for text, named in zip(texts, REFUSED.values(), strict=True):
            assert re.search(f"draws random numbers from {named}", text), text


def lazy(net: Any, x: Tensor, late: bool) -> Tensor:
    if net.lazy is None:
        net.lazy = torch.Generator().manual_seed(3)
    return net.through(x, to_all(net.lazy))


def kept_number(net: Any, x: Tensor, late: bool) -> Tensor:
    """A layer draws, and a number that is drawn behind it is used at the end."""
    x = net.layers[0](x, net.generator)
    drawn = number(net.generator)
    for layer in net.layers[1:]:
        x = layer(x)
    return x * drawn


@pytest.mark.parametrize(
    ("step", "message"),
    [(lazy, "the step makes 'lazy', .* once"), (kept_number, "'layers.0'.* and code between units draw from one")],
)
def test_what_no_cut_suits_is_refused_before_training(step: Step, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        in_stages(partial(made, partial(Model, step)), 2)

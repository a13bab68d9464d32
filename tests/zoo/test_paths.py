"""A step may do other things with other micro-batches, as long as its units come in the order of the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.errors import AbsentValueError, StepChangedError
from tests.driver import Engine
from tests.zoo.comparison import check
from tests.zoo.own_models import WIDTH, Own

SIZES = (4, 9, 8, 3)  # of batches: the first is captured


class Path(Own):
    """Six layers; ``is_other`` says what a micro-batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    @staticmethod
    def is_other(x: Tensor) -> bool:
        return len(x) > 2

    def forward(self, x: Tensor) -> Tensor:
        other = self.is_other(x)
        for number, layer in enumerate(self.layers):
            x = self.step(number, layer, x, other)
        return x

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        raise NotImplementedError


class MoreGlue(Path):
    """As attention that repeats its heads only where there is a mask."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        x = layer(x)
        if other:
            x = (x[:, None].expand(-1, 2, -1).reshape(-1, WIDTH) * 0.5)[: len(x)]
        return F.gelu(x)


class DropsLayers(Path):
    """Residual layers of which some are left out."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return x if other and number % 2 else x + torch.tanh(layer(x))


class Ends(Path):
    """Small micro-batches end early, and log what they come to."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2] if self.is_other(x) else self.layers:
            x = F.gelu(layer(x))
            self.log("mean", x.mean())
        return x


class InPlace(Path):
    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        y = layer(x)
        if other:
            y.mul_(0.5).add_(x)
        return torch.tanh(y)


class LongSkip(Path):
    """What the first layer gives is needed at the end, on both paths."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        y = F.gelu(first)
        for layer in self.layers[1:]:
            y = layer(y * 2 if self.is_other(x) else y)
        return y + first


class TakesValues(Path):
    """The path depends on what a layer gives."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        x = layer(x)
        return torch.relu(x) + 1 if bool(x.detach().sum() > 0) else x


class Adds(Path):
    """Runs a layer that the first micro-batch leaves out."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return x + torch.tanh(layer(x)) if other or number not in (1, 4) else x


class Alternatives(Path):
    """An encoder, adapters and a head for each kind of batch, as of several tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders, self.heads = (nn.ModuleDict({k: nn.Linear(WIDTH, WIDTH) for k in "ab"}) for _ in range(2))
        self.adapters = nn.ModuleList(nn.ModuleDict({kind: Adapter() for kind in "ab"}) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kind = "b" if self.is_other(x) else "a"
        x = self.encoders[kind](x)
        for layer, adapters in zip(self.layers, self.adapters, strict=True):
            x = adapters[kind](F.gelu(layer(x)))
        return self.heads[kind](x)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.relu(self.down(x)))


class Prompts(Path):
    """A learned tensor for each kind of batch, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + self.prompts[int(self.is_other(x))]
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class Differentiates(Path):
    """Asks for derivatives of what the last stage computes by itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        y = self.layers[-1](x)
        if self.training and self.is_other(x):
            z = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(torch.tanh(z).square().sum(), z)
            return y + gradient
        return y


MODELS = (Adds, Alternatives, MoreGlue, DropsLayers, Ends, InPlace, LongSkip, TakesValues, Prompts, Differentiates)


def batches() -> list[Any]:
    torch.manual_seed(1)
    return [Own.example(size, 0) for size in SIZES]


@pytest.mark.parametrize("num_stages", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_another_path_gives_the_numbers_of_one_process(model: type[Path], num_stages: int) -> None:
    check(model(), batches(), num_stages)


def engine(model: Path, **options: Any) -> Engine:
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return Engine(model, 2, Own.example(4, 0), split_points=["layers.3"], **options)


@pytest.mark.parametrize("recompute", [True, ["layers.*"]])
def test_another_path_is_repeated_in_the_backward(recompute: Any) -> None:
    gradients = []
    for repeats in (False, recompute):
        torch.manual_seed(0)
        model = LongSkip()
        running = engine(model, recompute=repeats)
        for batch in batches():
            running.train(batch)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is None or torch.equal(gradient, gradients[1][name]), name


def test_a_value_that_only_the_other_path_needs_is_named() -> None:
    class Needs(Path):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            y = first
            for layer in self.layers[1:]:
                y = layer(y)
            return y + first if self.is_other(x) else y

    with pytest.raises(AbsentValueError, match=r"needs the value of 'layers\.0'") as caught:
        engine(Needs()).train(Own.example(9, 0))
    assert any("does something else than with the first one" in note for note in caught.value.__notes__)


class OtherEncoder(Path):
    """Some batches come in by a layer of their own, which no stage owns and each would train for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x) if self.is_other(x) else self.layers[0](x)
        for layer in self.layers[1:]:
            x = F.gelu(layer(x))
        return x


class OtherParameter(Path):
    """Some batches use a parameter of their own in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + (self.other if self.is_other(x) else self.one)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class LooksAtGradient(Path):
    """Wants the gradient of an early value, for some batches; it reaches the last stage by two ways."""

    def loss(self, batch: Any) -> Tensor:
        first = self.layers[0](batch[0])
        x = first
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x = x + first
        return x.square().mean() + (self.derived(x, first) if self.is_other(first) else 0.0)

    def derived(self, x: Tensor, first: Tensor) -> Any:
        first.register_hook(lambda gradient: gradient * 0.1)
        return 0.0


class Penalty(LooksAtGradient):
    def derived(self, x: Tensor, first: Tensor) -> Any:
        (gradient,) = torch.autograd.grad(x.sum(), first, create_graph=True)
        return gradient.square().mean()


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor, keeps: bool = False) -> Tensor:
        if keeps:
            self.kept.lerp_(x.detach().mean(0), 0.5)
        return x - self.kept.clone()


class TwoStagesKeep(Path):
    """A memory that two stages look at, and that some batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bank(self.layers[0](x), self.is_other(x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.bank(x)


class KeepsAMean(Path):
    """Some batches leave a mean of late values, from which the first stage goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        is_other, x = self.is_other(x), self.layers[0](x) - self.mean
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        if is_other:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x


class Sometimes(Path):
    """Changes something with other micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.is_other(x):
            self.change(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def change(self, x: Tensor) -> None:
        raise NotImplementedError


class InPlaceBuffer(Sometimes):
    def change(self, x: Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


class NewBuffer(Sometimes):
    def change(self, x: Tensor) -> None:
        self.mean = self.mean + x.mean(0)


class ClipsWeights(Sometimes):
    def change(self, x: Tensor) -> None:
        for parameter in self.layers[0].parameters():
            parameter.data.clamp_(-0.1, 0.1)


class ClipsLastWeights(Sometimes):
    def change(self, x: Tensor) -> None:
        with torch.no_grad():
            self.layers[-1].weight.clamp_(-0.1, 0.1)


def test_a_table_for_another_size_may_be_made() -> None:
    class Table(Sometimes):
        def change(self, x: Tensor) -> None:
            self.table = torch.zeros(len(x))

    engine(Table()).train(Own.example(9, 0))


class ClipsInTheMiddle(Sometimes):
    """After the last layer has computed with them, and before its backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        if self.is_other(x):
            self.layers[-1].weight.data.clamp_(-0.1, 0.1)
        return x.mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OtherEncoder, r"it came to unit 'encoder' at test_paths\.py:\d+ in forward now"),
        (
            KeepsAMean,
            r"assigns 'mean' at test_paths\.py:\d+ in forward, which it did not do .* an earlier stage would not see",
        ),
        (OtherParameter, r"add\(\) at test_paths\.py:\d+ in forward uses the parameter 'other' on stage 0"),
        (Penalty, r"grad\(\) at test_paths\.py:\d+ in derived asks for a derivative .* stage 1 has not made"),
        (LooksAtGradient, r"register_hook\(\) at test_paths\.py:\d+ in derived asks for a derivative"),
        (TwoStagesKeep, r"changes the buffer 'bank\.kept'.* in a unit that other stages call too \(stage 0\)"),
        *((kind, r"when (it|training_step) was captured") for kind in (InPlaceBuffer, NewBuffer, ClipsWeights)),
        (ClipsLastWeights, r"when (it|training_step) was captured"),
        (ClipsInTheMiddle, "writes into a weight"),
    ],
)
def test_what_one_stage_cannot_do_alone_for_other_micro_batches_is_refused(model: type[Path], message: str) -> None:
    with pytest.raises(StepChangedError, match=message):
        engine(model()).train(Own.example(9, 0))

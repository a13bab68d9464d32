"""A step may do other things with other micro-batches, as long as its units come in the order of the stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe import Links
from lightning_avgpipe.errors import AbsentValueError, AvgPipeError, PartitionError, StepChangedError
from tests.zoo.comparison import assert_same, check, check_in_two_processes, in_stages
from tests.zoo.own_models import WIDTH, Own

SIZES = (4, 9, 8, 3)  # of batches: the first is captured


class Paths(Own):
    """Six layers; ``is_other`` says what a micro-batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    @staticmethod
    def is_other(x: Tensor) -> bool:
        return len(x) > 2

    def through(self, x: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        for layer in self.layers[begin:end]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        other = self.is_other(x)
        for number, layer in enumerate(self.layers):
            x = self.step(number, layer, x, other)
        return x

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        raise NotImplementedError


class MoreGlue(Paths):
    """As attention that repeats its heads only where there is a mask."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        x = layer(x)
        if other:
            x = (x[:, None].expand(-1, 2, -1).reshape(-1, WIDTH) * 0.5)[: len(x)]
        return F.gelu(x)


class DropsLayers(Paths):
    """Residual layers of which some are left out."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return x if other and number % 2 else x + torch.tanh(layer(x))


class Ends(Paths):
    """Small micro-batches end early, and log what they come to."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2] if self.is_other(x) else self.layers:
            x = F.gelu(layer(x))
            self.log("mean", x.mean())
        return x


class InPlace(Paths):
    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        y = layer(x)
        if other:
            y.mul_(0.5).add_(x)
        return torch.tanh(y)


class LongSkip(Paths):
    """What the first layer gives is needed at the end, on both paths."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        y = F.gelu(first)
        for layer in self.layers[1:]:
            y = layer(y * 2 if self.is_other(x) else y)
        return y + first


class TakesValues(Paths):
    """The path depends on what a layer gives."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        x = layer(x)
        return torch.relu(x) + 1 if bool(x.detach().sum() > 0) else x


class Adds(Paths):
    """Runs a layer that the first micro-batch leaves out."""

    def step(self, number: int, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return x + torch.tanh(layer(x)) if other or number not in (1, 4) else x


class Alternatives(Paths):
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


class Prompts(Paths):
    """A learned tensor for each kind of batch, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.layers[0](x) + self.prompts[int(self.is_other(x))], 1)


class Differentiates(Paths):
    """Asks for derivatives of what the last stage computes by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[-1](self.through(x, 0, -1))
        if self.training and self.is_other(x):
            z = y.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(torch.tanh(z).square().sum(), z)
            return y + gradient
        return y


class Centres(Paths):
    """A mean of each class, written to as often as there are classes in the batch, and used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(4, WIDTH))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y, classes = self.through(x), (x[:, 0] * 2).round().long() % 4
        for i in classes.unique().tolist() if self.training else ():
            mean = y[classes == i].detach().mean(0)
            self.centres[i] = mean if self.seen[i] == 0 else 0.9 * self.centres[i] + 0.1 * mean
            self.seen[i] += 1
        return y - self.centres[classes]


class LossOfEachSample(Paths):
    """A loop over the samples, of which the last micro-batches have fewer, and others more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)

    def loss(self, batch: Any) -> Tensor:
        return torch.stack(
            [F.mse_loss(found, wanted) for found, wanted in zip(self(batch[0]), batch[1], strict=True)]
        ).mean()


class RowsOfHead(LossOfEachSample):
    """A head that gives a dict for each sample, as of a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Rows()

    def forward(self, x: Tensor) -> Any:
        return [row["row"] for row in self.head(self.through(x))]


class Rows(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return [{"row": row} for row in super().forward(x)]


class Decodes(Paths):
    """Validation reads numbers one by one, as many as there are different ones."""

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found, lengths = self(batch[0]), (batch[1][:, 0].abs() * 4).long() + 1
        words = [
            [int(number) for number in torch.unique_consecutive(row[:length] > 0) if number]
            for row, length in zip(found, lengths, strict=True)
        ]
        self.log("val_words", float(sum(map(len, words))))


class LoopsOverSamples(LossOfEachSample):
    """Loops on all stages; the rows of one cross a cut, one by one, and are used once more in the end."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [F.gelu(row) for row in self.layers[0](x)]
        x = self.through(torch.stack(rows), 1, 3)
        rows = [row + F.gelu(other) for row, other in zip(rows, x, strict=True)]
        for layer in self.layers[3:]:
            rows = [layer(row) for row in rows]
        return torch.stack([row + other for row, other in zip(rows, x, strict=True)])


MODELS = (
    Adds, Alternatives, MoreGlue, DropsLayers, Ends, InPlace, LongSkip, TakesValues, Prompts, Differentiates, Centres,
    LossOfEachSample, RowsOfHead, Decodes, LoopsOverSamples,
)  # fmt: skip


def made(model: Callable[[], Paths]) -> tuple[Paths, list[Any]]:
    torch.manual_seed(1)
    return model(), [Own.example(size, 0) for size in SIZES]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, {"num_stages": 3}) for model in MODELS),
        *(pytest.param(model, {"num_stages": 4}, marks=pytest.mark.slow) for model in MODELS),
        *((LongSkip, {"num_stages": 2, "recompute": repeated}) for repeated in (True, ["layers.*"])),
        (Ends, {"num_stages": 4, "split_points": ["layers.1", "layers.3", "layers.5"]}),  # ends within the second stage
    ],
)
def test_another_path_gives_the_numbers_of_one_process(model: type[Paths], options: dict[str, Any]) -> None:
    check(partial(made, model), **options)


def test_another_path_gives_the_numbers_of_one_process_in_two(tmp_path: Path) -> None:
    makes = {model.__name__: partial(made, model) for model in MODELS if model is not Ends}
    check_in_two_processes(makes, 2, tmp_path)


def test_a_step_may_end_before_the_last_stage_if_every_process_has_the_batch(tmp_path: Path) -> None:
    """The stage where it ends computes the loss."""
    check_in_two_processes({"Ends": partial(made, Ends)}, 2, tmp_path, links=Links(send_batch="all"))


class DropsInLoops(LoopsOverSamples):
    """Draws for each sample, before a cut and in the loss, and once more after that."""

    def loss(self, batch: Any) -> Tensor:
        found = torch.stack([F.dropout(row, 0.5) for row in self(F.dropout(batch[0], 0.5))])
        return F.mse_loss(F.dropout(found, 0.5), batch[1])


def test_loops_over_samples_draw_the_same_with_any_number_of_stages() -> None:
    make = partial(made, DropsInLoops)
    expected = in_stages(make, 1)
    assert_same(expected, in_stages(make, 3))
    assert_same(expected, in_stages(make, 2, recompute=True, schedule="zb_h1"))


# -- refused -----------------------------------------------------------------------------------------------------------


class Needs(Paths):
    """A value that only the other path needs."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        y = self.through(first, 1)
        return y + first if self.is_other(x) else y


class GoesBack(Paths):
    """A unit of the first stage is called once more in the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.through(x, 0, -1)
        return self.layers[-1](self.layers[0](y) if self.is_other(x) else y)


class Fewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return (y,) if Paths.is_other(x) else (y, y * 2)


class ChangingStructure(Paths):
    def __init__(self) -> None:
        super().__init__()
        self.first = Fewer()

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.first(x)[0])


class LoopsBesideState(LossOfEachSample):
    """A loop over the samples in front of a cut, in a step that changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(torch.stack([F.gelu(row) for row in self.layers[0](x)]), 1)
        self.seen.add_(x.detach().mean(0))
        return x * self.seen


class WritesThroughView(Paths):
    """A view of the first result is changed after all other layers; each cut would separate view and result."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        left = hidden[:, :4]
        x = self.through(hidden.clone(), 1)
        left.mul_(2)
        return x + hidden


class OtherEncoder(Paths):
    """Some batches come in by a layer of their own, which no stage owns and each would train for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.encoder(x) if self.is_other(x) else self.layers[0](x), 1)


class OtherParameter(Paths):
    """Some batches use a parameter of their own in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.layers[0](x) + (self.other if self.is_other(x) else self.one), 1)


class LooksAtGradient(Paths):
    """Wants the gradient of an early value, for some batches; it reaches the last stage by two ways."""

    def loss(self, batch: Any) -> Tensor:
        first = self.layers[0](batch[0])
        x = self.through(first, 1) + first
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


class TwoStagesKeep(Paths):
    """A memory that two stages look at, and that some batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def forward(self, x: Tensor) -> Tensor:
        return self.bank(self.through(self.bank(self.layers[0](x), self.is_other(x)), 1))


LINE = r"at test_paths\.py:\d+ in"
REFUSED: dict[Callable[[], Paths], list[str]] = {
    Needs: [
        r"needs the value of 'layers\.0'",
        "does something else than with the first one",
        "Let the first batch use that value too",
    ],
    GoesBack: [
        "training_step does not do what it did",
        rf"it came to unit 'layers\.5' {LINE} forward then",
        "move the difference into one unit, or keep it on the last stage with split_points",
        "a run that resumes from a checkpoint follows it as it is then",
    ],
    ChangingStructure: [
        rf"unit 'first' {LINE} forward returned 2 tensors",
        r"returned 1 now \(stage 0\)",
        "return the same structure for every batch, with empty tensors where there is nothing to return",
    ],
    LoopsBesideState: [
        rf"unbind\(\) {LINE} forward returned 2 tensors",
        r"returned 5 now \(stage 0\)",
        "in a step that changes weights or buffers between submodules, a loop over a tensor must have the same length",
        "Put the loop into the forward of a submodule that returns one tensor",
        "keep it on the last stage with split_points",
        r"loop over x\.tolist\(\) if it needs only numbers",
        "drop_last=True in the dataloader, and a num_microbatches that divides its batch_size",
    ],
    WritesThroughView: [
        r"no cut may lie before split point 'layers\.3'",
        r"the results of 'layers\.0' and '__getitem__' share memory",
        rf"mul_\(\) {LINE} forward changes in place",
        "clone one of them, or compute out of place",
    ],
    OtherEncoder: [rf"it came to unit 'encoder' {LINE} forward now"],
    OtherParameter: [rf"add\(\) {LINE} forward uses the parameter 'other' on stage 0"],
    Penalty: [rf"grad\(\) {LINE} derived asks for a derivative .* stage 1 has not made"],
    LooksAtGradient: [rf"register_hook\(\) {LINE} derived asks for a derivative"],
    TwoStagesKeep: [r"changes the buffer 'bank\.kept'.* in a unit that other stages call too \(stage 0\)"],
}
ERRORS: dict[Callable[[], Paths], type[AvgPipeError]] = {Needs: AbsentValueError, WritesThroughView: PartitionError}


@pytest.mark.parametrize("model", REFUSED)
def test_what_one_stage_cannot_do_alone_is_refused_and_says_why(model: Callable[[], Paths]) -> None:
    with pytest.raises(ERRORS.get(model, StepChangedError)) as caught:
        in_stages(partial(made, model), 2, split_points=["layers.3"])
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in REFUSED[model] if not re.search(part, said)] == [], said

"""Models that benchmarks share: a language model as a user writes it, its two stages by hand, and blocks that sleep."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.schedule import BACKWARD, FORWARD, Kind


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout1(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)))))


@dataclass(frozen=True)
class Size:
    """Of a model and its batch.

    Attributes:
        samples: per micro-batch.
    """

    width: int
    layers: int
    samples: int
    length: int
    num_microbatches: int = 8
    vocabulary: int = 256


SIZES = {
    "large": Size(width=256, layers=8, samples=4, length=128),
    "small": Size(width=64, layers=4, samples=2, length=32),
}


class LanguageModel(nn.Module):
    """A language model with the step function of a LightningModule."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.width // 32, 0.1) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return loss_of(self(tokens), targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FirstStage(nn.Module):
    """The first half by hand."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.Sequential(*model.blocks[: len(model.blocks) // 2])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        return hidden


class LastStage(nn.Sequential):
    """The second half by hand."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(*model.blocks[len(model.blocks) // 2 :], model.norm, model.head)


def by_hand(model: LanguageModel, stage: int) -> nn.Module:
    return LastStage(model) if stage else FirstStage(model)


def example(size: Size, num_microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_microbatches * size.samples, size.length + 1)
    text = torch.randint(size.vocabulary, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def make_model(size: Size) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(size)


def begin(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


class HandWritten:
    """A stage as torch alone runs it."""

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        self.module = module
        self.is_last = is_last

    def __call__(self, given: Tensor, other: Tensor) -> tuple[float, float]:
        """One micro-batch.

        Args:
            given: tokens, or what the stage before made of them.
            other: targets of the last stage; gradients for others.
        Returns:
            Seconds of the forward and of the backward, by the wall clock.
        """
        before = time.perf_counter()
        output = self.module(given.detach().requires_grad_() if given.is_floating_point() else given)
        if self.is_last:
            output = loss_of(output, other)
        between = time.perf_counter()
        output.backward(None if self.is_last else other)
        return between - before, time.perf_counter() - between


class Sleep(torch.autograd.Function):
    """Takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rest_s: dict[Kind, float]) -> Tensor:
        ctx.rest_s = rest_s
        time.sleep(max(0.0, rest_s[FORWARD]))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(max(0.0, ctx.rest_s[BACKWARD]))
        return gradients[0], None


class SleepingBlock(nn.Module):
    """One stage's work: a sleep, and an output of the wanted width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.width = width
        self.rest_s = {FORWARD: 0.0, BACKWARD: 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x.expand(-1, self.width) * self.scale, self.rest_s)


class Blocks(nn.Module):
    """A block per stage."""

    def __init__(self, num_stages: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(width) for _ in range(num_stages))

    def training_step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


class TwoLayers(nn.Module):
    """A layer for each of two stages."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(x)).square().mean()

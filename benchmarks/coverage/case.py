"""A case of coverage: a module of a library, with data for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_avgpipe.utils.lightning import pl

__all__ = [
    "STEPS", "Case", "Example", "Source", "WithLoss", "classified", "example", "first", "loader_of", "loss_of",
]  # fmt: skip

STEPS, RATE = 3, 0.05


@dataclass(frozen=True)
class Example:
    """Something that trains.

    Attributes:
        module: a LightningModule.
        data: a loader of batches of so many samples; the same samples in the same order, whatever their number.
        size: samples of a batch.
        parts: micro-batches; 1: what the strategy makes of a batch that it cannot split.
    """

    module: pl.LightningModule
    data: Callable[[int], Iterable[Any]]
    size: int
    parts: int


@dataclass(frozen=True)
class Case:
    """One module.

    Attributes:
        name: unique in its source.
        kind: what the model is for, such as ``causal language model``.
        first: whether no case before has the same body; with another head it is tried once more.
        candidates: each makes an example; the first one counts that trains without stages.
    """

    name: str
    kind: str
    first: bool
    candidates: Sequence[Callable[[], Example]]


@dataclass(frozen=True)
class Source:
    """A library.

    Attributes:
        name: name of the library.
        version: its version.
        cases: all that is tried, in order.
    """

    name: str
    version: str
    cases: Iterable[Case]


def loss_of(output: Any) -> Any:
    """What models call their loss."""
    return output["loss"] if isinstance(output, dict) else output[0]


class Subject(pl.LightningModule):
    """What anybody would write around a model."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model(**batch))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


class WithLoss(nn.Module):
    """A network that returns its loss.

    Args:
        net: the network.
        loss: function of the network and a batch by name.
    """

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, **batch: Any) -> tuple[Tensor]:
        """The loss."""
        return (self.loss(self.net, **batch),)


def first(output: Any) -> Tensor:
    """The first tensor of an output."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def classified(net: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    """The loss of logits for images."""
    return nn.functional.cross_entropy(first(net(image)), label)


def example(
    model: nn.Module, batch: dict[str, Any], parts: int | None = None, loss: Callable[[Any], Any] = loss_of
) -> Example:
    """A model and a batch of its keyword arguments: tensors, and lists of samples.

    Args:
        parts: micro-batches; None is one for each sample.
        loss: what training minimises, given what the model returned.
    """
    size = len(next(value for value in batch.values() if isinstance(value, Tensor | list)))
    samples = [
        {key: value[i] if isinstance(value, Tensor | list) else value for key, value in batch.items()}
        for i in range(size)
    ]
    lists = {key for key, value in batch.items() if isinstance(value, list)}
    collate = (lambda found: collated(found, lists)) if lists else default_collate
    return Example(Subject(model, loss), loader_of(samples, collate), size, size if parts is None else parts)


def loader_of(samples: Sequence[Any], collate: Callable[[list[Any]], Any] = default_collate) -> Callable[[int], Any]:
    """A loader for as many steps as are made, all with these samples."""
    return lambda size: DataLoader([*samples] * STEPS, batch_size=size, collate_fn=collate)


def collated(samples: list[dict[str, Any]], lists: set[str]) -> dict[str, Any]:
    """A batch, in which these are lists."""
    stacked = default_collate([{k: v for k, v in sample.items() if k not in lists} for sample in samples])
    return {**stacked, **{key: [sample[key] for sample in samples] for key in samples[0] if key in lists}}

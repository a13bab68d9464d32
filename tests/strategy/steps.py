"""Four layers whose step does something unusual, and the ways to train them: by hand, in stages, in two processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import AvgPipeError
from tests import driver, processes
from tests.trainers import trainer

NUM_MICROBATCHES = 4
Make = Callable[[], Any]


class Layers(L.LightningModule):
    """Four layers, and a step that a test changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def through(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).relu()).relu())

    def loss(self, batch: Any) -> Tensor:
        return (self.through(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


def data() -> DataLoader:
    """Four batches of eight."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(*torch.randn(2, 32, 8, generator=generator)), batch_size=8)


def by_hand(module: Any, num_microbatches: int = NUM_MICROBATCHES) -> Any:
    """What one process makes of the module in an epoch, micro-batch by micro-batch."""
    return driver.by_hand(module, (tuple(batch) for batch in data()), num_microbatches)


def piped(
    module: Any, num_stages: int = 2, devices: int = 1, trainer_options: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The module trained in stages, for an epoch unless the trainer is told otherwise."""
    options = {"num_microbatches": NUM_MICROBATCHES, "costs_cache": None, **options}
    runner = trainer(
        strategy=AvgPipeStrategy(num_stages=num_stages, **options), devices=devices,
        **{"max_epochs": 1, **(trainer_options or {})},
    )  # fmt: skip
    runner.fit(module, data(), data() if "validation_step" in vars(type(module)) else None)
    return module


def states_of_two_processes(make: Make, folder: Path, **options: Any) -> list[dict[str, Tensor]]:
    """What each of two processes makes of the module."""
    return processes.everywhere(2, lambda: piped(make(), devices=2, **options).state_dict(), folder=folder)


def _errors(cases: Sequence[tuple[Make, Mapping[str, Any]]]) -> list[str]:
    found = []
    for make, options in cases:
        with pytest.raises(AvgPipeError) as caught:
            piped(make(), devices=2, **options)
        found.append("".join(traceback.format_exception(caught.value)))
    return found


def errors_of_two_processes(cases: Sequence[tuple[Make, Mapping[str, Any]]], folder: Path) -> list[tuple[str, ...]]:
    """With which errors two processes end that train modules with options, both of them each time."""
    return list(zip(*processes.everywhere(2, _errors, cases, folder=folder), strict=True))

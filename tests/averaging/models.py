"""Modules and readers for tests of parallel models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.comparing import state
from tests.models import Regression
from tests.trainers import pipeline


class Slowing(torch.optim.SGD):
    """Counts its steps in its groups, and slows down."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["steps"])
        return loss


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "slowing": lambda groups: Slowing(groups, lr=0.05),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.05, t0=2),
}


class Net(Regression):
    """Batch norm, dropout, an LSTM (which keeps its weights in a list too), and a learning rate that changes."""

    def __init__(self, optimizer: str = "sgd", dropout: float = 0.2, warm_up: bool = False) -> None:
        super().__init__(optimizer)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.first(x).unflatten(1, (2, 4)))
        return self.last(self.dropout(h.flatten(1)) * self.scale)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for name, p in self.named_parameters() if "bias" in name], "lr": 0.003},
            {"params": [p for name, p in self.named_parameters() if "bias" not in name]},
        ]
        optimizer = OPTIMIZERS[self.hparams["optimizer"]](groups)
        if not self.hparams["warm_up"]:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Batches:
    """A dataloader of these batches; a plain list would be one of dataloaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Unsized(IterableDataset[Any]):
    """Batches whose number is not known before they end."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Models(L.Callback):
    """All parallel models when training ends, and the reference."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.models = []
        for n in range(strategy.num_pipelines):
            with strategy.parallel_model(n) as model:
                self.models.append(state(model))
        with strategy.reference() as reference:
            self.reference = state(reference)


class Skips(Net):
    """Has no loss for a batch of zeros."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch[0].any() else None


def train(module: Any, data: Any, num_stages: int = 1, validation: Any = None, **strategy: Any) -> Models:
    """Train an epoch; gives the parallel models."""
    models = Models()
    options = strategy.pop("trainer", {})
    strategy = {"num_pipelines": 2, "num_microbatches": 2, **strategy}
    callbacks = [models, *options.pop("callbacks", ())]
    runner = pipeline(num_stages, strategy=strategy, **{"max_epochs": 1, **options, "callbacks": callbacks})
    runner.fit(module, data, validation, ckpt_path=options.pop("ckpt_path", None))
    models.trainer = runner
    return models

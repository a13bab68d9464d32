"""What the end of a step keeps for hooks reaches those that every process runs, as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.strategy.test_attributes_of_steps import Layers, data
from tests.trainers import trainer


class Keeps(Layers):
    """The step keeps its losses, from which hooks, a schedule and a callback choose learning rates."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.last = list[float](), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.through(batch[0]) - batch[1]).square().mean()
        self.last = loss.item()
        self.losses.append(self.last)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + self.last))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        self.scale(sum(self.losses))
        self.losses.clear()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale(self.last)

    def scale(self, by: float) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9 + 0.1 / (1 + by)


class Listens(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.scale(module.losses[-1])


def fitted(rank: int, devices: int, num_stages: int) -> dict[str, Tensor]:
    module = Keeps()
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=4, costs_cache=None)
    trainer(strategy=strategy, devices=devices, max_epochs=3, callbacks=[Listens()]).fit(module, data())
    return module.state_dict()


@pytest.mark.slow
def test_hooks_of_every_process_read_what_the_step_has_kept(tmp_path: Path) -> None:
    expected = fitted(0, 1, 1)
    for state in processes.results(processes.run(2, fitted, 2, 2, folder=tmp_path)):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []

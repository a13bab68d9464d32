"""A script that trains two groups of two stages, all started by it; each process writes its steps into a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_avgpipe import AvgPipeStrategy, Survival
from tests.models import MLP, loader


class Writes(L.Callback):
    """Writes the steps of this process into a file, and ends training at the step in the file ``last``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        name = f"steps-{strategy.group_number}-{strategy.global_rank}-{os.getpid()}"
        with (self.folder / name).open("a") as file:
            file.write(f"{time.monotonic()} {trainer.global_step}\n")
        last = self.folder / "last"
        if last.exists() and trainer.global_step >= int(last.read_text()):
            trainer.should_stop = True


def main(folder: Path) -> None:
    torch.manual_seed(0)
    module = MLP("adamw")
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=20, save_last=True)
    trainer = L.Trainer(
        strategy=AvgPipeStrategy(num_microbatches=2, system=Survival(groups=2), timeout=60),
        accelerator="cpu", devices=4, callbacks=[Writes(folder), saving], max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(MLP, 800, 4))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.save(state, folder / f"left-{trainer.strategy.group_number}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

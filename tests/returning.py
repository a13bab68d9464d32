"""A user's training script, whose second group is killed and comes back: ``returning.py FOLDER``."""

import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch

from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader

EPOCHS, AFTER = 1000, 2


class Fate(L.Callback):
    """The last process is killed once; training ends when its group has been back for some epochs."""

    def __init__(self, folder: Path) -> None:
        self.struck = folder / "struck"
        self.missed = self.back = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 2 and not self.struck.exists():
            self.struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.missed |= trainer.strategy.num_groups == 1 or trainer.current_epoch > 0

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.missed |= trainer.strategy.num_groups == 1
        self.back += bool(self.missed) and trainer.strategy.num_groups == 2
        trainer.should_stop = self.back == AFTER


def main(folder: Path) -> None:
    torch.manual_seed(5)
    module = MLP()
    strategy = AvgPipeStrategy(num_stages=2, min_groups=1, costs="flops")
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=4, max_epochs=EPOCHS, callbacks=[Fate(folder)],
        default_root_dir=folder, log_every_n_steps=1, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, loader(MLP, 24, 4, shuffle=True), loader(MLP, 8, 4))
    torch.save(module.state_dict(), folder / f"weights-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

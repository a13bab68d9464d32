"""A user's training script, which tests/test_launch.py starts in several ways: ``script.py FOLDER JSON``."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader
from tests.trainers import trainer


class Stuck(MLP):
    """In its second batch one process does nothing for minutes."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            time.sleep(300)


def main(folder: Path, model: str = "MLP", epochs: int = 2, timeout_s: float = 60, **options) -> None:
    torch.manual_seed(5)
    module = Stuck() if model == "Stuck" else MLP()
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=2, timeout=timedelta(seconds=timeout_s))

    def note(*_) -> None:
        (folder / f"pid-{runner.global_rank}").write_text(str(os.getpid()))

    callbacks = [OnExceptionCheckpoint(folder), LambdaCallback(on_train_batch_start=note)]
    runner = trainer(strategy=strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True, **options)
    runner.fit(module, loader(MLP, 24, 8, shuffle=True))
    torch.save(module.state_dict(), folder / f"weights-{runner.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))

"""A user's training script, which tests/strategy/test_launch.py starts in several ways: ``script.py FOLDER JSON``."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.strategy import launch
from lightning_avgpipe.utils.patching import replaced
from tests.averaging.models import Batches
from tests.models import MLP, Blocks, loader
from tests.processes import until
from tests.strategy.test_batches import AllAtOnce
from tests.trainers import trainer


class Stuck(MLP):
    """In its second batch one process does nothing for minutes."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            time.sleep(300)


def die(signal_name: str) -> None:
    os.kill(os.getpid(), signal.Signals[signal_name])


class Divided(MLP):
    """Each group of processes reads its part of the batches."""

    def train_dataloader(self):
        batches = list(loader(MLP, 24, 6))
        return Batches(batches[self.trainer.strategy.group_number :: self.trainer.strategy.num_groups])


class Doomed(AvgPipeStrategy):
    """The first process is killed when it has started the other one, or when the other one waits for it."""

    folder = Path()
    dies: tuple[str, str] = ("", "")  # by which signal, when

    def setup_environment(self) -> None:
        signal_name, moment = self.dies
        waiting = self.folder / "waiting"
        connect = launch.shared_store

        def noted(*args, **kwargs) -> dist.Store:
            waiting.touch()
            return connect(*args, **kwargs)

        if self.local_rank == 0 and moment != "training":
            until(lambda: moment != "connecting" or waiting.exists(), "the other process", 60.0)
            die(signal_name)
        with replaced(launch, "shared_store", noted):
            super().setup_environment()


def main(
    folder: Path, model: str = "MLP", epochs: int = 2, timeout_s: float = 60, dies=("", ""), victim=0, sharing=1,
    costs="flops", microbatches=2, stages=2,
    schedule="advance_forward", models=(), further=(), **options
) -> None:  # fmt: skip
    torch.manual_seed(5)
    known = (MLP, Stuck, Divided, Blocks, AllAtOnce, *models)
    module = {kind.__name__: kind for kind in known}[model]()
    kind = Doomed if any(dies) else AvgPipeStrategy
    Doomed.folder, Doomed.dies = folder, dies
    strategy = kind(
        num_stages=stages, num_microbatches=microbatches, schedule=schedule,
        averaging=Averaging(processes_per_device=sharing), costs=costs,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip

    def note(*_) -> None:
        (folder / f"pid-{runner.global_rank}").write_text(str(os.getpid()))
        if dies[1] == "training" and runner.global_step == 2 and runner.global_rank == victim:
            die(dies[0])

    callbacks = [OnExceptionCheckpoint(folder), LambdaCallback(on_train_batch_start=note), *further]
    runner = trainer(strategy=strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True, **options)
    runner.fit(module, None if model == "Divided" else loader(MLP, 24, 8, shuffle=True))
    torch.save(module.state_dict(), folder / f"weights-{runner.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))

"""Count threads, files, listening sockets and memory while two processes run many trainers and many iterations.

Each rank prints a line after each trainer, and several during the last one::

    python benchmarks/soak.py --trainers 10 --iterations 3000 --files 256
"""

from __future__ import annotations

import argparse
import resource
import tempfile

import lightning as L
import psutil
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy

BATCH_SIZE = 8
LINES = 10  # of the long training
LOOKS = 500


class Model(L.LightningModule):
    """Small: what is measured here is everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> object:
        return torch.utils.data.DataLoader(torch.randn(64, 16), BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> object:
        return torch.utils.data.DataLoader(torch.randn(8, 16), BATCH_SIZE)


class Printing(L.Callback):
    """Prints what this process holds, now and then."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step % self.every == 0:
            show(trainer, f"iteration {trainer.global_step}")


def show(trainer: L.Trainer, when: str) -> None:
    process = psutil.Process()
    threads = min(process.num_threads() for _ in range(LOOKS))  # one that has ended takes a moment to leave
    files = min(process.num_fds() for _ in range(LOOKS))  # as does one that closes
    listening = sum(connection.status == "LISTEN" for connection in process.net_connections("tcp"))
    print(
        f"rank {trainer.global_rank}, {when}: {threads} threads, {files} files, "
        f"{listening} listening, {process.memory_info().rss / 2**20:.1f} MiB",
        flush=True,
    )


def train(iterations: int, callbacks: list[L.Callback], validates: bool = False) -> L.Trainer:
    """Train, save, and validate once more if that is asked for."""
    trainer = L.Trainer(
        strategy=AvgPipeStrategy(num_pipelines=2, num_microbatches=2, costs="flops"),
        accelerator="cpu", devices=2,
        max_steps=iterations, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    model = Model()
    trainer.fit(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    if validates:
        trainer.validate(model, verbose=False)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=10, help="one after the other, before the long training")
    parser.add_argument("--iterations", type=int, default=3000, help="of the long training")
    parser.add_argument("--files", type=int, help="limit of open files; default: that of the shell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, options.files))
    for number in range(options.trainers):
        show(train(4, [], validates=number % 2 == 1), f"trainer {number}")
    train(options.iterations, [Printing(max(1, options.iterations // LINES))])


if __name__ == "__main__":
    main()

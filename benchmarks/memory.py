"""Measure the resident memory of each process before the plan is made, after it, and at its peak.

A stack of linear layers is validated for a few batches in two processes on the CPU. It is built either in ``__init__``,
so that every process starts with the whole module, or on the meta device in ``configure_model``, so that none ever
holds it. Prints MiB above what the process held before the module was built. ``share`` is the size of the parameters
that the process owns when the plan is made.

    python benchmarks/memory.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import MIB, Resident, launch, parser, quiet_trainer, table, write
from lightning_avgpipe import AvgPipeStrategy

PROCESSES, LAYERS, WIDTH = 2, 100, 1024  # a layer has 4 MiB


class Tower(L.LightningModule):
    """Linear layers of 4 MiB each."""

    def __init__(self, layers: int, meta: bool) -> None:
        super().__init__()
        self.depth = layers
        self.layers: nn.Sequential | None = None
        if not meta:
            self.layers = self._build()

    def _build(self) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.depth)))

    def configure_model(self) -> None:
        """Built here, if it is not yet."""
        if self.layers is None:
            with torch.device("meta"):
                self.layers = self._build()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Regression."""
        assert self.layers is not None
        x, y = batch
        self.log("loss", F.mse_loss(self.layers(x), y))


class Report(L.Callback):
    """Reads the memory before the first batch and after each."""

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        self.before = 0.0
        self.after = 0.0
        self.share = 0.0

    def on_validation_start(self, *_: Any) -> None:
        self.before = self.resident.now()

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.after = self.resident.now()
        self.share = sum(p.nbytes for p in module.parameters() if not p.is_meta) / MIB


def measure(meta: bool) -> dict[str, float]:
    """In each process: its figures."""
    F.linear(torch.randn(8, 8), torch.randn(8, 8))  # libraries are loaded before the first reading
    data = DataLoader(TensorDataset(torch.randn(32, WIDTH), torch.randn(32, WIDTH)), batch_size=16)
    resident = Resident()
    report = Report(resident)
    strategy = AvgPipeStrategy(num_microbatches=4)
    trainer = quiet_trainer(devices=PROCESSES, strategy=strategy, callbacks=[report])
    # validation decides on the plan as training does, when it runs alone
    trainer.validate(Tower(LAYERS, meta), data, verbose=False)
    return {"share": report.share, "before": report.before, "after": report.after, "peak": resident.peak()}


def run(meta: bool) -> list[dict[str, float]]:
    """Return the figures of each rank."""
    return launch(measure, (meta,), PROCESSES)


def main() -> None:
    """Measure both ways and print a table."""
    options = parser(__doc__).parse_args()
    found = {built: run(meta) for built, meta in (("in __init__", False), ("on meta", True))}
    lines = [
        (built, rank, *(f"{value:.0f}" for value in row.values()), f"{row['peak'] / row['share']:.2f}")
        for built, rows in found.items()
        for rank, row in enumerate(rows)
    ]
    print(table(["built", "rank", "share", "before", "after", "peak", "peak/share"], lines))
    write(options, found)


if __name__ == "__main__":
    main()

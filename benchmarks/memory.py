"""Resident memory of each process before the plan is made, after it, and at its peak.

Trains a stack of linear layers for a few batches in two (or more) processes on the CPU: built in ``__init__``, so that
every process starts with the whole module, and built on the meta device in ``configure_model``, so that none ever holds
it. Prints MiB above what the process held before the module was built; ``share`` is the size of the parameters that the
process owns when the plan is made. Plain SGD: no optimizer states; gradients count, and are as large as the parameters,
so they are not computed unless asked for (``--train``): the measured run validates.

    python benchmarks/memory.py --megabytes 400 --processes 2 --json memory.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import MIB, Resident, quiet_trainer, spawned
from lightning_avgpipe import AvgPipeStrategy

WIDTH = 1024


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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regression."""
        assert self.layers is not None
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same without gradients."""
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No states."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Report(L.Callback):
    """Reads the memory before the first batch and after each."""

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        self.before = 0.0
        self.after = 0.0
        self.share = 0.0

    def _start(self, *_: Any) -> None:
        self.before = self.resident.now()

    def _end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.after = self.resident.now()
        self.share = sum(p.nbytes for p in module.parameters() if not p.is_meta) / MIB

    on_train_start = on_validation_start = _start
    on_train_batch_end = on_validation_batch_end = _end


def measure(processes: int, layers: int, meta: bool, train: bool) -> dict[str, float]:
    """Run one process, and return its figures."""
    F.linear(torch.randn(8, 8), torch.randn(8, 8))  # libraries are loaded before the first reading
    data = DataLoader(TensorDataset(torch.randn(32, WIDTH), torch.randn(32, WIDTH)), batch_size=16)
    resident = Resident()
    report = Report(resident)
    trainer = quiet_trainer(
        devices=processes,
        strategy=AvgPipeStrategy(num_microbatches=4),
        callbacks=[report],
    )
    model = Tower(layers, meta)
    # validation decides on the plan as training does, when it runs alone
    trainer.fit(model, data) if train else trainer.validate(model, data, verbose=False)
    return {"share": report.share, "before": report.before, "after": report.after, "peak": resident.peak()}


def run(processes: int, layers: int, meta: bool, train: bool) -> list[dict[str, float]]:
    """Return the figures of each rank."""
    return spawned(measure, [(processes, layers, meta, train)] * processes)


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="size of all parameters in MiB (default: 400)")
    parser.add_argument("--processes", type=int, default=2, help="number of processes, and of stages (default: 2)")
    parser.add_argument("--train", action="store_true", help="train; gradients are as large as the parameters")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    layers = max(options.processes, options.megabytes * MIB // (4 * WIDTH * WIDTH))
    rows = []
    for meta in (False, True):
        for rank, figures in enumerate(run(options.processes, layers, meta, options.train)):
            rows.append({"built": "on meta" if meta else "in __init__", "rank": rank, **figures})
    print(f"{'built':12s} {'rank':>4s} {'share':>8s} {'before':>8s} {'after':>8s} {'peak':>8s} {'peak/share':>10s}")
    for row in rows:
        numbers = " ".join(f"{row[key]:8.0f}" for key in ("share", "before", "after", "peak"))
        print(f"{row['built']:12s} {row['rank']:4d} {numbers} {row['peak'] / row['share']:10.2f}")
    if options.json:
        options.json.write_text(json.dumps({"unit": "MiB", "layers": layers, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()

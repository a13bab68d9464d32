"""Measure memory and time of recomputation: a transformer in two stages of one process.

Activations are kept (plain), or recomputed per block or per stage. The ways take turns, each in a process of its own;
printed are medians over the rounds: the most MiB of tensors that graphs hold for backwards (the stash), the peak of the
process's memory above that before the model was made (on CUDA, the device's), and the time of a batch over that of the
plain run.

    python benchmarks/recompute.py --schedule afab
"""

from __future__ import annotations

import statistics
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import MIB, Clock, Resident, launch, parser, quiet_trainer, table, write
from lightning_avgpipe import AvgPipeStrategy

LAYERS, WIDTH, LENGTH = 8, 128, 64
BATCH, MICROBATCHES, BATCHES, ROUNDS = 64, 8, 4, 3
WAYS: dict[str, Any] = {"plain": False, "blocks": ["blocks.*"], "stages": True}


class Transformer(L.LightningModule):
    """Blocks that torch brings along."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )  # without dropout: on CPUs drawing is a large part of a forward
        self.head = nn.Linear(WIDTH, 100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Predict tokens."""
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No states."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stash:
    """Bytes of the storages that graphs hold, now and at most; parameters do not count."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # storage -> holders, bytes
        self._now = 0
        self.largest = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """A tensor is saved."""
        kept = tensor.detach()
        if not tensor.is_leaf or not tensor.requires_grad:
            storage = tensor.untyped_storage()
            count, nbytes = self._held.get(storage._cdata, (0, storage.nbytes()))
            self._held[storage._cdata] = count + 1, nbytes
            self._now += 0 if count else nbytes
            self.largest = max(self.largest, self._now)
            weakref.finalize(kept, self._release, storage._cdata)
        return kept

    def _release(self, storage: int) -> None:
        count, nbytes = self._held.pop(storage)
        if count > 1:
            self._held[storage] = count - 1, nbytes
        else:
            self._now -= nbytes


def peak_of(run: Callable[[], object]) -> float:
    """MiB above those at the start while something runs, at most: of this process, or on CUDA of the device."""
    resident = Resident()
    on_device = torch.cuda.is_available()
    base = torch.cuda.memory_allocated() if on_device else 0
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    run()
    of_process = resident.peak()
    return (torch.cuda.max_memory_allocated() - base) / MIB if on_device else of_process


def fit(way: str, schedule: str, batches: int) -> list[float]:
    """Train; seconds of each batch but the first, from the end of the one before."""
    torch.manual_seed(0)
    strategy = AvgPipeStrategy(
        num_stages=2, num_microbatches=MICROBATCHES, schedule=schedule, recompute=WAYS[way], costs="flops",
        split_points=[f"blocks.{LAYERS // 2}"],
    )  # fmt: skip
    clock = Clock()
    tokens = torch.randint(0, 100, (batches * BATCH, LENGTH))
    trainer = quiet_trainer(strategy=strategy, devices=1, accelerator="auto", callbacks=[clock])
    trainer.fit(Transformer(), DataLoader(TensorDataset(tokens, tokens), batch_size=BATCH))
    return clock.seconds(1)


def measure(way: str, schedule: str) -> dict[str, float]:
    """In a process: the figures of one way."""
    peak = peak_of(lambda: fit(way, schedule, 2))
    seconds = statistics.median(fit(way, schedule, BATCHES))
    stash = Stash()
    with saved_tensors_hooks(stash.pack, lambda kept: kept):
        fit(way, schedule, 2)
    return {"stash": stash.largest / MIB, "peak": peak, "seconds": seconds}


def main() -> None:
    """Measure all ways and print a table."""
    arguments = parser(__doc__)
    arguments.add_argument("--schedule", choices=["afab", "1f1b"], default="1f1b")
    options = arguments.parse_args()
    rounds = [{way: launch(measure, (way, options.schedule))[0] for way in WAYS} for _ in range(ROUNDS)]
    rows = []
    for way in WAYS:
        stash, peak, seconds = (statistics.median(r[way][key] for r in rounds) for key in ("stash", "peak", "seconds"))
        ratio = statistics.median(found[way]["seconds"] / found["plain"]["seconds"] for found in rounds)
        rows.append((way, f"{stash:.1f} MiB", f"{peak:.1f} MiB", f"{seconds:.3f} s", f"{ratio:.2f}x"))
    print(table(["recompute", "stash", "peak", "batch", "time"], rows))
    write(options, rounds)


if __name__ == "__main__":
    main()

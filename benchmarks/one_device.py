"""Measure what it costs to divide a model on one device: Lightning's accumulation, one stage, and several.

    python benchmarks/one_device.py --accelerator gpu --precision bf16-true
    python benchmarks/one_device.py --quick                     # on a CPU, with tiny sizes

The same LightningModule trains on the same micro-batches in each way, in turns. Printed are milliseconds per
micro-batch, from the end of one step to that of a later one (medians of the rounds), the ratio to Lightning's in the
same round, and whether the weights are the same, bit for bit. ``host`` is the share of the time after which Python has
queued all work: if it is 1, the device waits for the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import in_turns, parser, quiet_trainer, table, write
from benchmarks.models import Block, loss_of
from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.utils.device import port_of

ROUNDS = 3
WARM, COUNT = 10, 10  # steps that are not counted (in the first eight ignored targets are looked for), and that are
PARTS = 8  # micro-batches of a step
SIDES: dict[str, dict[str, Any] | None] = {
    "Lightning": None,
    "1 stage": {"num_stages": 1},
    "4 stages": {"num_stages": 4},
    "4, 1f1b": {"num_stages": 4, "schedule": "1f1b"},
}
# width, layers, vocabulary, samples of a micro-batch, length
SIZES = {
    "tiny": (32, 4, 64, 2, 8),
    "launch-bound": (256, 8, 1024, 2, 64),
    "medium": (768, 12, 8192, 4, 512),
    "1B": (2048, 20, 8192, 4, 1024),
}


class Module(L.LightningModule):
    """A language model without dropout."""

    def __init__(self, width: int, layers: int, vocabulary: int, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.fused = torch.nn.Embedding(vocabulary, width), fused
        self.blocks = torch.nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.tokens(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = loss_of(self.head(x), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


class Clock(L.Callback):
    """Seconds of the counted steps.

    Attributes:
        host_s: until the host has queued them.
        total_s: until the device has done them.
    """

    def __init__(self) -> None:
        self.host_s = self.total_s = self._begin_s = 0.0
        self._step = 0

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self._step:  # of several batches of a step the first counts
            if self._step == WARM + COUNT:
                self.host_s = time.perf_counter() - self._begin_s
            if self._step in (WARM, WARM + COUNT):
                port_of(module.device).synchronize()
                self.total_s, self._begin_s = time.perf_counter() - self._begin_s, time.perf_counter()
            self._step += 1


def run(side: dict[str, Any] | None, size: str, options: argparse.Namespace) -> tuple[float, float, dict[str, Tensor]]:
    """Train; return seconds per micro-batch until the host and the device are done, and the weights."""
    width, layers, vocabulary, samples, length = SIZES[size]
    module, clock = Module(width, layers, vocabulary, options.accelerator != "cpu"), Clock()
    how: dict[str, Any] = {"accumulate_grad_batches": PARTS}
    if side is not None:
        how = {"strategy": AvgPipeStrategy(num_microbatches=PARTS, costs="flops", **side)}
    text = torch.randint(vocabulary, ((WARM + COUNT + 1) * PARTS * samples, length), generator=torch.Generator())
    data = DataLoader(
        TensorDataset(text), batch_size=samples * (PARTS if side else 1), pin_memory=options.accelerator != "cpu"
    )
    trainer = quiet_trainer(
        accelerator=options.accelerator, devices=1, precision=options.precision, callbacks=[clock], **how
    )
    trainer.fit(module, data)
    weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return clock.host_s / COUNT / PARTS, clock.total_s / COUNT / PARTS, weights


def compared(found: dict[str, list[tuple[float, float, bool]]]) -> str:
    """A row for each side."""
    plain, rows = [total_s for total_s, _, _ in found["Lightning"]], []
    for name, rounds in found.items():
        ratio = statistics.median(total_s / other_s for (total_s, _, _), other_s in zip(rounds, plain, strict=True))
        total_s, host = statistics.median(r[0] for r in rounds), statistics.median(r[1] / r[0] for r in rounds)
        same = "equal" if all(is_equal for _, _, is_equal in rounds) else "differ"
        rows.append((name, f"{total_s * 1e3:.2f}", f"{ratio:.3f}", f"{host:.2f}", same))
    return table(["side", "ms", "ratio", "host", "weights"], rows)


def main() -> None:
    arguments = parser(__doc__, quick="the tiny size, once")
    arguments.add_argument("--accelerator", default="cpu", help="as in the Trainer")
    arguments.add_argument("--precision", default="32-true", help="as in the Trainer")
    options = arguments.parse_args()
    sizes, rounds = (["tiny"], 1) if options.quick else ([size for size in SIZES if size != "tiny"], ROUNDS)
    found: dict[str, dict[str, list[tuple[float, float, bool]]]] = {}
    for size in sizes:
        sides = found[size] = {name: [] for name in SIDES}
        weights: dict[str, Tensor] = {}
        for name in in_turns(list(SIDES), rounds):
            host_s, total_s, now = run(SIDES[name], size, options)
            weights = weights or now
            sides[name].append((total_s, host_s, all(torch.equal(now[key], weights[key]) for key in weights)))
        print(f"{size}\n\n{compared(sides)}\n", flush=True)
    write(options, found)


if __name__ == "__main__":
    main()

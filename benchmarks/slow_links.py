"""Compare two groups of two stages that average over a slow link, rarely and late, with ddp and averaging each step.

Four processes run in network namespaces: 1 Gbit/s within a group, less between the groups, in each direction of each
pair of processes. The workload is the language model of ``workloads.py``, twice as wide (0.5 M parameters), with Adam.
A step takes 32 samples: 8 in each of four processes with ddp, or 16 in the pipeline of each group.

Two cores stand for four devices: each computes, and then sleeps until that has taken four times its CPU time
(``paper/slowed.py``). Links, messages and rounding are real. Samples to the goal are counted in separate runs without
limits, which train with the same numbers: one stage for each group, and one process for ddp.

    python benchmarks/slow_links.py --json slow.json            # root, for namespaces; goes on with what the file has
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, network
from benchmarks.goal import UntilGoal
from benchmarks.harness import launch, quiet_trainer
from benchmarks.paper.slowed import SlowDevice
from benchmarks.results import Results
from benchmarks.workloads import WORKLOADS, ByteTransformer
from lightning_avgpipe import Averaging, AvgPipeStrategy

WIDTH, BATCH, MICROBATCHES = 128, 32, 8  # of the model; samples of a step of all processes; of a group's batch
INSIDE, LINKS = 1000, (100, 20)  # Mbit/s, in a group and between two
RATE, GOAL = 0.002, 1.8  # of Adam, where samples are counted; loss on validation samples
STEPS = 40  # that are timed; a third with averaging after each step
SLOWNESS = 4.0  # of a device, as a multiple of a core's time
ROUNDS, SEEDS = 3, 3  # of seconds; of samples
_EVALUATED, _LIMIT, _EDGE = 256, 1500, 3  # samples for the goal; most steps; steps that are not timed

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
DILOCO = {"groups": 2, "alpha": 1.0, "every": 20}
SIDES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "averaging after each step": {"groups": 2},
    "every 20 steps": DILOCO,
    "every 20, late": {**DILOCO, "delay": 10, "fragments": 2},
    "every 20, late, int8": {**DILOCO, "delay": 10, "fragments": 2, "wire": "int8"},
}
COLUMNS = "KB a step", "idle", "seconds a step", "samples to the goal", "seconds to it"
OUTER = {"mean": {"outer_lr": 1.0}, "nesterov": {"outer_optimizer": NESTEROV}}


class Language(L.LightningModule):
    """The next byte of the standard library's sources."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.model = ByteTransformer(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def loader(size: int, seed: int) -> DataLoader[Any]:
    """Shuffled windows of text in batches; Lightning divides them among processes."""
    random = torch.Generator().manual_seed(seed)
    training, _ = WORKLOADS["language"].data()
    return DataLoader(TensorDataset(*training), size, shuffle=True, generator=random, drop_last=True)


def averaging(side: str, outer: str) -> Averaging:
    """Return the averaging of a side between groups."""
    given = SIDES[side] or {}
    return Averaging(**given, **(OUTER[outer] if "every" in given else {}))


class Clock(L.Callback):
    """What has passed at the end of each step: seconds, seconds of computing; bytes between groups, at some of them."""

    def __init__(self, device: SlowDevice, counted: Sequence[int]) -> None:
        self.device, self.counted = device, counted
        self.at: list[tuple[float, float, int]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.at.append((time.perf_counter(), self.device.busy_s, crossed() if len(self.at) in self.counted else 0))


def crossed() -> int:
    """Bytes that processes of one group have sent to the other one since their namespaces were made."""
    spaces, total = network.Namespaces(os.environ["GLOO_SOCKET_IFNAME"].rpartition("v")[0], 4), 0
    for rank in range(4):
        command = [*spaces.command(rank), "tc", "-s", "class", "show", "dev", spaces.interface(rank)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for peer, sent in re.findall(r"class htb 1:1(\d) .*\n Sent (\d+) bytes", said):
            total += int(sent) * (int(peer) // 2 != rank // 2)
    return total


def seconds(sides: Sequence[str], outer: str, seed: int) -> list[dict[str, Any]]:
    """In each of four processes: what :func:`timed` says of each side."""
    device = SlowDevice(SLOWNESS)
    device.take_optimizers()
    device.take_engine()
    return [timed(side, outer, device) for side in sides]


def timed(side: str, outer: str, device: SlowDevice) -> dict[str, Any]:
    """In each of four processes: seconds, idle share of this device, and bytes, of a step."""
    torch.manual_seed(0)
    strategy: Any
    if SIDES[side] is None:
        strategy, size = DDPStrategy(**device.take_ddp()), BATCH // 4
    else:
        strategy, size = AvgPipeStrategy(
            num_stages=2, num_microbatches=MICROBATCHES, split_points=["model.blocks.1"], costs="flops", timeout=120,
            averaging=averaging(side, outer), verify=False,
        ), BATCH // 2  # fmt: skip
    steps = STEPS if "every" in (SIDES[side] or {}) else STEPS // 3
    clock = Clock(device, (_EDGE, _EDGE + steps) if os.environ["RANK"] == "0" else ())
    trainer = quiet_trainer(strategy=strategy, devices=4, callbacks=[clock], max_steps=steps + _EDGE + 1)
    trainer.fit(Language(0.001), loader(size, 0))
    first, last = clock.at[_EDGE], clock.at[-1]
    took, busy, sent = (b - a for a, b in zip(first, last, strict=True))
    return {"step_s": took / steps, "idle": 1 - busy / took, "bytes": sent / steps / 2}


@torch.no_grad()
def loss_of(module: Language) -> float:
    """The loss on validation samples."""
    _, (inputs, targets) = WORKLOADS["language"].data()
    return F.cross_entropy(module.model(inputs[:_EVALUATED]), targets[:_EVALUATED]).item()


def samples(sides: Sequence[str], outer: str, seed: int) -> list[dict[str, Any]]:
    """In each process: what :func:`learned` says of each side."""
    return [learned(side, outer, seed, int(os.environ["WORLD_SIZE"])) for side in sides]


def learned(side: str, outer: str, seed: int, size: int) -> dict[str, Any]:
    """In each process: samples until the goal; None if it is not reached."""
    torch.manual_seed(seed)
    until, module = UntilGoal(GOAL, loss_of, every=10), Language(RATE)
    strategy: Any = "auto"
    if size > 1:
        given = averaging(side, outer)
        strategy = AvgPipeStrategy(num_stages=1, num_microbatches=1, costs="flops", averaging=given, verify=False)
    trainer = quiet_trainer(strategy=strategy, devices=size, callbacks=[until], max_steps=_LIMIT, max_epochs=-1)
    trainer.fit(module, loader(BATCH // size, seed))
    steps, loss = until.curve[-1]  # not interpolated
    return {"samples": steps * BATCH if loss <= GOAL else None, "losses": [loss for _, loss in until.curve]}


def measure(results: Results, outer: str) -> None:
    """Measure what the results do not have."""

    def run(sides: Sequence[str], link: int | None, turn: int, what: Any, size: int, megabits: Any) -> None:
        if not (missing := [side for side in sides if results.find(what.__name__, link, side, turn) is None]):
            return
        print(f"{what.__name__}, {', '.join(missing)}, {link or ''}, {turn}", flush=True)
        found = launch(what, (missing, outer, turn), size, megabits)[0]
        for side, record in zip(missing, found, strict=True):
            results.add(what.__name__, link, side, turn, record)

    for turn in range(ROUNDS):
        for link in LINKS:
            between = [[INSIDE if a // 2 == b // 2 else link for b in range(4)] for a in range(4)]
            run(["ddp"], link, turn, seconds, 4, between)
            run([*SIDES][1:], link, turn, seconds, 4, between)
    for seed in range(SEEDS):
        run(["ddp"], None, seed, samples, 1, None)
        run([*SIDES][1:], None, seed, samples, 2, None)


def table(results: Results) -> str:
    """Medians, as a table of a page for each link."""

    def median(link: int, side: str, name: str) -> float:
        return statistics.median((results.find("seconds", link, side, turn) or {})[name] for turn in range(ROUNDS))

    tables = []
    for link in LINKS:
        rows = []
        base: tuple[float, float] | None = None
        for side in SIDES:
            step_s, idle, sent = (median(link, side, name) for name in ("step_s", "idle", "bytes"))
            needed = statistics.median(results.samples("samples", side, SEEDS))
            goal_s = step_s * needed / BATCH
            base = base or (needed, goal_s)
            ratios = f"{needed / base[0]:.2f}x", f"{goal_s:.0f} ({base[1] / goal_s:.1f}x sooner)"
            rows.append((side, f"{sent / 1e3:.1f}", f"{idle:.0%}", f"{step_s:.3f}", *ratios))
        tables.append(harness.table([f"{link} Mbit/s", *COLUMNS], rows))
    return "\n\n".join(tables)


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--outer", choices=list(OUTER), default="mean", help="step of the reference")
    options = arguments.parse_args()
    results = Results(options.json, resume=True)
    measure(results, options.outer)
    print(table(results))


if __name__ == "__main__":
    main()

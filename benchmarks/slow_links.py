"""Two groups of two stages over a slow link that meet rarely and late, beside ddp and averaging after each step.

Four processes in network namespaces: 1 Gbit/s inside a group, less between the groups, in each direction of each pair
of processes. The workload is the language model of ``workloads.py``, twice as wide (0.5 M parameters), with Adam.
A step takes 32 samples: ddp 8 in each of four processes, each group 16 in its pipeline.

Two cores stand for four devices: each computes, and then sleeps until that has taken ``--slowness`` times its CPU time
(``paper/slowed.py``). Links, messages and rounding are real. Samples to the goal are counted in runs of their own
without limits: a group of one stage for each group, which trains with the same numbers, and one process for ddp.

    python benchmarks/slow_links.py --json slow.json            # root, for namespaces; goes on with what the file has
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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

from benchmarks import network
from benchmarks.harness import add_options, begin, launch, quiet_trainer
from benchmarks.paper.results import Results
from benchmarks.paper.slowed import SlowDevice
from benchmarks.workloads import WORKLOADS, ByteTransformer
from lightning_avgpipe import Averaging, AvgPipeStrategy

WIDTH, BATCH, MICROBATCHES = 128, 32, 8  # of the model; samples of a step of all processes; of a group's batch
INSIDE, LINKS = 1000, (100, 20)  # Mbit/s, in a group and between two
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
OUTER = {"mean": {"outer_lr": 1.0}, "sum": {"outer_lr": 2.0}, "nesterov": {"outer_optimizer": NESTEROV}}


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


def timed(options: argparse.Namespace, side: str, rank: int, device: SlowDevice) -> dict[str, Any]:
    """In each of four processes: seconds, idle share of this device, and bytes, of a step."""
    torch.manual_seed(0)
    strategy: Any
    if SIDES[side] is None:
        strategy, size = DDPStrategy(**device.take_ddp()), BATCH // 4
    else:
        strategy, size = AvgPipeStrategy(
            num_stages=2, num_microbatches=MICROBATCHES, split_points=["model.blocks.1"], costs="flops", timeout=120,
            averaging=averaging(side, options.outer), verify=False,
        ), BATCH // 2  # fmt: skip
    steps = options.steps if "every" in (SIDES[side] or {}) else options.steps // 3
    clock = Clock(device, (_EDGE, _EDGE + steps) if rank == 0 else ())
    trainer = quiet_trainer(strategy=strategy, devices=4, callbacks=[clock], max_steps=steps + _EDGE + 1)
    trainer.fit(Language(0.001), loader(size, 0))
    first, last = clock.at[_EDGE], clock.at[-1]
    seconds, busy, sent = (b - a for a, b in zip(first, last, strict=True))
    return {"step_s": seconds / steps, "idle": 1 - busy / seconds, "bytes": sent / steps / 2}


class Goal(L.Callback):
    """Ends training when the loss on validation samples is at the goal."""

    def __init__(self, goal: float, every: int) -> None:
        self.goal, self.every = goal, every
        self.losses: list[float] = []
        self.steps: int | None = None
        _, (self.inputs, self.targets) = WORKLOADS["language"].data()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step % self.every:
            return
        strategy = trainer.strategy
        with strategy.reference() if isinstance(strategy, AvgPipeStrategy) else contextlib.nullcontext():
            outputs = module.model(self.inputs[:_EVALUATED])
        self.losses.append(F.cross_entropy(outputs, self.targets[:_EVALUATED]).item())
        if self.losses[-1] <= self.goal:
            self.steps, trainer.should_stop = trainer.global_step, True


def learned(options: argparse.Namespace, side: str, size: int) -> dict[str, Any]:
    """In each process: samples until the goal; None if it is not reached."""
    torch.manual_seed(options.seed)
    goal, module = Goal(options.goal, 10), Language(options.lr)
    strategy: Any = "auto"
    if size > 1:
        given = averaging(side, options.outer)
        strategy = AvgPipeStrategy(num_stages=1, num_microbatches=1, costs="flops", averaging=given, verify=False)
    trainer = quiet_trainer(strategy=strategy, devices=size, callbacks=[goal], max_steps=_LIMIT, max_epochs=-1)
    trainer.fit(module, loader(BATCH // size, options.seed))
    return {"samples": goal.steps and goal.steps * BATCH, "losses": goal.losses}


def measure(options: argparse.Namespace, results: Results) -> None:
    """Measure what the results do not have."""

    def run(sides: Sequence[str], link: int | None, turn: int, what: str, size: int, megabits: Any) -> None:
        if not (missing := [side for side in sides if results.find(what, link, side, turn) is None]):
            return
        print(f"{what}, {', '.join(missing)}, {link or ''}, {turn}", flush=True)
        given = [f"--{name}={getattr(options, name)}" for name in ("outer", "slowness", "steps", "lr", "goal")]
        given += ["--work", what, "--sides", json.dumps(missing), "--seed", str(turn)]
        found = launch(__file__, given, size, megabits, options.limit_s)
        for side, record in zip(missing, found, strict=True):
            results.add(what, link, side, turn, record)

    for turn in range(options.rounds):
        for link in LINKS:
            between = [[INSIDE if a // 2 == b // 2 else link for b in range(4)] for a in range(4)]
            run(["ddp"], link, turn, "seconds", 4, between)
            run([*SIDES][1:], link, turn, "seconds", 4, between)
    for seed in range(options.seeds):
        run(["ddp"], None, seed, "samples", 1, None)
        run([*SIDES][1:], None, seed, "samples", 2, None)


def table(results: Results, options: argparse.Namespace) -> str:
    """Medians, as a table of a page."""

    def median(what: str, link: int | None, side: str, name: str, turns: int) -> float:
        values = [(results.find(what, link, side, turn) or {}).get(name) for turn in range(turns)]
        return statistics.median([math.inf if value is None else value for value in values] or [math.nan])

    lines = []
    for link in LINKS:
        lines += [f"| {link} Mbit/s | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|"]
        base: tuple[float, float] | None = None
        for side in SIDES:
            names = "step_s", "idle", "bytes"
            step_s, idle, sent = (median("seconds", link, side, name, options.rounds) for name in names)
            needed = median("samples", None, side, "samples", options.seeds)
            seconds = step_s * needed / BATCH
            base = base or (needed, seconds)
            lines.append(
                f"| {side} | {sent / 1e3:.1f} | {idle:.0%} | {step_s:.3f} | {needed / base[0]:.2f}x | {seconds:.0f} "
                f"({base[1] / seconds:.1f}x sooner) |"
            )
        lines.append("")
    return "\n".join(lines)


def work(options: argparse.Namespace) -> None:
    """What each process does, as torchrun would start it; rank 0 writes the results."""
    (rank, size), device = begin(), SlowDevice(options.slowness)
    if options.work == "seconds":
        device.take_optimizers()
        device.take_engine()
        found = [timed(options, side, rank, device) for side in options.sides]
    else:
        found = [learned(options, side, size) for side in options.sides]
    if rank == 0:
        options.result.write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of seconds")
    parser.add_argument("--seeds", type=int, default=3, help="of samples")
    parser.add_argument("--lr", type=float, default=0.002, help="of Adam")
    parser.add_argument("--goal", type=float, default=1.8, help="loss on validation samples")
    parser.add_argument("--steps", type=int, default=40, help="that are timed; a third with averaging after each step")
    parser.add_argument("--slowness", type=float, default=4.0, help="of a device, as a multiple of a core's time")
    parser.add_argument("--outer", choices=list(OUTER), default="mean", help="step of the reference")
    for name, kind in {"work": str, "sides": json.loads, "seed": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    add_options(parser, 600.0, "run")
    options = parser.parse_args(arguments)
    if options.work is not None:
        return work(options)
    if not network.available():
        raise SystemExit("limited links are network namespaces, which need root, ip and tc")
    results = Results(options.json, resume=True)
    measure(options, results)
    print(table(results, options))


if __name__ == "__main__":
    main(sys.argv[1:])

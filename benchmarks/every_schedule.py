"""Every schedule at work, beside the simulator, and beside torch.distributed.pipelining where it has the same.

    python benchmarks/schedules.py --parts every         # calls this

One process for each device, free links. A process has two of 2 D equal blocks: as one stage, or as two where a
schedule wants several. A block either sleeps for as long in a forward as in each half of a backward, so that six
processes run on two cores and what is measured is the schedule and the engine; or it computes, which needs a core for
each process. The simulator is given the medians of the actions and messages of the same iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining as peer
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import add_options, connected, launch, loaded, record
from lightning_avgpipe import Broadcast
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.schedule import Schedule, StageCosts, build, simulate
from lightning_avgpipe.schedule.recipes import RECIPES, trainable
from lightning_avgpipe.utils.random_streams import RandomKey

PEERS: dict[str, Any] = {
    "afab": peer.ScheduleGPipe,
    "1f1b": peer.Schedule1F1B,
    "zb_h1": peer.ScheduleInterleavedZeroBubble,  # of one stage on each process
    "interleaved": peer.ScheduleInterleaved1F1B,
    "bfs": peer.ScheduleLoopedBFS,
    "zbv": peer.ScheduleZBVZeroBubble,
    "dualpipev": peer.ScheduleDualPipeV,
}
PLACES = ("any", "loop", "v")
_ROWS, _WIDTH = 256, 384


class Sleeping(TorchDispatchMode):
    """Within this context a product of matrices takes a while; a forward has one, and each half of its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds)
        return func(*args, **(kwargs or {}))


class Product(nn.Module):
    """A block that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Model(nn.Module):
    """Equal blocks."""

    def __init__(self, count: int, sleeps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Product() if sleeps else _real() for _ in range(count))

    def training_step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return loss_of(x)


def _real() -> nn.Module:
    wide = 4 * _WIDTH
    return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, wide), nn.GELU(), nn.Linear(wide, _WIDTH))


def loss_of(x: Tensor, _: Tensor | None = None) -> Tensor:
    return x.square().mean()


class Ours:
    """This engine in one of the processes."""

    def __init__(self, cluster: Cluster, sleeps: bool, example: Tensor, num_microbatches: int) -> None:
        self.cluster, self.observers = cluster, Observers()
        self.num_stages, self.devices = cluster.stage_map.num_stages, cluster.group.world_size
        self.model = Model(2 * self.devices, sleeps)
        each = 2 * self.devices // self.num_stages
        points = [f"blocks.{each * k}" for k in range(1, self.num_stages)]
        relays = sorted(Broadcast()(self.num_stages, 1).relays)
        self.pipeline, _ = loaded(cluster, self.model, points, (example,), relays)
        args = [(example,)] * num_microbatches
        self.task = Task(lambda i, x: self.model.training_step(x), args, lambda i, loss: loss, RandomKey(0))
        self.built: dict[str, Schedule] = {}

    def schedule(self, name: str) -> Schedule:
        """As a Trainer does and torch's schedules do, it is built once."""
        if name not in self.built:
            self.built[name] = build(name, self.num_stages, len(self.task.args), 0, self.devices)
        return self.built[name]

    def run(self, name: str) -> None:
        run_together([self.pipeline], "training_step", [self.schedule(name)], [self.task], self.observers)


class Peer:
    """torch.distributed.pipelining in one of the processes."""

    def __init__(self, cluster: Cluster, names: Sequence[str], sleeps: bool, batch: Tensor, count: int) -> None:
        self.rank, size = cluster.rank, cluster.group.world_size
        num_stages = cluster.stage_map.num_stages
        v = cluster.stage_map.placement == "v"
        mine = [self.rank] if num_stages == size else [self.rank, 2 * size - 1 - self.rank if v else size + self.rank]
        model, each = Model(2 * size, sleeps), 2 * size // num_stages
        self.batch, self.is_last = batch, num_stages - 1 in mine
        self.schedules = {}
        for name in names:
            stages = [
                peer.PipelineStage(
                    nn.Sequential(*model.blocks[each * k : each * (k + 1)]), k, num_stages, cluster.device
                )
                for k in mine
            ]
            alone = name in ("afab", "1f1b")
            self.schedules[name] = PEERS[name](stages[0] if alone else stages, count, loss_fn=loss_of)

    def run(self, name: str) -> None:
        given = (self.batch,) if self.rank == 0 else ()
        rest = {"target": self.batch, "losses": [], "return_outputs": False} if self.is_last else {}
        self.schedules[name].step(*given, **rest)


def work(options: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the results."""
    sleeps, place = options.compute == "sleep", options.place
    each = 1 if place == "any" else 2
    sleeping = Sleeping(options.block_ms / 1e3) if sleeps else nullcontext()
    with connected(each=each, placement="v" if place == "v" else "loop") as cluster, sleeping:
        rows = measure(cluster, options, sleeps)
    if cluster.rank == 0:
        options.result.write_text(json.dumps(rows))


def measure(cluster: Cluster, options: argparse.Namespace, sleeps: bool) -> list[dict[str, Any]]:
    """A row for each schedule; on ranks other than 0 none."""
    count = options.microbatches
    names = [name for name in options.schedules if RECIPES[name].needs == options.place]
    example = torch.ones(2, 1) if sleeps else torch.randn(_ROWS, _WIDTH)
    ours = Ours(cluster, sleeps, example, count)
    both = [name for name in names if name in PEERS]
    theirs = Peer(cluster, both, sleeps, torch.cat([example] * count), count)
    rows = []
    for name in names:
        sides: dict[str, Callable[[], None]] = {"ours": partial(ours.run, name)}
        if name in both:
            sides["torch"] = partial(theirs.run, name)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        found: list[tuple[float, float]] = []
        for i in range(options.rounds + 1):  # the first warms up
            for side in sorted(sides, reverse=i % 2 == 1):
                cluster.group.barrier()
                before = time.perf_counter()
                with intercepting() if side == "ours" else nullcontext():
                    sides[side]()
                took = max(cluster.group.gather_objects(time.perf_counter() - before) or [0.0])
                seconds[side] += [took] if i else []
            with intercepting():
                timeline = record(cluster, ours.observers, sides["ours"])
            if timeline is not None and i:
                simulated = simulate(ours.schedule(name), StageCosts.measured(timeline), timeline.devices)
                found.append((timeline.iteration_s, simulated.iteration_s))
        if cluster.rank == 0:
            rows.append(_row(options, name, seconds, found))
    return rows


def _row(
    options: argparse.Namespace, name: str, seconds: dict[str, list[float]], found: list[tuple[float, float]]
) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(seconds["ours"], seconds.get("torch", ()), strict=False)]
    return {
        "processes": options.processes, "compute": options.compute, "schedule": name,
        "seconds": statistics.median(seconds["ours"]),
        "simulated_s": statistics.median(simulated for _, simulated in found),
        "error": statistics.median(measured / simulated - 1 for measured, simulated in found),
        "torch_s": statistics.median(seconds["torch"]) if ratios else None,
        "over_torch": statistics.median(ratios) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]], head: bool = True) -> str:
    """One line per measurement."""
    lines = ["processes compute  schedule         measured  simulated   error     torch  over torch (rounds)"]
    for row in rows:
        beside = " " * 9
        if row["torch_s"] is not None:
            rounds = f"{min(row['ratios']):.2f} .. {max(row['ratios']):.2f}"
            beside = f"{row['torch_s']:7.3f} s {row['over_torch']:6.3f}x ({rounds})"
        lines.append(
            f"{row['processes']:9d} {row['compute']:8s} {row['schedule']:15s} {row['seconds']:7.3f} s "
            f"{row['simulated_s']:8.3f} s {row['error']:+7.1%}  {beside}".rstrip()
        )
    return "\n".join(lines if head else lines[1:])


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--processes", type=int, default=2)
    result.add_argument("--place", choices=PLACES, default="any")
    result.add_argument("--compute", choices=["sleep", "real"], default="sleep")
    result.add_argument("--schedules", nargs="+", choices=trainable(), default=list(trainable()))
    result.add_argument("--microbatches", type=int, default=12)
    result.add_argument("--block-ms", type=float, default=15.0, help="of a sleep")
    result.add_argument("--rounds", type=int, default=5)
    add_options(result, 600.0, "number of processes, placement and compute")
    return result


def run(counts: Sequence[int], computes: Sequence[str], arguments: Sequence[str], limit_s: float) -> list[Any]:
    """Launch the processes for each number of them, each placement and each compute; prints and returns the rows."""
    rows: list[Any] = []
    for compute in computes:
        for count in counts:
            for place in PLACES:
                options = ["--processes", str(count), "--place", place, "--compute", compute, *arguments]
                found = launch(__file__, options, count, None, limit_s)
                print(table(found, head=not rows), flush=True)
                rows += found
    return rows


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work(parser().parse_args())

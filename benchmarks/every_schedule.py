"""Measure every schedule on free links, and compare it with the simulator and with torch.distributed.pipelining.

    python benchmarks/schedules.py --parts every         # calls this

Each of D processes has two of 2 D equal blocks, as one stage, or as two where a schedule needs several. A block either
computes, which needs a core for each process, or it sleeps, equally long in a forward and in each half of a backward.
Then six processes run on two cores, and the times are those of the schedule and the engine. The simulator is given the
medians of the actions and messages of the same iteration. Torch is measured where it has the schedule.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining as peer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import connected, launch, table, timed
from benchmarks.one_pipeline import OnePipeline, TorchPipeline
from lightning_avgpipe import Broadcast
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.schedule import Schedule, StageCosts, Timeline, build, simulate
from lightning_avgpipe.schedule.recipes import RECIPES

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
BLOCK_S = 0.015  # of a sleep
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


def measure(compute: str, place: str, rounds: int, num_microbatches: int) -> list[dict[str, Any]]:
    """In each process: a row for each schedule of a placement; on ranks other than 0 none."""
    sleeps = compute == "sleep"
    sleeping = Sleeping(BLOCK_S) if sleeps else nullcontext()
    each, placement = 1 if place == "any" else 2, "v" if place == "v" else "loop"
    with connected(each=each, placement=placement) as cluster, sleeping:  # type: ignore[arg-type]
        return measured(cluster, place, sleeps, rounds, num_microbatches)


def stages_of(cluster: Cluster) -> list[int]:
    """The stages that torch has on this process."""
    rank, size = cluster.rank, cluster.group.world_size
    if cluster.stage_map.num_stages == size:
        return [rank]
    return [rank, 2 * size - 1 - rank if cluster.stage_map.placement == "v" else size + rank]


def measured(cluster: Cluster, place: str, sleeps: bool, rounds: int, count: int) -> list[dict[str, Any]]:
    """Return the same, with a cluster."""
    num_stages, size = cluster.stage_map.num_stages, cluster.group.world_size
    example = torch.ones(2, 1) if sleeps else torch.randn(_ROWS, _WIDTH)
    each, model, batch = 2 * size // num_stages, Model(2 * size, sleeps), torch.cat([example] * count)
    points, relays = [f"blocks.{each * k}" for k in range(1, num_stages)], sorted(Broadcast()(num_stages, 1).relays)
    args = [(example,)] * count
    ours = OnePipeline(cluster, Model(2 * size, sleeps), points, args, relays=relays, repeats=False)
    rows = []
    for name in (name for name in RECIPES if RECIPES[name].needs == place):
        schedule = build(name, num_stages, count, 0, size)  # once, as a Trainer does and torch's schedules do
        timelines: list[Timeline | None] = []
        sides: dict[str, Callable[[], object]] = {
            "ours": partial(ours.run, schedule),
            "recorded": partial(_record, ours, schedule, timelines),
        }
        if name in PEERS:
            parts = {k: nn.Sequential(*model.blocks[each * k : each * (k + 1)]) for k in stages_of(cluster)}
            sides["torch"] = partial(TorchPipeline(cluster, PEERS[name], parts, count, loss_of).run, batch, batch)
        seconds = timed(cluster, sides, rounds, torchs=["torch"])
        if cluster.rank == 0:
            recorded = [timeline for timeline in timelines[1:] if timeline is not None]  # the first warms up
            simulated = [simulate(schedule, StageCosts.measured(t), replicas=t.replicas) for t in recorded]
            found = [(one.iteration_s, other.iteration_s) for one, other in zip(recorded, simulated, strict=True)]
            rows.append({"processes": size, "schedule": name, **summary(seconds, found)})
    return rows


def _record(ours: OnePipeline, schedule: Schedule, timelines: list[Timeline | None]) -> None:
    timelines.append(ours.record(schedule))


def summary(seconds: dict[str, list[float]], found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of a schedule, from the seconds of each side, and of recorded and simulated iterations."""
    ratios = [b / a for a, b in zip(seconds["ours"], seconds.get("torch", ()), strict=False)]
    return {
        "seconds": statistics.median(seconds["ours"]),
        "simulated_s": statistics.median(simulated for _, simulated in found),
        "error": statistics.median(recorded / simulated - 1 for recorded, simulated in found),
        "torch_s": statistics.median(seconds["torch"]) if ratios else None,
        "over_torch": statistics.median(ratios) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement."""
    lines = []
    for row in rows:
        beside = ["", ""]
        if row["torch_s"] is not None:
            rounds = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
            beside = [f"{row['torch_s']:.3f} s", f"{row['over_torch']:.3f}x ({rounds})"]
        lines.append(
            (row["processes"], row["compute"], row["schedule"], f"{row['seconds']:.3f} s",
             f"{row['simulated_s']:.3f} s", f"{row['error']:+.1%}", *beside)
        )  # fmt: skip
    head = ["processes", "compute", "schedule", "measured", "simulated", "error", "torch", "over torch (rounds)"]
    return table(head, lines)


def run(counts: Sequence[int], rounds: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Launch so many processes, for each compute and each placement; prints and returns the rows."""
    rows: list[dict[str, Any]] = []
    for compute in ("sleep", "real"):
        for count in counts:
            for place in PLACES:
                found = launch(measure, (compute, place, rounds, num_microbatches), count)[0]
                rows += (found := [{"compute": compute, **row} for row in found])
                print(f"{compared(found)}\n", flush=True)
    return rows

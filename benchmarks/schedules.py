"""Measure iteration time and stash of schedules on limited links, and the time of every schedule on free ones.

    python benchmarks/schedules.py --picture docs/schedules.png     # as root, for links of a limited rate
    python benchmarks/schedules.py --quick               # two processes, few rounds
    python benchmarks/schedules.py --parts every         # all schedules, and torch's: see every_schedule.py

On limited links these are AFAB, 1F1B, advance forward propagation and, from three stages on, broadcast forward. Each
stage is a process that runs the real engine and sends real messages. Its compute is a sleep in the forward and in the
backward, calibrated so that an action lasts as long as asked. A sleep releases the core, so six stages run on two
cores, and the times are those of the schedule and the transport. The simulator is given the times that were asked for,
not the measured ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import every_schedule
from benchmarks.harness import connected, launch, parser, table, write
from benchmarks.models import Blocks
from benchmarks.one_pipeline import OnePipeline
from lightning_avgpipe import Broadcast
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Kind,
    StageCosts,
    Timeline,
    build,
    first_advance,
    simulate,
    uneven_steps,
)

MEGABITS = 200  # per second, of every link
COLOURS = {"1f1b": "#c0504d", "afab": "#5fa65a", "advance_forward": "#4c84c4", "broadcast": "#8064a2"}
_CALIBRATIONS = 3
_PROBE_BYTES = 2_000_000
_PROBES = 6
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Times:
    """What an iteration is made of.

    Attributes:
        num_microbatches: M.
        wanted_s: seconds of a forward and of a backward of a micro-batch.
    """

    num_microbatches: int
    wanted_s: dict[Kind, float]


FULL, QUICK = Times(16, {FORWARD: 0.03, BACKWARD: 0.06}), Times(4, {FORWARD: 0.01, BACKWARD: 0.02})


# -- one process per stage -------------------------------------------------------------------------------------------


def goodput(cluster: Cluster) -> float:
    """Bytes per second of payload from rank 0 to rank 1, as every rank is told."""
    seconds = []
    payload, answer = torch.zeros(_PROBE_BYTES, dtype=torch.uint8), torch.zeros(1)
    for _ in range(_PROBES):
        if cluster.rank == 0:
            begin = time.perf_counter()
            dist.send(payload, 1)
            dist.recv(answer, 1)
            seconds.append(time.perf_counter() - begin)
        elif cluster.rank == 1:
            dist.recv(payload, 0)
            dist.send(answer, 0)
    return cluster.group.broadcast(_PROBE_BYTES / statistics.median(seconds) if seconds else None) or 0.0


def calibrate(cluster: Cluster, model: Blocks, wanted_s: dict[Kind, float], run: Callable[[], Timeline | None]) -> None:
    """Make actions last as long as wanted, whatever the engine adds to the sleep: seconds of a forward and a backward.

    Args:
        run: an iteration; on rank 0 what happened in it.
    """
    for block in model.blocks:
        block.rest_s.update(wanted_s)
    for _ in range(_CALIBRATIONS):
        timeline = cluster.group.broadcast(run())
        assert timeline is not None
        measured = StageCosts.measured(timeline)
        for k, block in enumerate(model.blocks):
            block.rest_s[FORWARD] += wanted_s[FORWARD] - measured.forward_s[k]
            block.rest_s[BACKWARD] += wanted_s[BACKWARD] - measured.backward_s[k]


def measure(ratios: Sequence[float], times: Times, rounds: int, most_advance: int | None) -> list[dict[str, Any]]:
    """In each process: all schedules at each ratio of transfer to forward; on ranks other than 0 no rows.

    Args:
        most_advance: measure advance forward propagation with each advance up to this one; None: all schedules.
    """
    with connected() as cluster:
        rate = goodput(cluster)
        return [row for ratio in ratios for row in at_ratio(cluster, ratio, rate, times, rounds, most_advance)]


def at_ratio(
    cluster: Cluster, ratio: float, bytes_per_s: float, times: Times, rounds: int, most_advance: int | None
) -> list[dict[str, Any]]:
    """Return a row for each schedule; on ranks other than 0 none."""
    num_stages, count, wanted_s = cluster.stage_map.num_stages, times.num_microbatches, times.wanted_s
    send_s = ratio * wanted_s[FORWARD]
    costs = StageCosts.uniform(num_stages, wanted_s[FORWARD], wanted_s[BACKWARD], send_s)
    model = Blocks(num_stages, max(1, round(send_s * bytes_per_s / _FLOAT_BYTES)))
    points, relays = [f"blocks.{k}" for k in range(1, num_stages)], sorted(Broadcast()(num_stages, 1).relays)
    ours = OnePipeline(cluster, model, points, [(torch.ones(1, 1),)] * count, relays=relays, repeats=False)
    calibrate(cluster, model, wanted_s, partial(ours.record, build("1f1b", num_stages, count)))
    advance = first_advance(uneven_steps(costs), count, costs)
    names = [("afab", 0), ("1f1b", 0), ("advance_forward", advance), *([("broadcast", 0)] if num_stages > 2 else [])]
    if most_advance is not None:
        names = [("advance_forward", h) for h in range(most_advance + 1)]
    schedules = {key: build(key[0], num_stages, count, key[1]) for key in names}
    timelines: dict[tuple[str, int], list[Timeline]] = {key: [] for key in names}
    for _ in range(rounds):
        for key, schedule in schedules.items():  # taking turns, so that a slow moment of the machine meets all of them
            timeline = ours.record(schedule)
            if timeline is not None:
                timelines[key].append(timeline)
    if cluster.rank:
        return []
    return [
        {
            "stages": num_stages, "ratio": ratio, "schedule": name, "advance": h,
            "seconds": statistics.median(t.iteration_s for t in found),
            "simulated_s": simulate(schedules[name, h], costs).iteration_s,
            "peak_stash": list(found[0].peak_stash),
            "iterations_s": [round(t.iteration_s, 5) for t in found],
            "bytes_per_s": round(bytes_per_s),
        }
        for (name, h), found in timelines.items()
    ]  # fmt: skip


# -- the parent ------------------------------------------------------------------------------------------------------


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement; ratios against 1F1B and AFAB at the same setting."""
    seconds = {(row["stages"], row["ratio"], row["schedule"]): row["seconds"] for row in rows}
    lines = []
    for row in rows:
        others = [seconds.get((row["stages"], row["ratio"], other)) for other in ("1f1b", "afab")]
        lines.append(
            (row["stages"], row["ratio"], f"{row['schedule']}, h = {row['advance']}", f"{row['seconds']:.3f} s",
             f"{row['simulated_s']:.3f} s", f"{row['seconds'] / row['simulated_s'] - 1:+.1%}",
             *("" if other is None else f"{other / row['seconds']:.3f}x" for other in others),
             " ".join(map(str, row["peak_stash"])))
        )  # fmt: skip
    head = ["stages", "ratio", "schedule", "measured", "simulated", "error", "over 1F1B", "over AFAB", "peak stash"]
    return table(head, lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Points are measured, lines simulated; a panel per number of stages."""
    from matplotlib.figure import Figure

    stages = sorted({row["stages"] for row in rows})
    figure = Figure(figsize=(4 * len(stages), 3.4), layout="constrained")
    for axes, num_stages in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        for name, colour in COLOURS.items():
            here = [row for row in rows if (row["stages"], row["schedule"]) == (num_stages, name)]
            if not here:
                continue
            ratios = [row["ratio"] for row in here]
            axes.plot(ratios, [row["simulated_s"] for row in here], color=colour, linewidth=1)
            axes.plot(ratios, [row["seconds"] for row in here], "o", color=colour, label=name)
        axes.set_title(f"{num_stages} stages")
        axes.set_xlabel("transfer / forward")
        axes.set_ylabel("seconds per iteration (lines: simulated)")
        axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    arguments = parser(__doc__, quick="two processes, few micro-batches and rounds")
    arguments.add_argument("--parts", choices=["links", "every"], nargs="+", default=["links", "every"])
    arguments.add_argument("--stages", type=int, nargs="+", default=[2, 4, 6])
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0, 0.25, 0.5, 1, 2], help="transfer / forward")
    arguments.add_argument("--iterations", type=int, default=3, help="per schedule on links; the median counts")
    arguments.add_argument(
        "--every-advance", type=int, metavar="H", help="measure the advances 0 to H on links instead"
    )
    arguments.add_argument("--picture", type=Path)
    options = arguments.parse_args()
    if options.quick:
        options.stages, options.ratios, options.iterations = [2], [1], 1
    found: dict[str, Any] = {}
    if "links" in options.parts:
        found["rows"] = on_links(options)
    if "every" in options.parts:
        found["every"] = every_schedule.run(options.stages, *((1, 4) if options.quick else (5, 12)))
    write(options, found)


def on_links(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure some schedules on links of a rate; prints the table."""
    times, rows = QUICK if options.quick else FULL, list[dict[str, Any]]()
    for num_stages in options.stages:
        given = options.ratios, times, options.iterations, options.every_advance
        rows += (found := launch(measure, given, num_stages, MEGABITS, limit_s=1800.0)[0])
        print(f"links of {MEGABITS} Mbit/s, {times.num_microbatches} micro-batches\n\n{compared(found)}\n", flush=True)
    if options.picture is not None:
        draw(rows, options.picture)
    return rows


if __name__ == "__main__":
    main()

"""Schedules at work: every one of them, and iteration time and stash of some on real links.

    python benchmarks/schedules.py --json schedules.json --picture schedules.png
    python benchmarks/schedules.py --quick               # two processes, few rounds
    python benchmarks/schedules.py --parts every         # all schedules, beside torch's: see every_schedule.py

On links: AFAB, 1F1B, advance forward propagation and, from three stages on, broadcast forward. One process per stage
runs the real engine. Its compute is a sleep in the forward and in the backward, calibrated so that an action lasts as
long as asked: it releases the core, so that six stages run on two cores, and what is measured is the schedule and the
transport, not the arithmetic. Messages are real and cross rate-limited links: network namespaces where this is root,
otherwise senders that sleep for as long as a link would be busy. The simulator is given the times that were asked for,
not the measured ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import every_schedule, network
from benchmarks.harness import add_options, connected, launch, loaded, record, write
from benchmarks.models import Blocks
from lightning_avgpipe import Broadcast
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.line import Wire
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Kind,
    Schedule,
    StageCosts,
    Timeline,
    build,
    first_advance,
    simulate,
    uneven_steps,
)
from lightning_avgpipe.utils.random_streams import RandomKey

_CALIBRATIONS = 3
_PROBE_BYTES = 2_000_000
_PROBES = 6
_FLOAT_BYTES = 4


# -- links -----------------------------------------------------------------------------------------------------------


class ThrottledWire(Wire):
    """A wire that is busy for as long as one of the wanted rate would be; those of several pipelines share one."""

    bytes_per_s = 0.0
    sends_at_once = False

    def begin(self, flat: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
        time.sleep(flat.numel() / self.bytes_per_s)
        return super().begin(flat, *args, **kwargs)


class ThrottledGroups(ProcessGroups):
    """A network whose wires are throttled."""

    wire_type = ThrottledWire


def goodput(cluster: Cluster, throttled: bool, megabits: int) -> float:
    """Bytes per second of payload from rank 0 to rank 1, as every rank is told."""
    if throttled:
        ThrottledWire.bytes_per_s = megabits * 1e6 / 8
        return ThrottledWire.bytes_per_s
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


# -- one process per stage -------------------------------------------------------------------------------------------


class Bench:
    """The real engine with blocks that send messages of a given size."""

    def __init__(self, cluster: Cluster, num_microbatches: int, message_bytes: float) -> None:
        self.cluster = cluster
        self.observers = Observers()
        self.num_microbatches = num_microbatches
        self.model = Blocks(cluster.stage_map.num_stages, max(1, round(message_bytes / _FLOAT_BYTES)))
        points = [f"blocks.{k}" for k in range(1, cluster.stage_map.num_stages)]
        relays = sorted(Broadcast()(cluster.stage_map.num_stages, 1).relays)
        self.pipeline, _ = loaded(cluster, self.model, points, (torch.ones(1, 1),), relays)

    def run(self, schedule: Schedule) -> Timeline | None:
        """One iteration; on rank 0 what happened in it."""
        args = [(torch.ones(1, 1),)] * self.num_microbatches
        task = Task(lambda i, x: self.model.training_step(x), args, lambda i, loss: loss, RandomKey(0))
        run = partial(run_together, [self.pipeline], "training_step", [schedule], [task], self.observers)
        return record(self.cluster, self.observers, run)

    def calibrate(self, wanted_s: dict[Kind, float]) -> None:
        """Make actions last as long as wanted, whatever the engine adds to the sleep."""
        schedule = build("1f1b", self.cluster.stage_map.num_stages, self.num_microbatches)
        calibrate(self.cluster, self.model, wanted_s, lambda: self.run(schedule))


def calibrate(cluster: Cluster, model: Blocks, wanted_s: dict[Kind, float], run: Callable[[], Timeline | None]) -> None:
    """Make actions last as long as wanted: seconds of a forward and of a backward.

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


def work(options: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the results."""
    throttled = options.links == "throttled"
    with connected(ThrottledGroups if throttled else ProcessGroups) as cluster:
        rate = goodput(cluster, throttled, options.megabits)
        rows = [row for ratio in options.ratios for row in measure(cluster, options, ratio, rate)]
    if cluster.rank == 0:
        options.result.write_text(json.dumps(rows))


def measure(cluster: Cluster, options: argparse.Namespace, ratio: float, bytes_per_s: float) -> list[dict[str, Any]]:
    """All schedules at one ratio of transfer to forward; on ranks other than 0 rows without values."""
    num_stages, num_microbatches = cluster.stage_map.num_stages, options.microbatches
    forward_s, backward_s = options.forward_ms / 1e3, options.backward_ms / 1e3
    send_s = ratio * forward_s
    costs = StageCosts.uniform(num_stages, forward_s, backward_s, send_s)
    bench = Bench(cluster, num_microbatches, send_s * bytes_per_s)
    bench.calibrate({FORWARD: forward_s, BACKWARD: backward_s})
    advance = first_advance(uneven_steps(costs), num_microbatches, costs)
    schedules = [("afab", 0), ("1f1b", 0), ("advance_forward", advance)]
    schedules += [("broadcast", 0)] if num_stages > 2 else []
    if options.every_advance is not None:
        schedules = [("advance_forward", h) for h in range(options.every_advance + 1)]
    schedule_of = {key: build(key[0], num_stages, num_microbatches, key[1]) for key in schedules}
    timelines: dict[tuple[str, int], list[Timeline]] = {key: [] for key in schedules}
    for _ in range(options.iterations):
        for key in schedules:  # taking turns, so that a slow moment of the machine meets all of them
            timeline = bench.run(schedule_of[key])
            if timeline is not None:
                timelines[key].append(timeline)
    if cluster.rank:
        return []
    rows = []
    for (name, h), found in timelines.items():
        simulated = simulate(schedule_of[name, h], costs)
        rows.append(
            {
                "stages": num_stages, "ratio": ratio, "schedule": name, "advance": h,
                "seconds": statistics.median(t.iteration_s for t in found),
                "simulated_s": simulated.iteration_s,
                "peak_stash": list(found[0].peak_stash),
                "iterations_s": [round(t.iteration_s, 5) for t in found],
                "bytes_per_s": round(bytes_per_s),
            }
        )  # fmt: skip
    return rows


# -- the parent ------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str], options: argparse.Namespace, num_stages: int) -> list[dict[str, Any]]:
    """Measure with one process per stage; ends with all of them."""
    megabits = options.megabits if options.links == "namespaces" else None
    rows: list[dict[str, Any]] = launch(
        __file__, [*arguments, "--links", options.links], num_stages, megabits, options.limit_s
    )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement; ratios against 1F1B and AFAB at the same setting."""
    seconds = {(row["stages"], row["ratio"], row["schedule"]): row["seconds"] for row in rows}
    lines = ["stages ratio  schedule            measured  simulated   error  over 1F1B  over AFAB  peak stash"]
    for row in rows:
        here = row["stages"], row["ratio"]
        versus = [
            f"{seconds[*here, other] / row['seconds']:8.3f}x" if (*here, other) in seconds else " " * 9
            for other in ("1f1b", "afab")
        ]
        name = row["schedule"] + (f" h={row['advance']}" if row["schedule"] == "advance_forward" else "")
        lines.append(
            f"{row['stages']:6d} {row['ratio']:5.2f}  {name:19s} {row['seconds']:7.3f} s {row['simulated_s']:8.3f} s "
            f"{row['seconds'] / row['simulated_s'] - 1:+7.1%}  {versus[0]}  {versus[1]}  "
            f"{' '.join(map(str, row['peak_stash']))}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Points are measured, lines simulated; a panel per number of stages."""
    from matplotlib.figure import Figure

    stages = sorted({row["stages"] for row in rows})
    figure = Figure(figsize=(4 * len(stages), 3.4), layout="constrained")
    for axes, num_stages in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        for colour, name in (
            ("#c0504d", "1f1b"),
            ("#5fa65a", "afab"),
            ("#4c84c4", "advance_forward"),
            ("#8064a2", "broadcast"),
        ):
            here = [row for row in rows if (row["stages"], row["schedule"]) == (num_stages, name)]
            if not here:
                continue
            ratios = [row["ratio"] for row in here]
            axes.plot(ratios, [row["simulated_s"] for row in here], color=colour, linewidth=1)
            axes.plot(ratios, [row["seconds"] for row in here], "o", color=colour, label=name)
        axes.set_title(f"{num_stages} stages")
        axes.set_xlabel("transfer / forward")
        axes.set_ylabel("seconds per iteration")
        axes.legend(frameon=False)
    figure.savefig(path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--stages", type=int, nargs="+", default=[2, 4, 6])
    result.add_argument("--ratios", type=float, nargs="+", default=[0, 0.25, 0.5, 1, 2], help="transfer / forward")
    result.add_argument("--microbatches", type=int, default=16)
    result.add_argument("--forward-ms", type=float, default=30.0)
    result.add_argument("--backward-ms", type=float, default=60.0)
    result.add_argument("--iterations", type=int, default=3, help="per schedule; the median counts")
    result.add_argument("--every-advance", type=int, metavar="H", help="measure the advances 0 to H instead")
    result.add_argument("--links", choices=["auto", "namespaces", "throttled"], default="auto")
    result.add_argument("--megabits", type=int, default=200, help="per second, of every link")
    result.add_argument("--picture", type=Path)
    result.add_argument("--parts", choices=["links", "every"], nargs="+", default=["links", "every"])
    result.add_argument("--compute", choices=["sleep", "real"], nargs="+", default=["sleep", "real"], help="of every")
    result.add_argument("--rounds", type=int, default=5, help="of every: the median counts")
    result.add_argument("--quick", action="store_true", help="two processes, few micro-batches and rounds")
    add_options(result, 1800.0, "number of stages")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.quick:
        few = ["--stages", "2", "--ratios", "1", "--iterations", "1", "--rounds", "1", "--microbatches", "4"]
        options = parser().parse_args(arguments := [*arguments, *few])
    if options.result is not None:
        work(options)
        return
    found: dict[str, Any] = {}
    if "links" in options.parts:
        found |= on_links(options, arguments)
    if "every" in options.parts:
        rest = ["--rounds", str(options.rounds)]
        rest += ["--microbatches", "4"] if options.quick else []
        found["every"] = every_schedule.run(options.stages, options.compute, rest, options.limit_s)
    write(options, found)


def on_links(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure some schedules on links of a rate; prints the table."""
    if options.links == "auto":
        options.links = "namespaces" if network.available() else "throttled"
    about = {
        name: getattr(options, name) for name in ("links", "megabits", "microbatches", "forward_ms", "backward_ms")
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows: list[dict[str, Any]] = []
    for num_stages in options.stages:
        rows += (found := run(arguments, options, num_stages))
        print(table(found), flush=True)
    if options.picture is not None:
        draw(rows, options.picture)
    return {**about, "rows": rows}


if __name__ == "__main__":
    main(sys.argv[1:])

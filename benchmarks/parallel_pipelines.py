"""Do parallel pipelines fill each other's bubbles? Batches per second and memory of N = 1, 2, 3 pipelines.

    python benchmarks/parallel_pipelines.py                     # about three minutes on two cores; links need root
    python benchmarks/parallel_pipelines.py --json parallel.json --pictures timelines
    python benchmarks/parallel_pipelines.py --parts rolling     # beside them with rolling=True, in a Trainer
    python benchmarks/parallel_pipelines.py --compute real      # a transformer, whose arithmetic needs two idle cores

Two stages in two processes, joined by a link of a limited rate in each direction. An iteration is what the strategy
runs: N batches of M micro-batches through the executor, N optimizer steps, one averaging. All N take turns in the same
processes, round by round, and a ratio is the median of the ratios of the rounds. As in ``schedules.py``, compute is a
sleep that releases the core, so that time shows the schedule, and links are network namespaces or senders that sleep.

Beside it stands what the tuner's simulator makes of the times that one pipeline took: of actions and steps, and of a
message of that size on the link. ``lost`` is the share of the iteration in which a device had nothing to do although
the input of some action was there: what the executor wastes. With one pipeline's iteration of T seconds, in which
the busiest stage works for W, N of them take T + (N-1) W at best where nothing but the ramps is idle: with a bubble of
a third, two pipelines are 1.2 times as fast as one, and three 1.29 times.

Rolling: seconds per batch of a Trainer's run, with Lightning's own work, as ``trained.py`` measures them, for N
pipelines with and without ``rolling=True``; beside the limits N / (N - (N-1) b) and 1 / (1-b) for one pipeline that is
idle for b.

Memory: resident megabytes of each process above what it held before the model was built, at the peak of two iterations
of a transformer with AdamW, beside what is counted: N (weights + gradients + optimizer states) + N (stash) + reference
+ working memory, which is what the step (a copy of the weights) or the averaging (three) needs on its way. The stash is
gone by then, so that the sum is an upper bound, up to what the allocator keeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_avgpipe import Averaging

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import network, trained
from benchmarks.harness import MIB, Resident, add_options, connected, in_turns, launch, write
from benchmarks.models import SIZES, Blocks, Size
from benchmarks.parallel_models import NUM_STAGES, Bench, transformer
from benchmarks.schedules import ThrottledGroups, calibrate, goodput
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.engine.accounting import HostMeter
from lightning_avgpipe.planning import Link
from lightning_avgpipe.planning.memory import Holding
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Schedule,
    StageCosts,
    Timeline,
    build,
    first_advance,
    picture,
    uneven_steps,
)
from lightning_avgpipe.tuning import Curve, Device, HopProfile, Profile, Setting, Simulator, StageMemory, StageProfile
from lightning_avgpipe.tuning.scaling import memory_at

PARTS = ["time", "memory", "rolling"]
_NO_MEMORY = StageMemory(0, 0, 0, 0)
_MEASURED_SIZE = Size(width=384, layers=8, samples=2, length=64)  # of the model whose memory is measured
_MEASURED_MICROBATCHES = 4
# Copies of the weights on the way: what AdamW divides by; and drift, mean and the new weights of a model.
_STEPPING, _AVERAGING = 1, 3
_FLOAT_BYTES = 4


def make_bench(cluster: Cluster, options: argparse.Namespace) -> Bench:
    """The model of a run, ready to train."""
    if options.compute == "real":
        return transformer(cluster, SIZES[options.size])
    model = Blocks(NUM_STAGES, max(1, options.message_bytes // _FLOAT_BYTES))
    return Bench(cluster, model, (torch.ones(1, 1),), "blocks.1")


# -- time ------------------------------------------------------------------------------------------------------------


def measure_time(cluster: Cluster, options: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """A row for each M and N; on ranks other than 0 none."""
    bench = make_bench(cluster, options)
    if options.compute == "sleep":
        wanted = {FORWARD: options.forward_ms / 1e3, BACKWARD: options.backward_ms / 1e3}
        assert isinstance(bench.model, Blocks)
        calibrate(cluster, bench.model, wanted, lambda: bench.record(build("1f1b", NUM_STAGES, 4)))
    rows: list[dict[str, Any]] = []
    for num_microbatches in options.microbatches:
        rows += measure_setting(bench, options, num_microbatches, rate)
    return rows


def measure_setting(
    bench: Bench, options: argparse.Namespace, num_microbatches: int, rate: float
) -> list[dict[str, Any]]:
    """A row for each N at one M, with the advance that is best for one pipeline."""
    cluster, message_s = bench.cluster, bench.message_bytes / rate
    found = cluster.group.broadcast(bench.record(build("1f1b", NUM_STAGES, num_microbatches)))
    assert found is not None
    expected = costs_of([found], message_s)
    advance = first_advance(uneven_steps(expected), num_microbatches, expected)
    schedule = build("advance_forward", NUM_STAGES, num_microbatches, advance)
    counts = list(options.pipelines)
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    timelines: dict[int, list[Timeline]] = {n: [] for n in counts}
    iterations = max(1, options.actions // num_microbatches)
    for n in in_turns(counts, options.rounds):
        bench.resize(n)
        timeline = bench.record(schedule)
        seconds[n].append(bench.seconds(schedule, iterations))
        if timeline is not None:
            timelines[n].append(timeline)
    bench.resize(1)
    if cluster.rank:
        return []
    first = counts[0]
    costs, setting = costs_of(timelines[first], message_s), Setting(num_microbatches, 1, advance)
    profile = profile_of(costs, bench.message_bytes, rate, timelines[counts[-1]], setting)
    if options.pictures is not None:
        draw(timelines, options.pictures, f"{options.megabits[0]} Mbit per s, {num_microbatches} micro-batches")
    predicted = {n: Simulator().predict(profile, Setting(num_microbatches, n, advance)).iteration_s for n in counts}
    return [
        {
            "microbatches": num_microbatches, "pipelines": n, "advance": advance,
            "seconds": statistics.median(seconds[n]),
            "batches_per_s": n / statistics.median(seconds[n]),
            "over_one": statistics.median(n / first * a / b for a, b in zip(seconds[first], seconds[n], strict=True)),
            "bubble": statistics.median(t.bubble_fraction for t in timelines[n]),
            "lost": statistics.median(lost_s(t) / (len(t.rows) * t.iteration_s) for t in timelines[n]),
            "simulated_s": predicted[n],
            "simulated_over_one": n / first * predicted[first] / predicted[n],
            "rounds_s": [round(s, 5) for s in seconds[n]],
            "costs": {"forward_s": costs.forward_s, "backward_s": costs.backward_s, "message_s": message_s,
                      "latency_s": costs.latency_s[0]},
        }
        for n in counts
    ]  # fmt: skip


def costs_of(timelines: Sequence[Timeline], message_s: float) -> StageCosts:
    """Of one pipeline: medians of actions; a message occupies the link for as long as its bytes take.

    The sending end cannot tell, as it is done when the system has a copy. What the quickest message took beyond that is
    latency; others have waited for each other.
    """
    measured = [StageCosts.measured(timeline) for timeline in timelines]
    stages = range(NUM_STAGES)
    latency_s = max(0.0, min(t.arrival_s - t.begin_s for found in timelines for t in found.transfers) - message_s)
    return StageCosts(
        [statistics.median(costs.forward_s[k] for costs in measured) for k in stages],
        [statistics.median(costs.backward_s[k] for costs in measured) for k in stages],
        [message_s], [message_s], [latency_s],
    )  # fmt: skip


def profile_of(
    costs: StageCosts, message_bytes: int, rate: float, timelines: Sequence[Timeline], setting: Setting
) -> Profile:
    """What the tuner would know; steps and averagings are those of the timelines' pipelines, divided among them."""

    def update_s(stage: int, kind: str) -> float:
        rank = NUM_STAGES - 1 - stage
        return statistics.median(
            sum(a.end_s - a.begin_s for a in t.activities if (a.device, a.kind) == (rank, kind)) / t.num_pipelines
            for t in timelines
        )

    stages = tuple(
        StageProfile(
            Curve.constant(costs.forward_s[k], 1.0), Curve.constant(costs.backward_s[k], 1.0), _NO_MEMORY,
            step_s=update_s(k, "step"), averaging_s=update_s(k, "averaging"),
        )
        for k in range(NUM_STAGES)
    )  # fmt: skip
    link = Link(1 / rate, costs.latency_s[0])
    hop = HopProfile(message_bytes, message_bytes, link, link)
    count = setting.num_microbatches
    return Profile(count, 1, count, stages, (hop,), Device("process", 0, in_turns=True))


def lost_s(timeline: Timeline) -> float:
    """Seconds, of all devices, in which none of a device's actions ran although the input of one was there."""
    arrivals = {
        (t.hop + (t.direction == "forward"), t.pipeline, t.direction, t.micro_batch): t.arrival_s
        for t in timeline.transfers
    }  # by receiving stage and pipeline
    total = 0.0
    for device in timeline.rows:
        here = sorted((s for s in timeline.spans if s.stage in timeline.stages_of(device)), key=lambda s: s.begin_s)
        ready: list[tuple[float, float]] = []  # from when on each action could have run, until it did
        for lane in {(s.stage, s.pipeline) for s in here}:
            before = timeline.begin_s
            for span in (s for s in here if (s.stage, s.pipeline) == lane):
                message = span.action.kind.consumes, span.action.micro_batch
                ready.append((max(before, arrivals.get((*lane, *message), before)), span.begin_s))
                before = span.end_s
        pauses = itertools.pairwise([(timeline.begin_s, timeline.begin_s), *((s.begin_s, s.end_s) for s in here)])
        for (_, left), (right, _) in pauses:
            since = min((begin for begin, end in ready if begin < right and end >= right), default=right)
            total += max(0.0, right - max(left, since))
    return total


def draw(timelines: dict[int, list[Timeline]], folder: Path, about: str) -> None:
    """A picture of an iteration of each N."""
    folder.mkdir(parents=True, exist_ok=True)
    for n, found in timelines.items():
        title = f"{about}, {n} pipeline{'s' * (n > 1)}: idle {found[-1].bubble_fraction:.0%}"
        name = f"{about}, {n} pipelines".replace(", ", "_").replace(" ", "-")
        picture.save(picture.draw(found[-1], title), folder / f"{name}.png")


# -- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(cluster: Cluster, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rank and N; on ranks other than 0 only some of them."""
    torch.nn.functional.linear(torch.randn(8, 8), torch.randn(8, 8))  # libraries are loaded before the first reading
    above = Resident()
    size, num_microbatches = SIZES["small"] if options.quick else _MEASURED_SIZE, _MEASURED_MICROBATCHES
    bench = transformer(cluster, size)
    schedule = build("1f1b", NUM_STAGES, num_microbatches)
    peaks = {}
    for n in sorted(options.pipelines):  # memory that was freed stays with the process
        bench.resize(n)
        before, resident = above.now(), Resident()
        for _ in range(2):
            bench.iterate(schedule)
        peaks[n] = before + resident.peak()
    above.peak()
    bench.resize(1)
    (stage,) = cluster.stages
    model, stash = counted(bench, schedule)
    weights = sum(p.nbytes for p in bench.model.parameters() if not p.is_meta)
    stashed = Setting(num_microbatches).stash(NUM_STAGES)[stage]
    # the averaging takes the place of the step: it needs what that needed, and more
    held = (_STEPPING * weights, model, (1 + _AVERAGING - _STEPPING) * weights)
    memory = StageMemory(*held, activations=round(stash * num_microbatches / stashed))
    profile = Profile(
        num_microbatches, 1, num_microbatches,
        tuple(StageProfile(Curve.constant(0, 1), Curve.constant(0, 1), memory) for _ in range(NUM_STAGES)),
        (HopProfile(0, 0),), Device("process", 0),
    )  # fmt: skip
    rows = []
    for n, peak in peaks.items():
        needed = memory_at(profile, Setting(num_microbatches, n))[stage]
        reference = weights if n > 1 else 0
        rows.append(
            {
                "rank": cluster.rank, "stage": stage, "pipelines": n, "peak": peak, "formula": needed.total / MIB,
                "models": needed.models / MIB, "stash": needed.stash / MIB, "reference": reference / MIB,
                "working": (needed.fixed - reference) / MIB,
            }
        )  # fmt: skip
    return list(itertools.chain.from_iterable(cluster.group.gather_objects(rows)))


def counted(bench: Bench, schedule: Schedule) -> tuple[int, int]:
    """Bytes of one pipeline on this process: what it trains and trains with, and the most that is stashed."""
    tensors = [p for p in bench.model.parameters() if not p.is_meta]
    states = [v for p in tensors for v in bench.optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    batch = [t for part in bench.args if isinstance(part, tuple) for t in part]
    meter = HostMeter([*tensors, *bench.model.buffers(), *batch])
    with bench.observers.having(meter):
        bench.iterate(schedule)
    (stage,) = bench.cluster.stages
    stash = meter.finish({stage: Holding(0)})[stage].peak
    return 2 * sum(p.nbytes for p in tensors) + sum(s.nbytes for s in states), stash


# -- the processes ---------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the results."""
    time_only = options.parts == ["time"]
    throttled = time_only and options.links == "throttled"
    with connected(ThrottledGroups if throttled else ProcessGroups) as cluster:
        if time_only:
            measured = measure_time(cluster, options, goodput(cluster, throttled, options.megabits[0]))
        else:
            measured = measure_memory(cluster, options)
    if cluster.rank == 0:
        options.result.write_text(json.dumps(measured))


# -- rolling ---------------------------------------------------------------------------------------------------------


def measure_rolling(options: argparse.Namespace, megabits: int) -> list[dict[str, Any]]:
    """A row for one pipeline, and for each other N with and without a barrier, with the fewest micro-batches asked."""
    count = min(options.microbatches)
    costs = trained.Costs(
        NUM_STAGES, count, options.forward_ms, options.backward_ms, options.message_bytes, options.steps
    )
    of_stages = costs.on(megabits)
    advance = first_advance(uneven_steps(of_stages), count, of_stages)
    settings = [(1, False), *((n, rolls) for n in options.pipelines if n > 1 for rolls in (False, True))]
    strategies = [
        {"num_pipelines": n, "averaging": Averaging(rolling=rolls), "advance": advance} for n, rolls in settings
    ]
    seconds = trained.measure(costs, megabits, strategies, options.rounds, options.limit_s)
    expected = [trained.simulated(costs, megabits, strategy) for strategy in strategies]
    idle = 1 - count * (options.forward_ms + options.backward_ms) / 1e3 / seconds[0]
    return [
        {
            "megabits": megabits, "microbatches": count, "pipelines": n, "rolling": rolls, "idle": idle,
            "seconds": found, "over_one": seconds[0] / found, "simulated_over_one": expected[0] / simulated,
            "limit": min(n, 1 / (1 - idle)) if rolls else n / (n - (n - 1) * idle),
        }
        for (n, rolls), found, simulated in zip(settings, seconds, expected, strict=True)
    ]  # fmt: skip


def rolling_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per setting."""
    lines = ["   link    M  N  rolling  idle N=1  s a batch  over N=1  simulated  limit"]
    for row in rows:
        lines.append(
            f"{row['megabits']:5d} Mb {row['microbatches']:3d} {row['pipelines']:2d}  {row['rolling']!s:7}  "
            f"{row['idle']:8.1%} {row['seconds']:10.4f} {row['over_one']:8.2f}x {row['simulated_over_one']:9.2f}x "
            f"{row['limit']:5.2f}x"
        )
    return "\n".join(lines)


# -- the parent ------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement of time."""
    lines = ["   link    M  h  N   idle  lost  iteration  simulated   error  batches/s  over N=1  simulated"]
    for row in rows:
        lines.append(
            f"{row['megabits']:5d} Mb {row['microbatches']:3d} {row['advance']:2d} {row['pipelines']:2d}  "
            f"{row['bubble']:5.1%} {row['lost']:5.1%} {row['seconds']:8.3f} s {row['simulated_s']:8.3f} s "
            f"{row['seconds'] / row['simulated_s'] - 1:+7.1%} {row['batches_per_s']:10.2f} {row['over_one']:8.2f}x "
            f"{row['simulated_over_one']:9.2f}x"
        )
    return "\n".join(lines)


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement of memory, in MiB."""
    lines = ["rank stage  N   models    stash  reference  working  formula  resident  of the formula"]
    for row in rows:
        numbers = (row[name] for name in ("models", "stash", "reference", "working", "formula", "peak"))
        widths = (8, 8, 10, 8, 8, 9)
        parts = " ".join(f"{number:{width}.1f}" for number, width in zip(numbers, widths, strict=True))
        ratio = f"{row['peak'] / row['formula']:15.2f}"
        lines.append(f"{row['rank']:4d} {row['stage']:5d} {row['pipelines']:2d} {parts} {ratio}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS[:2], help="what to measure")
    result.add_argument("--pipelines", type=int, nargs="+", default=[1, 2, 3], help="N; ratios are against the first")
    result.add_argument("--microbatches", type=int, nargs="+", default=[2, 16], help="M of each batch")
    result.add_argument("--megabits", type=int, nargs="+", default=[100, 1000], help="per second, of the links")
    result.add_argument("--compute", choices=["sleep", "real"], default="sleep")
    result.add_argument("--forward-ms", type=float, default=20.0, help="of a sleep")
    result.add_argument("--backward-ms", type=float, default=40.0, help="of a sleep")
    result.add_argument("--message-bytes", type=int, default=500_000, help="of a micro-batch, with sleeps")
    result.add_argument("--size", choices=list(SIZES), default="large", help="of the transformer")
    result.add_argument("--rounds", type=int, default=3, help="of all N; medians count")
    result.add_argument("--actions", type=int, default=4, help="micro-batches of a round's iterations, at least one")
    result.add_argument("--steps", type=int, default=28, help="of a Trainer's epoch, for rolling")
    result.add_argument("--links", choices=["auto", "namespaces", "throttled"], default="auto")
    result.add_argument("--quick", action="store_true", help="two N, one link, short sleeps and few rounds")
    result.add_argument("--pictures", type=Path, help="folder for a picture of an iteration of each kind")
    add_options(result, 600.0, "pair of processes")
    return result


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(arguments)
    if options.quick:
        options.pipelines, options.microbatches, options.megabits = [1, 2], [2, 4], options.megabits[:1]
        options.forward_ms, options.backward_ms, options.message_bytes = 5.0, 10.0, 60_000
        options.size, options.rounds = "small", 2
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    if options.result is not None:
        work(options)
        return
    if options.links == "auto":
        options.links = "namespaces" if network.available() else "throttled"
        if options.links == "throttled":
            print("senders sleep in the place of slow links: network namespaces need root, ip and tc")
    names = ("compute", "links", "forward_ms", "backward_ms", "message_bytes", "size")
    found: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    found |= {name: getattr(options, name) for name in names}
    ranks: Callable[..., Any] = lambda megabits, *more: launch(  # noqa: E731
        __file__, [*arguments, "--links", options.links, *more], NUM_STAGES, megabits, options.limit_s
    )
    if "time" in options.parts:
        found["rows"] = []
        for megabits in options.megabits:
            limit = megabits if options.links == "namespaces" else None
            rows = ranks(limit, "--parts", "time", "--megabits", str(megabits))
            found["rows"] += [{"megabits": megabits, **row} for row in rows]
        print(f"compute: {options.compute}, links: {options.links}\n{table(found['rows'])}", flush=True)
    if "rolling" in options.parts:
        found["rolling"] = [row for megabits in options.megabits for row in measure_rolling(options, megabits)]
        print(f"\na Trainer, with and without a barrier\n{rolling_table(found['rolling'])}", flush=True)
    if "memory" in options.parts:
        found["memory"] = ranks(None, "--parts", "memory")
        print(f"\nmemory in MiB\n{memory_table(found['memory'])}", flush=True)
    write(options, found)


if __name__ == "__main__":
    main(sys.argv[1:])

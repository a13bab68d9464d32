"""How much sooner does elastic averaging reach a goal? Seconds per batch times samples, beside GPipe and 1F1B.

    python benchmarks/time_to_target.py --json target.json --picture docs/time_to_target.png --resume   # as root
    python benchmarks/time_to_target.py --quick                                   # one training, one short round

Two measurements, whose product is the time to the goal:

- seconds per batch of a Trainer with a process for each stage, links of a limited rate and sleeps in place of compute
  (``trained.py``), all sides in turns;
- samples until the goal of three small trainings with three optimizers is reached (``statistical_efficiency.py``), as
  multiples of what one model needs; GPipe and 1F1B train as one model does, bit for bit. Models that roll average by
  the default rule without a barrier, the others with one; ``outer_lr`` is the default, the square root of N.

Memory is not part of it: N models hold N times the weights, optimizer states and stashed micro-batches. Each
measurement is in the results file as soon as it is made, and ``--resume`` goes on from there.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lightning_avgpipe import Averaging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import trained
from benchmarks.paper.results import Results
from benchmarks.statistical_efficiency import PATIENCE, Trial, train
from benchmarks.workloads import WORKLOADS
from lightning_avgpipe.schedule import first_advance, uneven_steps

OPTIMIZERS = ("sgd", "momentum", "adam")
FIRST_LIMIT = 40_000  # samples of one model, at most
ONE = ("GPipe", "1F1B", "advance")


def strategies(costs: trained.Costs, megabits: int, counts: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Arguments of the strategy of each side: one model in three orders, then N models with and without a barrier."""
    of_stages = costs.on(megabits)
    ahead = {"advance": first_advance(uneven_steps(of_stages), costs.microbatches, of_stages)}
    sides: dict[str, dict[str, Any]] = {"GPipe": {"schedule": "afab"}, "1F1B": {"schedule": "1f1b"}, "advance": ahead}
    for n in counts:
        sides |= {f"{name}N={n}": {"num_pipelines": n, "averaging": Averaging(rolling=rolls), **ahead}
                  for name, rolls in (("", False), ("rolling ", True))}  # fmt: skip
    return sides


def trial_of(side: str, workload: str, optimizer: str, seed: int) -> Trial:
    """The training that tells how many samples a side needs."""
    if side in ONE:
        return Trial(workload, optimizer, "single", 1, 1.0, 1.0, seed)
    count = int(side.partition("=")[2])
    return Trial(
        workload, optimizer, "rolling" if side.startswith("rolling") else "elastic", count, math.sqrt(count), 1.0, seed
    )


def measure_samples(
    results: Results, sides: Sequence[str], options: argparse.Namespace
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Of each training and side, by seed, as multiples of the median of one model; infinite if it was given up."""
    trainings = [(workload, optimizer) for workload in options.workloads for optimizer in options.optimizers]
    seeds = range(options.seeds)

    def known(training: tuple[str, str], side: str) -> list[float]:
        records = [results.find(", ".join(training), None, trial_of(side, *training, s).label, s) or {} for s in seeds]
        return [math.inf if record["samples"] is None else float(record["samples"]) for record in records]

    def all_of(trials: Mapping[Trial, int]) -> None:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            runs = {
                pool.submit(train, trial, limit): trial for trial, limit in trials.items()
                if results.find(f"{trial.workload}, {trial.optimizer}", None, trial.label, trial.seed) is None
            }  # fmt: skip
            for run in as_completed(runs):
                name, found = f"{runs[run].workload}, {runs[run].optimizer}", {"samples": run.result()}
                results.add(name, None, runs[run].label, runs[run].seed, {**found, "torch": torch.__version__})

    all_of({trial_of("1F1B", *training, seed): FIRST_LIMIT for training in trainings for seed in seeds})
    unit = {training: statistics.median(known(training, "1F1B")) for training in trainings}
    all_of(
        {trial_of(side, *training, seed): round(PATIENCE * unit[training])
         for side in sides if side not in ONE for training in trainings for seed in seeds}
    )  # fmt: skip
    return {
        training: {side: [value / unit[training] for value in known(training, side)] for side in sides}
        for training in trainings
    }


def sooner(
    seconds: Mapping[str, float], samples: Mapping[tuple[str, str], Mapping[str, list[float]]]
) -> dict[tuple[str, str], dict[str, float]]:
    """How many times sooner than 1F1B each side is at each goal; 0: never."""
    return {
        training: {side: seconds["1F1B"] / seconds[side] / statistics.median(each) for side, each in needed.items()}
        for training, needed in samples.items()
    }


def table(
    seconds: Mapping[str, float],
    simulated: Mapping[str, float],
    samples: Mapping[tuple[str, str], Mapping[str, list[float]]],
) -> str:
    """Markdown: a column for each side; the last two rows of a training are what its elastic sides gain at best."""
    ratios, sides = sooner(seconds, samples), list(seconds)
    lines = [
        f"| | {' | '.join(sides)} |",
        "| --- |" + " --- |" * len(sides),
        "| seconds a batch (simulated) | "
        + " | ".join(f"{seconds[side]:.3f} ({simulated[side]:.3f})" for side in sides) + " |",
        "| as fast as 1F1B | " + " | ".join(f"{seconds['1F1B'] / seconds[side]:.2f}x" for side in sides) + " |",
    ]  # fmt: skip
    for training, needed in samples.items():
        cells = (f"{ratios[training][side]:.2f}x ({min(needed[side]):.2f} - {max(needed[side]):.2f})" for side in sides)
        lines.append(f"| {', '.join(training)}: sooner (samples) | {' | '.join(cells)} |")
    return "\n".join(lines)


def best(ratios: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """A line for each training: its best elastic side beside 1F1B and GPipe."""
    lines = []
    for training, of_sides in ratios.items():
        side = max((side for side in of_sides if side not in ONE), key=lambda side: of_sides[side])
        gain = of_sides[side]
        sooner_by = (
            f"{side} is at the goal {gain:.2f}x sooner than 1F1B, {gain / of_sides['GPipe']:.2f}x sooner than GPipe"
        )
        lines.append(f"{', '.join(training)}: {sooner_by if gain else 'with N models the goal is not reached'}")
    return "\n".join(lines)


def picture(ratios: Mapping[tuple[str, str], Mapping[str, float]], path: Path, title: str) -> None:
    """Bars: how many times sooner than 1F1B, a group for each training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = [side for side in next(iter(ratios.values())) if side != "1F1B"]
    figure, axis = pyplot.subplots(figsize=(1.3 * len(ratios) + 2, 3.4), layout="constrained")
    width, colours = 0.8 / len(sides), pyplot.get_cmap("viridis")
    for i, side in enumerate(sides):
        heights = [of_sides[side] for of_sides in ratios.values()]
        places = [x + (i - (len(sides) - 1) / 2) * width for x in range(len(ratios))]
        axis.bar(places, heights, width, label=side, color=colours(i / len(sides)))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(ratios)), [",\n".join(training) for training in ratios], fontsize=8)
    axis.set_ylabel("times sooner at the goal than 1F1B", fontsize=9)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, ncols=len(sides))
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    result.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    result.add_argument("--pipelines", nargs="+", type=int, default=[2, 3], help="N")
    result.add_argument("--seeds", type=int, default=3)
    result.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    result.add_argument("--stages", type=int, default=2, help="K, a process for each")
    result.add_argument("--microbatches", type=int, default=2, help="M")
    result.add_argument("--megabits", type=int, default=100, help="per second, of the links")
    result.add_argument("--forward-ms", type=float, default=20.0)
    result.add_argument("--backward-ms", type=float, default=40.0)
    result.add_argument("--message-bytes", type=int, default=500_000, help="of a micro-batch")
    result.add_argument("--steps", type=int, default=28, help="of an epoch that is timed")
    result.add_argument("--rounds", type=int, default=3, help="of all sides; medians count")
    result.add_argument("--limit-s", type=float, default=900.0, help="for each round")
    result.add_argument("--quick", action="store_true", help="one training, one short round")
    result.add_argument("--json", type=Path, help="results file")
    result.add_argument("--resume", action="store_true", help="measure what the results file does not have")
    result.add_argument("--picture", type=Path)
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.quick:
        options.workloads, options.optimizers, options.pipelines = ["digits"], ["adam"], [2]
        options.seeds, options.rounds, options.steps = 1, 1, 12
        options.forward_ms, options.backward_ms, options.message_bytes = 10.0, 20.0, 60_000
    results = Results(options.json, options.resume)
    costs = trained.Costs(
        options.stages, options.microbatches, options.forward_ms, options.backward_ms, options.message_bytes,
        options.steps,
    )  # fmt: skip
    sides = strategies(costs, options.megabits, options.pipelines)
    links = [options.megabits]
    (seconds,) = trained.medians(results, costs, links, sides, options.rounds, options.limit_s).values()
    simulated = {side: trained.simulated(costs, options.megabits, strategy) for side, strategy in sides.items()}
    samples = measure_samples(results, list(sides), options)
    title = f"{options.stages} stages, {options.microbatches} micro-batches, links of {options.megabits} Mbit/s"
    ratios = sooner(seconds, samples)
    print(f"{title}\n\n{table(seconds, simulated, samples)}\n\n{best(ratios)}")
    if options.picture is not None:
        picture(ratios, options.picture, title)


if __name__ == "__main__":
    main(sys.argv[1:])

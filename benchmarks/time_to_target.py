"""Measure how much sooner elastic averaging reaches a goal than GPipe and 1F1B: seconds per batch times samples.

    python benchmarks/time_to_target.py --json target.json --picture docs/time_to_target.png   # as root
    python benchmarks/time_to_target.py --message-bytes 250000                    # a pipeline idle for less of the time
    python benchmarks/time_to_target.py --quick                                   # one training, one short round

The time to the goal is the product of two measurements:

- seconds per batch of a Trainer with a process for each stage, links of a limited rate and sleeps in place of compute
  (``trained.py``), all sides in turns;
- samples until the goal of three small trainings with three optimizers is reached (``statistical_efficiency.py``), as
  multiples of what one model needs. GPipe and 1F1B train as one model does, bit for bit. Models that roll average by
  the default rule without a barrier, the others with one. ``outer_lr`` is the default, the square root of N.

Memory is not compared: N models hold N times the weights, optimizer states and stashed micro-batches. Each measurement
is in the file of ``--json`` as soon as it is made, and a later run goes on from there.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, trained
from benchmarks.results import Results
from benchmarks.statistical_efficiency import OPTIMIZERS, Trial, train_all
from benchmarks.workloads import WORKLOADS
from lightning_avgpipe import Averaging
from lightning_avgpipe.schedule import first_advance, uneven_steps

MEGABITS = 100  # per second, of the links
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
    results: Results, sides: Sequence[str], trainings: Sequence[tuple[str, str]], seeds: int
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Of each training and side, by seed, as multiples of the median of one model; infinite if it was given up."""
    trials = {(*training, side, s): trial_of(side, *training, s)
              for training in trainings for side in sides for s in range(seeds)}  # fmt: skip
    singles = {trial.key: trial for (*_, side, _), trial in trials.items() if side in ONE}
    train_all(results, list(singles.values()), [trial for (*_, side, _), trial in trials.items() if side not in ONE])
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for training in trainings:
        of = {side: trials[*training, side, 0] for side in sides}
        samples = {side: results.samples(trial.training, trial.label, seeds) for side, trial in of.items()}
        unit = statistics.median(samples["1F1B"])
        found[training] = {side: [value / unit for value in each] for side, each in samples.items()}
    return found


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
    """Markdown: a column for each side."""
    ratios, sides = sooner(seconds, samples), list(seconds)
    rows: list[list[str]] = [
        ["seconds a batch (simulated)", *(f"{seconds[side]:.3f} ({simulated[side]:.3f})" for side in sides)],
        ["as fast as 1F1B", *(f"{seconds['1F1B'] / seconds[side]:.2f}x" for side in sides)],
    ]
    for training, needed in samples.items():
        cells = (f"{ratios[training][side]:.2f}x ({min(needed[side]):.2f} - {max(needed[side]):.2f})" for side in sides)
        rows.append([f"{', '.join(training)}: sooner (samples)", *cells])
    return harness.table(["", *sides], rows)


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
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    sides = [side for side in next(iter(ratios.values())) if side != "1F1B"]
    figure = Figure(figsize=(1.3 * len(ratios) + 2, 3.4), layout="constrained")
    axis, width, colours = figure.subplots(), 0.8 / len(sides), colormaps["viridis"]
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


def main() -> None:
    arguments = harness.parser(__doc__, quick="one training, one short round")
    arguments.add_argument("--message-bytes", type=int, default=500_000, help="of a micro-batch")
    arguments.add_argument("--picture", type=Path)
    options = arguments.parse_args()
    costs = trained.Costs(2, 2, 20.0, 40.0, options.message_bytes, 28)
    trainings, counts, seeds, rounds = [(w, name) for w in WORKLOADS for name in OPTIMIZERS], [2, 3], 3, 3
    if options.quick:
        costs = trained.Costs(2, 2, 10.0, 20.0, 60_000, 12)
        trainings, counts, seeds, rounds = [("digits", "adam")], [2], 1, 1
    results = Results(options.json, resume=True)
    sides = strategies(costs, MEGABITS, counts)
    seconds = trained.medians(results, costs, [MEGABITS], sides, rounds)[MEGABITS]
    simulated = {side: trained.simulated(costs, MEGABITS, strategy) for side, strategy in sides.items()}
    samples = measure_samples(results, list(sides), trainings, seeds)
    title = f"{costs.stages} stages, {costs.microbatches} micro-batches, links of {MEGABITS} Mbit/s"
    ratios = sooner(seconds, samples)
    print(f"{title}\n\n{table(seconds, simulated, samples)}\n\n{best(ratios)}")
    if options.picture is not None:
        picture(ratios, options.picture, title)


if __name__ == "__main__":
    main()

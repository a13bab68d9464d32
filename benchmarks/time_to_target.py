"""Measure how much sooner elastic averaging reaches a goal than GPipe and 1F1B: seconds per batch times samples.

    python benchmarks/time_to_target.py --json target.json --picture docs/time_to_target.png   # as root
    python benchmarks/time_to_target.py --parts time --megabits 100 1000          # batches per second alone
    python benchmarks/time_to_target.py --message-bytes 250000                    # a pipeline idle for less of the time
    python benchmarks/time_to_target.py --quick                                   # one training, one short round

The time to the goal is the product of two measurements:

- seconds per batch of a Trainer with a process for each stage, links of a limited rate and sleeps in place of compute
  (``trained.py``), all sides in turns. If 1F1B is idle for a share b of the time, N pipelines are at most
  N / (N - (N-1) b) times as fast with a barrier, and 1 / (1-b) times, but at most N, if they roll;
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, trained
from benchmarks.results import Results
from benchmarks.statistical_efficiency import OPTIMIZERS, Trial, train_all
from benchmarks.workloads import WORKLOADS
from lightning_avgpipe import Averaging
from lightning_avgpipe.schedule import first_advance, uneven_steps

PARTS = ["time", "samples"]
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
) -> trained.Samples:
    """Of each training and side, by seed."""
    trials = {(*training, side, s): trial_of(side, *training, s)
              for training in trainings for side in sides for s in range(seeds)}  # fmt: skip
    singles = {trial.key: trial for (*_, side, _), trial in trials.items() if side in ONE}
    train_all(results, list(singles.values()), [trial for (*_, side, _), trial in trials.items() if side not in ONE])
    found: trained.Samples = {}
    for training in trainings:
        of = {side: trials[*training, side, 0] for side in sides}
        samples = {side: results.samples(trial.training, trial.label, seeds) for side, trial in of.items()}
        found[", ".join(training)] = samples
    return found


def idle(costs: trained.Costs, seconds: trained.Seconds) -> Iterator[str]:
    """A line for each link: for how much of the time 1F1B is idle, and what that allows."""
    for link, of_sides in seconds.items():
        busy = costs.microbatches * (costs.forward_ms + costs.backward_ms) / 1e3 / of_sides["1F1B"][0]
        limit = f"models that roll are at most {1 / busy:.2f}x as fast, and at most N times"
        yield f"{link} Mbit/s: 1F1B is idle for {1 - busy:.0%}, so {limit}"


def best(ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """A line for each training: its best elastic side beside 1F1B and GPipe."""
    for training, of_sides in ratios.items():
        gains = {side: statistics.median(each) for side, each in of_sides.items()}
        side = max((side for side in gains if side not in ONE), key=gains.__getitem__)
        sooner_by = (
            f"{side} is at the goal {gains[side]:.2f}x sooner than 1F1B, "
            f"{gains[side] / gains['GPipe']:.2f}x sooner than GPipe"
        )
        yield f"{training}: {sooner_by if gains[side] else 'with N models the goal is not reached'}"


def main() -> None:
    arguments = harness.parser(__doc__, quick="one training, one short round")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--megabits", type=int, nargs="+", default=[100], help="per second, of the links")
    arguments.add_argument("--message-bytes", type=int, default=500_000, help="of a micro-batch")
    arguments.add_argument("--picture", type=Path)
    options = arguments.parse_args()
    costs = trained.Costs(2, 2, 20.0, 40.0, options.message_bytes, 28)
    trainings, counts, seeds, rounds = [(w, name) for w in WORKLOADS for name in OPTIMIZERS], [2, 3], 3, 3
    if options.quick:
        costs = trained.Costs(2, 2, 5.0, 10.0, 60_000, 12)
        trainings, counts, seeds, rounds = [("digits", "adam")], [2], 1, 1
    results = Results(options.json, resume=True)
    seconds: trained.Seconds = {}
    for link in options.megabits if "time" in options.parts else ():
        seconds |= trained.medians(results, costs, [link], strategies(costs, link, counts), rounds)
    sides = list(strategies(costs, options.megabits[0], counts))
    samples = measure_samples(results, sides, trainings, seeds) if "samples" in options.parts else {}
    ratios = trained.sooner(seconds, samples, "1F1B")
    print(f"{costs.stages} stages, {costs.microbatches} micro-batches\n")
    print(f"{trained.compared(seconds, samples, '1F1B')}\n", *idle(costs, seconds), *best(ratios), sep="\n")
    if options.picture is not None and ratios:
        harness.bars(ratios, len(OPTIMIZERS), "times sooner at the goal than 1F1B; points: seeds", options.picture)


if __name__ == "__main__":
    main()

"""Which predictor finds the fastest setting? Random pipelines, profiled at one setting, judged by simulation.

    python benchmarks/predictors.py                 # seconds
    python benchmarks/predictors.py --schedule advance_forward --advance 1

Each pipeline has uneven stages, links of its own and utilisation curves in several pieces. It is profiled with many
micro-batches and one pipeline; the simulation shares devices and links among all pipelines, see ``schedule.simulator``.
Regret is how much longer than the best setting's the time per batch of the predicted best is; rank correlation
(Spearman) and error are over the settings of a pipeline, and their means over the pipelines are shown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import operator
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_avgpipe.planning import Link
from lightning_avgpipe.tuning import Corrected, Curve, Device, HopProfile, Paper, Profile, Setting, Simulator
from lightning_avgpipe.tuning.profile import StageMemory, StageProfile

PREDICTORS = (Paper(), Paper(growing=False), Corrected())
BATCH_SIZE, PROFILED_MICROBATCHES = 64, 64
MICROBATCHES, PIPELINES = (4, 8, 16, 32), (1, 2, 4)


@dataclass(frozen=True)
class Row:
    """How well a predictor chooses."""

    predictor: str
    mean_regret: float
    worst_regret: float
    rank_correlation: float
    mean_error: float


def random_profile(seed: int, in_turns: bool = False) -> Profile:
    """A pipeline of 2 to 6 stages, profiled at M=64 and N=1; the same for the same seed."""
    rng = random.Random(seed)
    num_stages = rng.randint(2, 6)
    fullness, transfer = rng.uniform(0.02, 0.4), rng.uniform(0.02, 1.0)
    mib = 2**20

    def curve(seconds: float) -> Curve:
        shares = [rng.uniform(0.2, 1) for _ in range(4)]
        used = [min(1.0, fullness * rng.uniform(0.2, 1.8)) for _ in shares]
        total = functools.reduce(operator.add, shares)  # sum() rounds otherwise from Python 3.12 on
        return Curve(tuple(seconds * share / total for share in shares), tuple(used))

    stages = []
    for _ in range(num_stages):
        forward_s = 1e-3 * rng.uniform(0.7, 1.3)
        memory = StageMemory(
            300 * mib, rng.randint(50, 200) * mib, rng.randint(20, 80) * mib, rng.randint(100, 900) * mib,
            rng.randint(10, 90) * mib, rng.randint(1, 30) * mib,
        )  # fmt: skip
        stages.append(StageProfile(curve(forward_s), curve(forward_s * rng.uniform(1.5, 2.5)), memory))
    hops = []
    for _ in range(num_stages - 1):
        size = 1e5 * rng.uniform(0.5, 1.5)
        link = Link(transfer * 1e-3 * fullness / 1e5, rng.uniform(0, 1e-4))
        hops.append(HopProfile(size, size, link, link))
    device = Device("synthetic", 8 * 2**30, in_turns)
    return Profile(PROFILED_MICROBATCHES, 1, BATCH_SIZE, tuple(stages), tuple(hops), device)


def compare(profiles: Sequence[Profile], schedule: str = "afab", advance: int = 0) -> list[Row]:
    """A row per predictor, over all settings of all profiles."""
    settings = [Setting(m, n, advance, schedule) for m, n in itertools.product(MICROBATCHES, PIPELINES)]
    truths = [[Simulator().predict(profile, s).per_batch_s for s in settings] for profile in profiles]
    rows = []
    for predictor in PREDICTORS:
        regrets, correlations, errors = [], [], []
        for profile, truth in zip(profiles, truths, strict=True):
            predicted = [predictor.predict(profile, s).per_batch_s for s in settings]
            regrets.append(truth[predicted.index(min(predicted))] / min(truth) - 1)
            correlations.append(statistics.correlation(ranks(predicted), ranks(truth)))
            errors.append(statistics.mean(abs(p / t - 1) for p, t in zip(predicted, truth, strict=True)))
        rows.append(
            Row(
                predictor.name,
                statistics.mean(regrets),
                max(regrets),
                statistics.mean(correlations),
                statistics.mean(errors),
            )
        )
    return rows


def ranks(values: Sequence[float]) -> list[float]:
    """Mean rank among equals; Python 3.11 has no rank correlation."""
    return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]


def table(rows: Sequence[Row]) -> str:
    """One line per predictor."""
    lines = ["predictor                      regret mean / worst   rank correlation   error"]
    for row in rows:
        regret = f"{row.mean_regret:.1%} / {row.worst_regret:.0%}"
        lines.append(f"{row.predictor:31s}{regret:>19s}   {row.rank_correlation:+16.2f}   {row.mean_error:5.1%}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pipelines", type=int, default=80, help="random ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--schedule", choices=["afab", "advance_forward", "1f1b"], default="afab")
    parser.add_argument("--advance", type=int, default=0)
    parser.add_argument("--in-turns", action="store_true", help="devices run one action at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    profiles = [random_profile(options.seed + i, options.in_turns) for i in range(options.pipelines)]
    rows = compare(profiles, options.schedule, options.advance)
    settings = len(MICROBATCHES) * len(PIPELINES)
    print(f"{options.pipelines} pipelines, {settings} settings each, {time.perf_counter() - begin:.1f} s")
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

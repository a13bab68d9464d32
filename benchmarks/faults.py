"""Faults: each of four processes, two groups of two, is killed in each phase; the other group goes on.

It trains to the end, and from the death on as a run of one group does, bit for bit; each epoch has a whole checkpoint.
Each line has the seconds from the kill to the end of the next iteration, and the loss of validation at the end, with
that of runs of one group and of two in which nobody dies::

    python benchmarks/faults.py --seeds 20
    python benchmarks/faults.py --ranks 3 --phases forward sum

With ``--back`` every group but one is killed instead, and started anew. All come back, and train on as a run of all
groups does from the last checkpoint before; each line has the seconds from the kill to the next step of all groups, and
how many whole epochs passed meanwhile::

    python benchmarks/faults.py --back --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import comeback
from tests.survival import PHASES, WRITES, Death, check, unharmed

WIDTHS = (8, 12, 6, 10, 11, 9, 12, 13)


def losses(seeds: int, groups: int, epochs: int) -> float:
    """The mean loss of runs in which nobody dies."""
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(unharmed(Path(folder), groups, seed, epochs))
    return statistics.mean(found)


def back(seeds: int) -> None:
    """Kill every group but one of two and of three, of one and of two processes, and bring them back."""
    print(f"{'groups':8}{'processes':11}{'killed in':12}{'runs':>6}{'median s':>10}{'longest s':>11}{'epochs':>9}")
    for groups, size in ((2, 1), (2, 2), (3, 1)):
        plan = comeback.Plan(size=size, groups=groups, optimizer="sgd", strategy=(("alpha", 1.0),))
        others = [size * group for group in range(1, groups - 1)]
        for phase in ("forward", "between", "validation"):
            found = []
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as folder:
                    death = Death(size * groups - 1, phase, seed=seed)
                    found.append(comeback.check(death, Path(folder), plan, others))
            seconds, epochs = zip(*found, strict=True)
            times = f"{statistics.median(seconds):10.1f}{max(seconds):11.1f}{statistics.mean(epochs):9.1f}"
            print(f"{groups:<8}{size:<11}{phase:12}{len(found):6}{times}", flush=True)


def line(*cells: str) -> None:
    first, second, *rest = cells
    texts = [f"{first:{WIDTHS[0]}}{second:{WIDTHS[1]}}"]
    print("".join(texts + [f"{text:>{width}}" for text, width in zip(rest, WIDTHS[2:], strict=True)]), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--back", action="store_true")
    options = parser.parse_args(arguments)
    if options.back:
        back(options.seeds)
        return
    line("killed", "in", "runs", "median s", "longest s", "loss", "one group", "two groups")
    lengths = {Death(0, phase).epochs for phase in options.phases}
    alike = {epochs: [losses(options.seeds, groups, epochs) for groups in (1, 2)] for epochs in lengths}
    for rank in options.ranks:
        for phase in options.phases:
            if phase == WRITES and rank:
                continue
            found = []
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(check(Death(rank, phase, seed=seed), Path(folder)))
            seconds, loss = zip(*found, strict=True)
            numbers = statistics.mean(loss), *alike[Death(rank, phase).epochs]
            times = statistics.median(seconds), max(seconds)
            line(f"rank {rank}", phase, f"{len(found)}", *(f"{t:.1f}" for t in times), *(f"{x:.4f}" for x in numbers))


if __name__ == "__main__":
    main()

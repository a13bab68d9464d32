"""Faults: each of four processes, two groups of two, is killed in each phase; the other group goes on, or all end.

When a process of group 1 is killed, group 0 trains to the end, and from the death on as a run of one group does, bit
for bit: each line has the seconds from the kill to the end of its next iteration. When one of group 0 is, all end::

    python benchmarks/faults.py --seeds 20
    python benchmarks/faults.py --ranks 3 --phases forward sum
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.survival import PHASES, Death, check, happen


def seconds(death: Death, folder: Path) -> float:
    """From the death to the end of the next iteration, or if the others cannot go on, of the last process."""
    if death.rank // 2:
        return check(death, folder)
    outcomes = happen(death, folder)
    assert all(outcome.exit_code for outcome in outcomes), [outcome.exit_code for outcome in outcomes]
    return max(outcome.ended for outcome in outcomes) - float((folder / "struck").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    options = parser.parse_args(arguments)
    print(f"{'killed':8}{'in':12}{'others':12}{'runs':>6}{'median s':>10}{'longest s':>11}")
    for rank in options.ranks:
        for phase in options.phases:
            found = []
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(seconds(Death(rank, phase, seed=seed), Path(folder)))
            others = "go on" if rank // 2 else "end"
            what = f"rank {rank}"
            print(
                f"{what:8}{phase:12}{others:12}{len(found):6}{statistics.median(found):10.1f}{max(found):11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

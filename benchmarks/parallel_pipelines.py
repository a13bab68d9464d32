"""Measure whether parallel pipelines fill each other's bubbles: batches per second with N = 1, 2, 3 pipelines.

    python benchmarks/parallel_pipelines.py                     # as root, for links of a limited rate

Two stages run in two processes, with a link of a limited rate in each direction. Measured are seconds per batch of a
Trainer's run, with Lightning's own work (see ``trained.py``), with and without ``rolling=True``. All numbers of
pipelines take turns in the same processes. Compute is a sleep that releases the core, so the time is that of the
schedule.

Also printed are the simulator's times, in which Lightning and optimizers take no time, and the limits for N pipelines,
if one is idle for a share b of the time: N / (N - (N-1) b) with a barrier, and 1 / (1-b), but at most N, if they roll.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import trained
from benchmarks.harness import parser, table, write
from lightning_avgpipe import Averaging
from lightning_avgpipe.schedule import first_advance, uneven_steps

FULL = trained.Costs(2, 2, 20.0, 40.0, 500_000, 28)
QUICK = trained.Costs(2, 2, 5.0, 10.0, 60_000, 12)


def measure(costs: trained.Costs, megabits: int, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for one pipeline, and for each other N with and without a barrier."""
    count, of_stages = costs.microbatches, costs.on(megabits)
    advance = first_advance(uneven_steps(of_stages), count, of_stages)
    settings = [(1, False), *((n, rolls) for n in counts if n > 1 for rolls in (False, True))]
    strategies = [
        {"num_pipelines": n, "averaging": Averaging(rolling=rolls), "advance": advance} for n, rolls in settings
    ]
    seconds = trained.measure(costs, megabits, strategies, rounds)
    expected = [trained.simulated(costs, megabits, strategy) for strategy in strategies]
    idle = 1 - count * (costs.forward_ms + costs.backward_ms) / 1e3 / seconds[0]
    return [
        {
            "megabits": megabits, "microbatches": count, "pipelines": n, "rolling": rolls, "idle": idle,
            "seconds": found, "over_one": seconds[0] / found, "simulated_over_one": expected[0] / simulated,
            "limit": min(n, 1 / (1 - idle)) if rolls else n / (n - (n - 1) * idle),
        }
        for (n, rolls), found, simulated in zip(settings, seconds, expected, strict=True)
    ]  # fmt: skip


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """One line per setting."""
    head = ["Mbit/s", "M", "N", "rolling", "idle, N=1", "s a batch", "over N=1", "simulated", "limit"]
    lines = [
        (*(row[name] for name in ("megabits", "microbatches", "pipelines", "rolling")), f"{row['idle']:.1%}",
         f"{row['seconds']:.4f}", *(f"{row[name]:.2f}x" for name in ("over_one", "simulated_over_one", "limit")))
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    arguments = parser(__doc__, quick="two N, one link, one short round")
    arguments.add_argument("--microbatches", type=int, default=2, help="M of each batch")
    options = arguments.parse_args()
    costs, counts, links, rounds = (QUICK, [1, 2], [100], 1) if options.quick else (FULL, [1, 2, 3], [100, 1000], 3)
    costs = replace(costs, microbatches=options.microbatches)
    rows = [row for link in links for row in measure(costs, link, counts, rounds)]
    print(f"a Trainer, with and without a barrier\n\n{compared(rows)}")
    write(options, rows)


if __name__ == "__main__":
    main()

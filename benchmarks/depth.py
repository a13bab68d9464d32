"""Measure what a stage costs above its kernels, when 5 or 50 blocks come before it.

Forward and backward of one micro-batch of a middle stage and of the last one, two blocks each, in three ways:

- by hand: the blocks as a module, with torch alone;
- followed: the Python of the user's step runs, without the work of earlier stages;
- repeated: the operations run that were written down when the step was followed (``static_step``).

The ways take turns, round by round, in one process with one thread. Printed is the CPU time of the thread: medians over
the rounds.

    python benchmarks/depth.py                     # half a minute
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parser, table, write
from benchmarks.models import HandWritten, LanguageModel, Size, example
from benchmarks.stages_alone import StagesAlone, thread_seconds
from lightning_avgpipe.capture.tracer import intercepting, uncompiled
from lightning_avgpipe.engine.execution import Execution
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build

DEPTHS, ROUNDS = (5, 50), 100  # blocks in front
NUM_STAGES, OWN = 3, 2  # blocks of each stage but the first
_WARMING = 5  # rounds that do not count


def stages(model: LanguageModel, batch: Any, depth: int, static: bool) -> StagesAlone:
    """The stages of a model in this process, which have run twice."""
    cuts = [f"blocks.{depth}", f"blocks.{depth + OWN}"]
    conditions = Conditions(build("1f1b", NUM_STAGES, 1))
    plan = Planner(Divisible(model), NUM_STAGES, cuts).plan(
        Step("training_step", model.training_step, (batch, 0)), conditions
    )
    made = StagesAlone(model, batch, plan.graph, plan.cuts, Execution(static=static))
    for _ in range(2):  # in the first iteration every micro-batch is followed
        made.forward()
    return made


def rows(depth: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a model with so many blocks in front; a row per stage, in seconds."""
    torch.manual_seed(0)
    size = Size(width=64, layers=depth + 2 * OWN, samples=2, length=32)
    model, batch = LanguageModel(size), example(size, 1)
    found = []
    with intercepting(), uncompiled():  # as an iteration does
        followed, repeated = (stages(model, batch, depth, static) for static in (False, True))

        def clear() -> None:
            followed.clear()
            repeated.clear()

        for number, name in ((1, "middle"), (2, "last")):
            hidden = followed.hidden(number)
            gradient = torch.randn_like(hidden) if name == "middle" else None
            blocks = model.blocks[depth + (number - 1) * OWN :][:OWN]
            own = nn.Sequential(*blocks) if name == "middle" else nn.Sequential(*blocks, model.norm, model.head)
            other = batch[1] if gradient is None else gradient
            sides: dict[str, Callable[[], object]] = {
                "by_hand": partial(HandWritten(own, gradient is None), hidden, other),
                "followed": partial(followed.run, number, gradient),
                "repeated": partial(repeated.run, number, gradient),
            }
            seconds = thread_seconds(model, sides, rounds, _WARMING, clear)
            medians = {side: statistics.median(each) for side, each in seconds.items()}
            found.append({"depth": depth, "stage": name, **medians})
    return found


def compared(found: Sequence[dict[str, Any]]) -> str:
    """One line per stage."""
    lines = []
    for row in found:
        more = (f"{(row[name] - row['by_hand']) * 1e6:.0f} us" for name in ("followed", "repeated"))
        lines.append((row["depth"], row["stage"], f"{row['by_hand'] * 1e6:.0f} us", *more))
    return table(["blocks in front", "stage", "by hand", "followed: more", "repeated: more"], lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found = [row for depth in DEPTHS for row in rows(depth, ROUNDS)]
    print(compared(found), flush=True)
    write(options, found)


if __name__ == "__main__":
    main()

"""What does a stage cost above its kernels, with so many blocks in front of it?

The same micro-batch, forward and backward, of a stage in the middle and of the last one, two blocks each,

- by hand: the blocks as a module, with torch alone;
- followed: the Python of the user's step runs, and what earlier stages do is left out;
- repeated: the operations that were written down when the step was followed (``static_step``).

All three take turns, round by round, in one process with one thread; CPU time of the thread, medians over rounds.

    python benchmarks/depth.py                     # half a minute
    python benchmarks/depth.py --depths 5 100 --json depth.json
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import write
from benchmarks.models import LanguageModel, Size, begin, example, loss_of
from lightning_avgpipe.capture.tracer import intercepting, uncompiled
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.execution import Execution
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from lightning_avgpipe.weights.tied import TiedParameters

NUM_STAGES, OWN = 3, 2  # blocks of each stage but the first
STEP, DEVICE = "training_step", torch.device("cpu")
_WARMING = 5  # rounds that do not count


class Stages:
    """The stages of a model in this process, and what they do with one micro-batch."""

    def __init__(self, model: LanguageModel, batch: Any, depth: int, static: bool) -> None:
        cuts = [f"blocks.{depth}", f"blocks.{depth + OWN}"]
        plan = Planner(Divisible(model), NUM_STAGES, cuts).plan(Step(STEP, model.training_step, (batch, 0)))
        process = Process(0, DEVICE, 60.0, ProcessGroups(0, DEVICE, timedelta(minutes=1)))
        copies, execution = TiedParameters(model, Cluster(StageMap(NUM_STAGES), process), {}), Execution(static=static)
        programs = stage_programs(plan.graph, plan.cuts)
        self.stages = [Stage(program, model, DEVICE, copies, execution) for program in programs]
        self.task = Task(
            lambda i, *args: model.training_step(*args), [(batch, 0)], lambda i, loss: loss,
            around=lambda i: contextlib.nullcontext(),
        )  # fmt: skip
        for _ in range(2):  # in the first iteration every micro-batch is followed
            for stage in self.stages:
                stage.begin(())
            self.messages: list[Message | None] = [None]
            for stage in self.stages:
                self.messages.append(stage.perform(Action(FORWARD, 0), self.task, self.messages[-1]))
                stage.clear()

    def received(self, number: int) -> Tensor:
        """What a stage receives."""
        message = self.messages[number]
        assert message is not None and message.tensors[0] is not None
        return message.tensors[0]

    def run(self, number: int, gradient: Tensor | None) -> None:
        """Run forward and backward of a stage."""
        stage = self.stages[number]
        stage.perform(Action(FORWARD, 0), self.task, self.messages[number])
        stage.perform(Action(BACKWARD, 0), self.task, None if gradient is None else Message(0, (gradient,)))

    def clear(self) -> None:
        """End the iteration, which is not timed."""
        for stage in self.stages:
            stage.clear()


def rows(depth: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a model with so many blocks in front; a row per stage, in seconds."""
    torch.manual_seed(0)
    size = Size(width=64, layers=depth + 2 * OWN, samples=2, length=32)
    model, batch = LanguageModel(size), example(size, 1)
    found = []
    with intercepting(), uncompiled():  # as an iteration does
        followed, repeated = (Stages(model, batch, depth, static) for static in (False, True))
        for number, name in ((1, "middle"), (2, "last")):
            hidden = followed.received(number)
            gradient = torch.randn_like(hidden) if name == "middle" else None
            blocks = model.blocks[depth + (number - 1) * OWN :][:OWN]
            own = nn.Sequential(*blocks) if name == "middle" else nn.Sequential(*blocks, model.norm, model.head)
            sides: dict[str, Callable[[], None]] = {
                "by_hand": partial(by_hand, own, hidden, gradient, batch[1]),
                "followed": partial(followed.run, number, gradient),
                "repeated": partial(repeated.run, number, gradient),
            }
            found.append({"depth": depth, "stage": name, **in_turns(model, sides, rounds, (followed, repeated))})
    return found


def by_hand(own: nn.Module, hidden: Tensor, gradient: Tensor | None, targets: Tensor) -> None:
    """Run forward and backward of a stage as torch alone does; the last stage has no gradient to begin from."""
    leaf = hidden.detach().requires_grad_()
    output = loss_of(own(leaf), targets) if gradient is None else own(leaf)
    torch.autograd.backward((output,), (gradient,))


def in_turns(
    model: nn.Module, sides: dict[str, Callable[[], None]], rounds: int, ours: Sequence[Stages]
) -> dict[str, float]:
    """Seconds of each side, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + _WARMING):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            begin(model)
            before = time.thread_time()
            sides[name]()
            seconds[name].append(time.thread_time() - before)
            for stages in ours:
                stages.clear()
    return {name: statistics.median(values[_WARMING:]) for name, values in seconds.items()}


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line per stage."""
    lines = ["blocks in front   stage     by hand   followed: more   repeated: more"]
    for row in found:
        more = [(row[name] - row["by_hand"]) * 1e6 for name in ("followed", "repeated")]
        begin = f"{row['depth']:15d}   {row['stage']:6s} {row['by_hand'] * 1e6:7.0f} us"
        lines.append(f"{begin} {more[0]:13.0f} us {more[1]:13.0f} us")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [row for depth in options.depths for row in rows(depth, options.rounds)]
    print(table(found), flush=True)
    write(options, found)


if __name__ == "__main__":
    main(sys.argv[1:])

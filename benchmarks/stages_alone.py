"""Run the stages of a model alone in one process, and measure the CPU time that they and other sides take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import TIMEOUT
from benchmarks.models import begin
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.execution import Execution
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from lightning_avgpipe.weights.tied import TiedParameters


class StagesAlone:
    """The stages of a model in this process, and what they do with the same micro-batches.

    Args:
        model: the model, with a ``training_step``.
        batch: one micro-batch; all are alike.
        graph: calls of the step.
        cuts: where the graph is cut into stages.
        execution: how stages execute their calls.
        num_microbatches: number of micro-batches of an iteration.

    Attributes:
        received: what each stage receives, for each micro-batch.
    """

    def __init__(
        self, model: nn.Module, batch: Any, graph: CallGraph, cuts: Sequence[int], execution: Execution,
        num_microbatches: int = 1,
    ) -> None:  # fmt: skip
        device = torch.device("cpu")
        process = Process(0, device, TIMEOUT.total_seconds(), ProcessGroups(0, device, TIMEOUT))
        copies = TiedParameters(model, Cluster(StageMap(len(cuts) + 1), process), {})
        self.stages = [Stage(program, model, device, copies, execution) for program in stage_programs(graph, cuts)]
        step: Any = model.training_step
        self._task = Task(
            lambda i, *args: step(*args), [(batch, 0)] * num_microbatches, lambda i, loss: loss,
            around=lambda i: nullcontext(),
        )  # fmt: skip
        self.received: list[list[Message | None]] = [[None] * num_microbatches]

    def forward(self) -> None:
        """Run the forwards of an iteration of all stages."""
        del self.received[1:]
        for stage in self.stages:
            stage.begin(())
            sent = [stage.perform(Action(FORWARD, i), self._task, m) for i, m in enumerate(self.received[-1])]
            self.received.append(sent)
        self.clear()

    def hidden(self, number: int) -> Tensor:
        """What a stage behind the first one receives for a micro-batch."""
        message = self.received[number][0]
        assert message is not None and message.tensors[0] is not None
        return message.tensors[0]

    def run(self, number: int, gradient: Tensor | None) -> None:
        """Run forward and backward of a stage, for each micro-batch; the last one has no gradient to begin from."""
        stage = self.stages[number]
        for i, message in enumerate(self.received[number]):
            stage.perform(Action(FORWARD, i), self._task, message)
            stage.perform(Action(BACKWARD, i), self._task, None if gradient is None else Message(i, (gradient,)))

    def iterate(self, number: int, gradient: Tensor | None) -> None:
        """Run the same as an iteration, of which only the first micro-batch is followed."""
        self.stages[number].begin(())
        self.run(number, gradient)
        self.stages[number].clear()

    def clear(self) -> None:
        """End the iteration."""
        for stage in self.stages:
            stage.clear()


def thread_seconds(
    model: nn.Module, sides: Mapping[str, Callable[[], object]], rounds: int, warming: int,
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of this thread's CPU time that each side takes in each round, in turns.

    Args:
        model: the model, whose gradients are cleared before each.
        sides: what takes turns.
        rounds: number of rounds.
        warming: number of rounds before these, which do not count.
        after: function that is called after each side, and not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + warming):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            begin(model)
            before = time.thread_time()
            sides[name]()
            seconds[name].append(time.thread_time() - before)
            after()
    return {name: values[warming:] for name, values in seconds.items()}

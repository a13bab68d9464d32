"""The frozen prefix of a stage: the stages before that run forwards only, and what is kept of their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs
from lightning_avgpipe.engine.path import Path
from lightning_avgpipe.engine.replay import Replayed
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram


class FrozenPrefix:
    """What a stage's forwards begin with, where layers before it, or its first ones, are frozen.

    Args:
        program: of the stage.
        device: where it computes.
        kept: the first stage that trains keeps here what the frozen layers give, and begins behind them.

    Attributes:
        stages: how many, from the first, run forwards only while others train.
    """

    def __init__(self, program: StageProgram, device: torch.device, kept: FrozenOutputs | None) -> None:
        self.stages = 0
        self._program = program
        self._device = device
        self._kept = kept
        self._rests: dict[int, StageProgram] = {}  # what is left of the program, by where it begins

    def entering(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """What a forward begins with: what the stage before has sent, or what is kept.

        Raises:
            StepChangedError: that stage does something else.
        """
        stage, num_stages = self._program.stage, self._program.num_stages
        if self._kept is not None and micro_batch in task.known:
            return self._kept.read(micro_batch, self._device, self.stages)
        if message is not None and message.micro_batch != micro_batch:
            raise StepChangedError(
                f"stage {stage} wants micro-batch {micro_batch} and received {message.micro_batch}; the stages do not "
                "run the same schedule"
            )
        if message is not None and message.forward_only != self.stages:
            raise StepChangedError(
                f"of {num_stages} stages the first {message.forward_only} have nothing to train as stage {stage - 1} "
                f"sees it, and the first {self.stages} as stage {stage} sees it; freeze and unfreeze parameters on "
                "every process, not only if is_global_zero"
            )
        return message

    def rest(self, task: Task, micro_batch: int, message: Message | None) -> tuple[StageProgram, frozenset[int]]:
        """What is left of the program, and the positions in it at which :meth:`keep` wants what is there."""
        if self._kept is None or not task.trains:
            return self._program, frozenset()
        if micro_batch in task.known:
            begins = self._kept.begins(micro_batch)
            return self._rests.setdefault(begins, self._program.behind(begins)), self._kept.taps(micro_batch, begins)
        taps, start = self._kept.taps(micro_batch), self._program.start
        if start in taps and message is not None and not isinstance(message.entries, Path):
            self.keep(micro_batch, {start: ([t for t in message.tensors if t is not None], message.entries)})
        return self._program, taps

    def keep(self, micro_batch: int, tapped: Mapping[int, tuple[Any, Any]]) -> None:
        """Keep the values that were alive at positions, and what the nodes before have returned."""
        if self._kept is not None:
            for depth, tap in tapped.items():
                self._kept.fill(micro_batch, depth, *tap)

    def check_nothing_asks(self, replayed: Replayed) -> None:
        """Check that nothing that was computed with parameters waits for a gradient, which nobody will send.

        Raises:
            StepChangedError: something does.
        """
        # a leaf may ask for one: nothing was computed with parameters to get it
        if any(tensor.grad_fn is not None for tensor in replayed.sent):
            raise StepChangedError(
                f"stage {self._program.stage} has nothing to train by requires_grad of its parameters, and yet what it "
                f"computes asks for a gradient, which it did not when {self._program.graph.step} was captured: the "
                "step calls requires_grad_() in some batches only, or uses parameters that it did not use then. Set "
                "requires_grad of parameters before the step, and let the first batch do what all others do"
            )

"""Begin the forwards of a stage after stages that only run forwards, or after nodes whose outputs are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.part import Path, Replayed, Tapped
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.planning.trained import TrainedParameters
from lightning_avgpipe.schedule import Schedule


class Shortcut(Protocol):
    """A store of outputs of the first nodes of a step, from which the forwards of some micro-batches begin.

    Attributes:
        position: number of nodes, from the first, whose outputs are kept.
        stage: stage that begins with these outputs, the first one that trains.
        leaves: names of the tensors of a batch that identify a micro-batch.
    """

    position: int
    stage: int

    @property
    def leaves(self) -> frozenset[str]: ...

    def begin_epoch(self) -> None:
        """Begin an epoch of training. Every process calls it."""

    def known(self, samples: Sequence[tuple[Any, int]], schedule: Schedule, num_pipelines: int) -> frozenset[int]:
        """Return the micro-batches of an iteration that begin with kept outputs. Every process calls it.

        Args:
            samples: data and number of samples, by micro-batch.
            schedule: schedule of the iteration.
            num_pipelines: number of pipelines that train in it.
        """

    def read(self, micro_batch: int, device: torch.device, forward_only: int) -> Message:
        """Return the kept outputs for a known micro-batch, as a message of the stage before."""

    def wants(self, micro_batch: int) -> bool:
        """Return whether the outputs for a micro-batch should be passed to :meth:`fill`."""

    def fill(self, micro_batch: int, tensors: Sequence[Tensor], descriptions: Any) -> None:
        """Keep the values that are alive at the position, and descriptions of what the nodes before it returned."""


# Makes a shortcut from the position, the cluster, the call graph, the parameters that are trained now, and the stage.
ShortcutMaker = Callable[[int, Cluster, CallGraph, TrainedParameters, int], Shortcut]


class Prefix:
    """The first part of a stage's forwards: their input, and the program that they run.

    Args:
        program: program of the stage.
        device: device of the stage.
        shortcut: kept outputs with which the stage may begin; None: it has none.

    Attributes:
        stages: number of stages, from the first, that only run forwards while others train.
    """

    def __init__(self, program: StageProgram, device: torch.device, shortcut: Shortcut | None) -> None:
        self.stages = 0
        self._program = program
        self._device = device
        self._shortcut = shortcut
        self._rest = program if shortcut is None else program.from_position(shortcut.position)

    def entering(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Return the input of a forward: the message of the previous stage, or kept outputs.

        Raises:
            StepChangedError: the previous stage runs another micro-batch, or has another number of frozen stages.
        """
        stage, num_stages = self._program.stage, self._program.num_stages
        if self._shortcut is not None and micro_batch in task.starts_from_kept:
            return self._shortcut.read(micro_batch, self._device, self.stages)
        if message is not None and message.micro_batch != micro_batch:
            raise StepChangedError(
                f"stage {stage} expected micro-batch {micro_batch} and received {message.micro_batch}; the stages do "
                "not run the same schedule"
            )
        if message is not None and message.forward_only != self.stages:
            raise StepChangedError(
                f"stages {stage - 1} and {stage} of {num_stages} disagree about how many of the first stages have "
                f"nothing to train: {message.forward_only} or {self.stages}; freeze and unfreeze parameters on every "
                "process, not only if is_global_zero"
            )
        return message

    def rest(self, task: Task, micro_batch: int, message: Message | None) -> tuple[StageProgram, int]:
        """Return the program to run, and the position at which :meth:`keep` needs the values; 0 if it needs none."""
        if self._shortcut is None or not task.trains:
            return self._program, 0
        if micro_batch in task.starts_from_kept:
            return self._rest, 0
        if not self._shortcut.wants(micro_batch):
            return self._program, 0
        position = self._shortcut.position
        if position > self._program.start:
            return self._program, position
        if message is not None and not isinstance(message.descriptions, Path):  # the previous stage took no detour
            self._shortcut.fill(micro_batch, [t for t in message.tensors if t is not None], message.descriptions)
        return self._program, 0

    def keep(self, micro_batch: int, tapped: Tapped | None) -> None:
        """Keep the values at the position that :meth:`rest` returned, and what the nodes before it returned."""
        if self._shortcut is not None and tapped is not None:
            self._shortcut.fill(micro_batch, *tapped)

    def check_nothing_asks(self, replayed: Replayed) -> None:
        """Check that no output of a frozen stage depends on trained parameters, which would get no gradient.

        Raises:
            StepChangedError: one was.
        """
        # a leaf that requires a gradient is no error: it was not computed from parameters
        if any(tensor.grad_fn is not None for tensor in replayed.sent):
            raise StepChangedError(
                f"no parameter of stage {self._program.stage} has requires_grad, and yet what it computes requires a "
                f"gradient, which it did not when {self._program.graph.step} was captured: the "
                "step calls requires_grad_() in some batches only, or uses parameters that it did not use then. Set "
                "requires_grad of parameters before the step, and let the first batch do what all others do"
            )

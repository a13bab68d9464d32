"""A stage at work: its forwards, what they keep, and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.engine.compiling import Execution
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs
from lightning_avgpipe.engine.frozen_prefix import FrozenPrefix
from lightning_avgpipe.engine.halves import Halves
from lightning_avgpipe.engine.inspection import ForeignTensors
from lightning_avgpipe.engine.own_module import OwnModule
from lightning_avgpipe.engine.own_stream import OwnStream
from lightning_avgpipe.engine.path import Path
from lightning_avgpipe.engine.recompute import Observations, Repetition
from lightning_avgpipe.engine.replay import Observe, Replayed
from lightning_avgpipe.engine.stage_step import StageStep
from lightning_avgpipe.engine.stash import Gate, Inputs, Stash, entered
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ScheduleError, StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Schedule
from lightning_avgpipe.schedule.kinds import DOUBLE_FORWARD, GRAPH
from lightning_avgpipe.schedule.rules import check_can_run
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.weights.double import Double
from lightning_avgpipe.weights.store import WeightStore
from lightning_avgpipe.weights.tied import TiedParameters


class Stage:
    """Stage k of one pipeline.

    Args:
        program: its part of the step function.
        module: the whole module; parameters of other stages may be absent.
        device: where it computes.
        copies: parameters that other stages use as well, or several versions of the weights; or those of a stage whose
            forwards run here too.
        execution: what is repeated before, or in, a backward, and what is compiled.
        foreign_tensors: what its first forward of training must not use; None: it may use everything.
        shown: whether hooks on this process see what it made of attributes of modules.
        of_units: what the units of its pipeline make of theirs.
        kept: the first stage that trains keeps here what the frozen layers give, and begins behind them.
        double: the stage before, with weights of its own, if its forwards run here as well.
        relayed: whether what it receives goes on to the next stage.

    Attributes:
        program: as given.
        double: as given.
        module: what it makes of the module.
        stash: micro-batch -> what its forward keeps for its backward.
        results: on the last stage, what the step returned for each micro-batch.
        skipped: micro-batches without a loss, which had a backward nevertheless: it brought no gradients.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        device: torch.device,
        copies: TiedParameters | WeightStore | Double,
        execution: Execution = Execution(),  # noqa: B008
        foreign_tensors: ForeignTensors | None = None,
        shown: bool = True,
        of_units: OwnAttributes | None = None,
        kept: FrozenOutputs | None = None,
        double: Stage | None = None,
        relayed: bool = False,
    ) -> None:
        self.program = program
        self.double = double
        self.module = OwnModule(program, module, copies, of_units, shown)
        self._step = StageStep(program, module, device, foreign_tensors, execution.compiler)
        self._prefix = FrozenPrefix(program, device, kept)
        self._repetition = Repetition(self.module, device, execution.recompute, relayed)
        self._halves = Halves(program.stage)
        self.stash: dict[int, Stash | Inputs] = {}
        self.results: dict[int, Any] = {}
        self.skipped: set[int] = set()

    def begin(self, row: Sequence[Action], forward_only: int = 0, stream: OwnStream | None = None) -> None:
        """An iteration with these actions begins.

        Args:
            row: of this stage.
            forward_only: how many stages, from the first, run forwards only while others train.
            stream: on which they are performed; None: on the current one.
        """
        self._step.stream = stream
        self.module.attributes.begin()
        if self.double is not None:
            self.double.begin(())
        self._prefix.stages = forward_only
        self._halves.begin(any(action.kind is INPUT_GRADIENT for action in row))
        self.go_on(row)

    def go_on(self, row: Sequence[Action]) -> None:
        """These actions follow; a forward whose backward is not among them comes with those that do."""
        self._repetition.follow(row)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Within this context its actions are performed, and messages taken and sent."""
        stream = self._step.stream
        return nullcontext() if stream is None else stream.entered()

    def perform(self, action: Action, task: Task, message: Message | None) -> Message | None:
        """Run one action.

        Args:
            action: of a kind that :func:`check_runnable` accepts.
            task: the iteration's.
            message: that the action waits for; None if it waits for none.
        Returns:
            The message that it sends; None if it sends none.
        """
        with _profiled(f"avgpipe::{action}"):
            return _HANDLERS[action.kind](self, task, action.micro_batch, message)

    def _forward(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """What a forward keeps depends on whether it trains, and on whether it will be repeated."""
        program, message = self.program, self._prefix.entering(task, micro_batch, message)
        with self.module.placed() as copies:
            if task.trains and micro_batch in self._repetition:
                return self._forward_to_repeat(task, micro_batch, message, copies)
            gates, replayed = self._replay(task, micro_batch, message, copies)
            self._prefix.keep(micro_batch, replayed.tapped)
        if program.is_last:
            self.results[micro_batch] = replayed.result
            if task.finish is not None:  # the user's hooks see the module's own parameters, no copies
                # of a result with its graph the received values would stay until the iteration ends
                self.results[micro_batch] = tree.map_tensors(Tensor.detach, replayed.result)
                with self._halves.watch or nullcontext():
                    loss = self._step.loss(task.finish, micro_batch, replayed.result)
                self._keep(micro_batch, gates, () if loss is None else (loss,))
            return None
        if task.trains and program.stage < self._prefix.stages:
            self._prefix.check_nothing_asks(replayed)
        elif task.trains:
            self._keep(micro_batch, gates, _roots(replayed))
        return self._message(task, micro_batch, replayed)

    def _graph(self, task: Task, micro_batch: int, message: Message | None) -> None:
        """A forward for this stage's own backward: the next stage has computed what it would send."""
        assert message is not None
        versions = tuple(version_of(t) for t in message.tensors)
        self._forward(task, micro_batch, message)
        self._check_unchanged(message, versions, "whose tensors other stages may still read")

    def _double_forward(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """A forward of the stage before, which nobody needs the graph of here, and then this one's."""
        assert self.double is not None and message is not None
        return self._forward(task, micro_batch, self.double.ahead(task, micro_batch, message))

    def ahead(self, task: Task, micro_batch: int, message: Message) -> Message:
        """What a forward sends, with nothing kept for a backward.

        It does have a graph until it ends: which values ask for a gradient is seen from it, and operations may round
        otherwise where none is wanted.
        """
        with self.module.placed() as copies:
            _, replayed = self._replay(task, micro_batch, message, copies)
        return self._message(task, message.micro_batch, replayed)

    def _keep(self, micro_batch: int, gates: tuple[Gate, ...], roots: tuple[Tensor, ...]) -> None:
        self.stash[micro_batch] = Stash(gates, roots, "" if (watch := self._halves.watch) is None else watch.found)

    def _replay(
        self,
        task: Task,
        micro_batch: int,
        message: Message | None,
        copies: dict[int, str],
        observe: Observe | None = None,
    ) -> tuple[tuple[Gate, ...], Replayed]:
        """Execute this stage's part of the step; ``observe`` as for :func:`replay`."""
        program, taps = self._prefix.rest(task, micro_batch, message)
        gates: tuple[Gate, ...] = ()
        received: list[Tensor] = []
        if message is not None:
            values = self._received(message, program)
            gates, received = entered(message, values, task.trains, self._repetition.overwritten)
        entries = message.entries if message is not None else ()
        repeat, watch = self._repetition.units if task.trains else None, self._halves.watched()
        replayed = self._step.run(program, task, micro_batch, received, entries, copies, observe, repeat, taps, watch)
        return gates, replayed

    def _received(self, message: Message, program: StageProgram) -> tuple[int, ...]:
        """The numbers of a message's values."""
        return message.entries.values if isinstance(message.entries, Path) else program.receives

    def _message(self, task: Task, micro_batch: int, replayed: Replayed) -> Message:
        requires_grad = tuple(task.trains and tensor.requires_grad for tensor in replayed.sent)
        sent = tuple(t.detach() for t in replayed.sent)
        return Message(micro_batch, sent, requires_grad, replayed.entries, forward_only=self._prefix.stages)

    # -- repeated forwards ---------------------------------------------------------------------------------------------

    def _forward_to_repeat(
        self, task: Task, micro_batch: int, message: Message | None, copies: dict[int, str]
    ) -> Message | None:
        """A forward that keeps its inputs. What it computes lives until it ends, as it will in the backward."""
        surroundings = self._repetition.surroundings(self._step.rewritten.parameters())
        observations = Observations(self._step.observe)
        versions = tuple(version_of(t) for t in message.tensors) if message is not None else ()
        _, replayed = self._replay(task, micro_batch, message, copies, observations.first)
        surroundings.done()
        ending = None
        if self.program.is_last:
            assert task.finish is not None
            result = tree.map_tensors(_cut, replayed.result)
            self.results[micro_batch] = result
            leaves = tuple(tensor if tensor.requires_grad else None for tensor in tree.tensors(result))
            ending = self._step.loss(task.finish, micro_batch, result), leaves
        self.stash[micro_batch] = Inputs(task, message, versions, surroundings, observations, ending)
        return None if self.program.is_last else self._message(task, micro_batch, replayed)

    def _repeat(
        self, kept: Inputs, micro_batch: int, gradients: Message | None, copies: dict[int, str]
    ) -> tuple[Stash, Sequence[Tensor | None]]:
        """Execute a forward once more: what it would have kept, and the gradients of its roots."""
        if kept.message is not None:
            self._check_unchanged(
                kept.message, kept.versions, "and it cannot be repeated from it; or do without recompute"
            )
        with _profiled(f"avgpipe::R{micro_batch}"), kept.surroundings.again():
            gates, again = self._replay(kept.task, micro_batch, kept.message, copies, kept.observations.again())
        whole = "recompute, which would keep all that it repeats until then"
        if kept.ending is None:
            assert gradients is not None
            return Stash(gates, _roots(again), whole), gradients.tensors
        loss, leaves = kept.ending
        wanted = [leaf for leaf in leaves if leaf is not None]
        gradients_of: Sequence[Tensor | None] = [None] * len(wanted)
        if loss is not None and loss.requires_grad and wanted:
            gradients_of = torch.autograd.grad(loss, wanted, allow_unused=True)
        found = iter(gradients_of)
        roots = tuple(tree.tensors(again.result))
        return Stash(gates, roots, whole), [None if t is None else next(found) for t in leaves]

    def _check_unchanged(self, message: Message, versions: Sequence[int], why: str) -> None:
        graph = self.program.graph
        for value, tensor, version in zip(
            self._received(message, self.program), message.tensors, versions, strict=True
        ):
            if version_of(tensor) != version:
                name = f"'{graph.values[value].name}'" if value < len(graph.values) else "off the captured path"
                raise StepChangedError(
                    f"the value {name}, which stage {self.program.stage} received, was changed "
                    f"in place after {graph.step} was captured without such a change, {why}. Compute out of place"
                )

    def _backward(self, task: Task, micro_batch: int, message: Message | None, halve: bool = False) -> Message | None:
        """Gradients of this stage's parameters accumulate; those of what it received are sent back.

        Where it is halved the former wait for :meth:`_weight_gradient`, unless it cannot be.
        """
        stash = self.stash.pop(micro_batch)
        gradients: Sequence[Tensor | None] = (None,) if message is None else message.tensors
        skipped = stash.is_skipped if message is None else bool(message.entries)
        if skipped:
            self.skipped.add(micro_batch)
        alone = message is None  # a loss needs no gradient
        with self.module.placed() as copies:
            if isinstance(stash, Inputs):
                stash, gradients = self._repeat(stash, micro_batch, message, copies)
                alone = False
            pairs = [
                (root, gradient)
                for root, gradient in zip(stash.roots, gradients, strict=not skipped)
                if root.requires_grad and (gradient is not None or alone)
            ]
            if pairs:
                of = [root for root, _ in pairs], [gradient for _, gradient in pairs]
                if not (halve and self._halves.run_first(micro_batch, stash, *of)):
                    torch.autograd.backward(*of)
        if self.program.stage <= self._prefix.stages:  # the first of those that train
            return None
        return Message(micro_batch, tuple(gate.gradient for gate in stash.gates), entries=skipped)

    def _input_gradient(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """The half of a backward that the stage before waits for."""
        return self._backward(task, micro_batch, message, halve=True)

    def _weight_gradient(self, task: Task, micro_batch: int, message: Message | None) -> None:
        """The other half; nothing is left where the first ran whole, or had nothing to start from."""
        if (half := self._halves.left.pop(micro_batch, None)) is not None:
            with self.module.placed():
                half.run()

    def roots(self, micro_batch: int) -> tuple[Tensor, ...]:
        """What a backward begins with, of a forward that keeps it."""
        stash = self.stash[micro_batch]
        return stash.roots if isinstance(stash, Stash) else ()

    def clear(self) -> None:
        """Forget everything about unfinished micro-batches."""
        self.module.end()
        if self.double is not None:
            self.double.clear()
        self.stash.clear()
        self._halves.left.clear()
        self.results.clear()
        self.skipped.clear()


_HANDLERS: dict[Kind, Callable[[Stage, Task, int, Message | None], Message | None]] = {
    FORWARD: Stage._forward,
    BACKWARD: Stage._backward,
    INPUT_GRADIENT: Stage._input_gradient,
    WEIGHT_GRADIENT: Stage._weight_gradient,
    GRAPH: Stage._graph,
    DOUBLE_FORWARD: Stage._double_forward,
}


def check_runnable(schedule: Schedule) -> None:
    """Check that stages can run a schedule, before any of them begins.

    Raises:
        ScheduleError: it has a kind of actions that stages have no handler for, or several lines of stages.
    """
    check_can_run(schedule)
    kinds = dict.fromkeys(action.kind for row in schedule.rows for action in row)
    strange = [f"{kind.name} ({kind})" for kind in kinds if kind not in _HANDLERS]
    if strange:
        able = ", ".join(f"{kind.name} ({kind})" for kind in _HANDLERS)
        raise ScheduleError(
            f"the schedule {schedule.name!r} has actions that stages cannot run: {', '.join(strange)}; they can run "
            f"{able}. Use another schedule for training; this one can be simulated"
        )


def _roots(replayed: Replayed) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in replayed.sent if tensor.requires_grad)


def _cut(tensor: Tensor) -> Tensor:
    """The same numbers without history, such that a gradient can be asked for."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _profiled(name: str) -> AbstractContextManager[Any]:
    """A range in the trace of torch's profiler, if it runs: the range alone costs as much as a small operation."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()

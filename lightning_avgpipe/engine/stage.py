"""Run a stage: its forwards, what they keep, and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.codec import pickled
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.execution import Casts, Execution, OwnStream
from lightning_avgpipe.engine.own_module import OwnAttributes, OwnModule, Weights
from lightning_avgpipe.engine.part import Observe, OffPathNode, Part, Path, Replayed
from lightning_avgpipe.engine.prefix import Prefix, Shortcut
from lightning_avgpipe.engine.recompute import Observations, Repetition
from lightning_avgpipe.engine.stage_step import StageStep
from lightning_avgpipe.engine.task import Inputs, ReceivedLeaf, Stash, Task, enter_values
from lightning_avgpipe.engine.tensor_use import ForeignTensors, Lasting, explain_overwritten, registers_of, states_of
from lightning_avgpipe.errors import ScheduleError, StepChangedError, UnsendableError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action, Kind, Schedule
from lightning_avgpipe.schedule.rules import check_can_run
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import attributes
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import generators, restored
from lightning_avgpipe.utils.torch_compat import version_of

# Runs a backward, or a part of one: gets the gates of received values, the roots, and the gradients of the roots.
GraphRunner = Callable[[Sequence[ReceivedLeaf], list[Tensor], list[Tensor | None]], None]


class StagePart:
    """A part that a system adds to a stage: handlers of further kinds of actions, with state of their own.

    Attributes:
        handlers: kind of actions -> method of the part that runs one, with the arguments and result of
            :meth:`Stage.forward` after the stage. It comes before the stage's own handler of this kind, which it may
            call.
    """

    handlers: ClassVar[Mapping[Kind, Callable[[Any, Stage, Task, int, Message | None], Message | None]]]

    def begin(self, row: Sequence[Action]) -> None:
        """Begin an iteration with these actions."""

    def clear(self) -> None:
        """Forget everything about unfinished micro-batches."""


_NOTHING: AbstractContextManager[Any] = nullcontext()

PARTS: list[type[StagePart]] = []  # of every stage, registered by packages in ``systems``


class Stage:
    """Stage k of one pipeline, at work in this process.

    Args:
        program: the stage's part of the step function.
        module: the whole module; parameters of other stages may be absent.
        device: device of the stage.
        weights: weights that its actions use.
        execution: options for the execution of units.
        foreign_tensors: tensors that its first forward in training must not use; None: it may use all.
        is_visible: whether code outside of stages, such as hooks, sees this stage's values of attributes.
        of_units: attribute values of the units of its pipeline.
        shortcut: kept outputs of the nodes before it, with which forwards may begin; None: there are none.
        relayed: whether the values that it receives are relayed to the next stage.
        repeats: whether an earlier stage of this process also runs the code before this stage's part.

    Attributes:
        program: as given.
        module: the module as this stage sees it.
        execution: as given.
        stash: micro-batch -> what its forward keeps for its backward.
        results: micro-batch -> result of the step, on the last stage.
        skipped: micro-batches without a loss, whose backwards carried no gradients.
        parts: what systems add to the stage, by their classes.
        compiled: whether units run code that was compiled by ``torch.compile``, rather than the original.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        device: torch.device,
        weights: Weights,
        execution: Execution = Execution(),  # noqa: B008
        foreign_tensors: ForeignTensors | None = None,
        is_visible: bool = True,
        of_units: OwnAttributes | None = None,
        shortcut: Shortcut | None = None,
        relayed: bool = False,
        repeats: bool = False,
    ) -> None:
        self.program = program
        self.module = OwnModule(program, module, weights, of_units, is_visible)
        self.execution = execution
        self._device = device
        changes = dict.fromkeys(name for node in program.nodes for name in node.changes)
        changed = [name for name, _ in module.named_buffers() if name in changes]
        self._changed = registers_of(module, changed)  # buffers
        self._lasting = Lasting(program, module)
        seeding = [module.get_submodule(path) for path in sorted(program.graph.seeding)]
        self._seeding = list(dict.fromkeys(inner for outer in seeding for inner in outer.modules()))
        self._kept_by_seeding: dict[int, Snapshot] = {}
        self._step = StageStep(program, module, device, foreign_tensors, execution, repeats)
        self._prefix = Prefix(program, device, shortcut)
        self._repetition = Repetition(self.module, device, execution.recompute, relayed)
        # casts are kept if no hook or version changes weights in an iteration; compiled code makes its own
        constant = weights.constant and not execution.interrupted and not self._step.rewritten.parameters()
        self._casts = Casts() if constant and execution.compiler is None else None
        self.stash: dict[int, Stash | Inputs] = {}
        self.results: dict[int, Any] = {}
        self.compiled = self._step.compiled
        self.skipped: set[int] = set()
        self.parts = {part: part() for part in PARTS}
        self._has_peers = dist.is_initialized()  # whether there are other processes, which steps must not see
        self._handlers: dict[Kind, Callable[[Stage, Task, int, Message | None], Message | None]]
        self._handlers = {FORWARD: Stage.forward, BACKWARD: Stage.backward}
        for part in self.parts.values():
            self._handlers |= {kind: partial(run, part) for kind, run in part.handlers.items()}

    def begin(self, row: Sequence[Action], forward_only: int = 0, stream: OwnStream | None = None) -> None:
        """Begin an iteration with these actions.

        Args:
            row: actions of this stage.
            forward_only: number of stages, from the first, that run forwards only while others train.
            stream: stream on which the actions run; None: the current one.
        """
        self._step.begin(stream)
        self.module.attributes.begin()
        self._prefix.stages = forward_only
        for part in self.parts.values():
            part.begin(row)
        self._has_peers = dist.is_initialized()
        self.go_on(row)

    def go_on(self, row: Sequence[Action]) -> None:
        """Take further actions; the backward of each forward that is to be repeated must be among them."""
        self._repetition.follow(row)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Run actions, and take and send messages, on the stage's stream within this context."""
        stream = self._step.stream
        return nullcontext() if stream is None else stream.entered()

    def perform(self, action: Action, task: Task, message: Message | None) -> Message | None:
        """Run one action.

        Args:
            action: action of a kind that :func:`check_runnable` accepts.
            task: work of the iteration.
            message: input of the action; None if it has none.
        Returns:
            The message that it sends; None if it sends none.
        """
        if not (self._has_peers or torch.autograd._profiler_enabled()):
            return self._handlers[action.kind](self, task, action.micro_batch, message)
        with alone(), _range(f"avgpipe::{action} of stage {self.program.stage}"):
            return self._handlers[action.kind](self, task, action.micro_batch, message)

    def forward(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Run a forward; what it keeps depends on whether it trains, and on whether it will be repeated."""
        program, message = self.program, self._prefix.entering(task, micro_batch, message)
        with self.module.placed() as copies:
            if task.trains and micro_batch in self._repetition:
                return self._forward_to_repeat(task, micro_batch, message, copies)
            gates, replayed = self.replay(task, micro_batch, message, copies)
            self._prefix.keep(micro_batch, replayed.tapped)
            onward = None if program.is_last else self.message(task, micro_batch, replayed)
        if program.is_last:
            self.results[micro_batch] = replayed.result
            if task.finish is not None:  # outside of placed(): hooks see the module's own parameters
                # a result with its graph would keep the received values until the iteration ends
                self.results[micro_batch] = tree.map_tensors(Tensor.detach, replayed.result)
                loss = task.finish(micro_batch, replayed.result)
                self._keep(micro_batch, gates, () if loss is None else (loss,))
            return None
        if task.trains and program.stage < self._prefix.stages:
            self._prefix.check_nothing_asks(replayed)
        elif task.trains:
            self._keep(micro_batch, gates, _roots(replayed))
        return onward

    def _keep(self, micro_batch: int, gates: tuple[ReceivedLeaf, ...], roots: tuple[Tensor, ...]) -> None:
        if self._seeding:
            self._kept_by_seeding[micro_batch] = attributes(self._seeding)
        self.stash[micro_batch] = Stash(gates, roots)

    def replay(
        self,
        task: Task,
        micro_batch: int,
        message: Message | None,
        copies: dict[int, str],
        observe: Observe | None = None,
    ) -> tuple[tuple[ReceivedLeaf, ...], Replayed]:
        """Execute this stage's part of the step on a micro-batch; for ``observe``, see :class:`Part`."""
        program, tap = self._prefix.rest(task, micro_batch, message)
        gates: tuple[ReceivedLeaf, ...] = ()
        received: list[Tensor] = []
        if message is not None:
            values = self._received(message, program)
            gates, received = enter_values(message, values, task.trains, self._repetition.overwritten)
        descriptions, requests = (message.descriptions, message.requests) if message is not None else ((), ())
        part = Part(
            program,
            partial(task.run, micro_batch),
            task.args[micro_batch],
            received,
            descriptions,
            task.key_of(micro_batch),
            observe=observe or self._step.observe,
            repeat=self._repetition.units if task.trains else None,
            tap=tap,
            requests=requests,
        )
        with self._casts.reused() if self._casts is not None and task.trains else _NOTHING:
            replayed = self._step.run(part, task, micro_batch, copies)
        return gates, replayed

    def _received(self, message: Message, program: StageProgram) -> tuple[int, ...]:
        """Return the indices of a message's values."""
        return message.descriptions.values if isinstance(message.descriptions, Path) else program.receives

    def message(self, task: Task, micro_batch: int, replayed: Replayed) -> Message:
        """Return the message of a forward to the next stage; for use within the forward's :meth:`OwnModule.placed`."""
        requires_grad = tuple([task.trains and tensor.requires_grad for tensor in replayed.sent])
        sent = self._lasting.apart(replayed.sent)
        return Message(
            micro_batch,
            sent,
            requires_grad,
            replayed.descriptions,
            forward_only=self._prefix.stages,
            requests=replayed.requests,
        )

    def unsendable(self, message: Message, error: UnsendableError) -> UnsendableError:
        """Return an error that names the node whose result cannot be sent to the next stage."""
        path = message.descriptions.descriptions if isinstance(message.descriptions, Path) else message.descriptions
        what = f"stage {self.program.stage} sends something"
        for number, entry in enumerate(path):
            node, returned = entry if isinstance(entry, OffPathNode) else (self.program.graph.nodes[number], entry)
            try:
                pickled(returned)
            except UnsendableError as own:
                what, error = f"{node} returned something", own
                break
        return UnsendableError(
            f"{what} that cannot be pickled to go to the next stage, in another process: {error.__cause__}. Define its "
            "class at the top level of a module, return a tuple or a dict instead, or keep all that needs it on one "
            "stage with split_points"
        )

    # -- repeated forwards ---------------------------------------------------------------------------------------------

    def _forward_to_repeat(
        self, task: Task, micro_batch: int, message: Message | None, copies: dict[int, str]
    ) -> Message | None:
        """Run a forward that keeps only its inputs, from which the backward computes the activations again."""
        surroundings = self._repetition.surroundings()
        observations = Observations(self._step.observe)
        versions = tuple(version_of(t) for t in message.tensors) if message is not None else ()
        _, replayed = self.replay(task, micro_batch, message, copies, observations.first)
        surroundings.done()
        ending = None
        if self.program.is_last:
            assert task.finish is not None
            result = tree.map_tensors(_as_leaf, replayed.result)
            self.results[micro_batch] = result
            leaves = tuple(tensor if tensor.requires_grad else None for tensor in tree.tensors(result))
            ending = task.finish(micro_batch, result), leaves
        self.stash[micro_batch] = Inputs(task, message, versions, surroundings, observations, ending)
        return None if self.program.is_last else self.message(task, micro_batch, replayed)

    def _repeat(
        self, kept: Inputs, micro_batch: int, gradients: Message | None, copies: dict[int, str]
    ) -> tuple[Stash, Sequence[Tensor | None]]:
        """Repeat a forward; return the stash that it would have kept, and the gradients of its roots."""
        if kept.message is not None:
            self.check_unchanged(
                kept.message, kept.versions, "and it cannot be repeated from it; or do without recompute"
            )
        with _range(f"avgpipe::R{micro_batch} of stage {self.program.stage}"), kept.surroundings.again():
            gates, again = self.replay(kept.task, micro_batch, kept.message, copies, kept.observations.again())
        if kept.ending is None:
            assert gradients is not None
            return Stash(gates, _roots(again)), gradients.tensors
        loss, leaves = kept.ending
        wanted = [leaf for leaf in leaves if leaf is not None]
        gradients_of: Sequence[Tensor | None] = [None] * len(wanted)
        if loss is not None and loss.requires_grad and wanted:
            gradients_of = torch.autograd.grad(loss, wanted, allow_unused=True)
        found = iter(gradients_of)
        roots = tuple(tree.tensors(again.result))
        return Stash(gates, roots), [None if t is None else next(found) for t in leaves]

    def check_unchanged(self, message: Message, versions: Sequence[int], why: str) -> None:
        """Check that the tensors of a message still have these versions.

        Raises:
            StepChangedError: one was changed in place; ``why`` says why it must not be.
        """
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

    def backward(
        self, task: Task, micro_batch: int, message: Message | None, run: GraphRunner | None = None
    ) -> Message | None:
        """Run a backward: accumulate gradients of this stage's parameters, and return those of the received values.

        Args:
            task: work of the iteration.
            micro_batch: micro-batch.
            message: gradients of the sent values; None on the last stage.
            run: ``run(gates, roots, gradients)`` runs the graph, or a part of it; None: the whole graph.
        """
        stash = self.stash.pop(micro_batch)
        gradients: Sequence[Tensor | None] = (None,) if message is None else message.tensors
        skipped = stash.is_skipped if message is None else bool(message.descriptions)
        if skipped:
            self.skipped.add(micro_batch)
        begins = message is None  # a loss needs no incoming gradient
        with self.in_backward(micro_batch) as copies:
            if isinstance(stash, Inputs):
                stash, gradients = self._repeat(stash, micro_batch, message, copies)
                begins = False
            pairs = [
                (root, gradient)
                for root, gradient in zip(stash.roots, gradients, strict=not skipped)
                if root.requires_grad and (gradient is not None or begins)
            ]
            if pairs:
                before = states_of(self._changed)
                backwards = [root for root, _ in pairs], [gradient for _, gradient in pairs]
                if run is None:
                    torch.autograd.backward(*backwards)
                else:
                    run(stash.gates, *backwards)
                if before:
                    self._check_states(before, micro_batch)
        if self.program.stage <= self._prefix.stages:  # the first of those that train
            return None
        return Message(micro_batch, tuple(gate.gradient for gate in stash.gates), descriptions=skipped)

    def _check_states(self, before: Mapping[str, tuple[int, int]], micro_batch: int) -> None:
        """Check that a backward has changed no buffers after the forward of a later micro-batch.

        Raises:
            StepChangedError: it has changed a buffer, and the forward of a later micro-batch has already run.
        """
        later = [i for i in self.stash if i > micro_batch]
        changed = [name for name, now in states_of(self._changed).items() if now != before.get(name)] if later else []
        if changed:
            raise StepChangedError(
                f"the backward of a micro-batch changes '{changed[0]}' (torch.utils.checkpoint repeats the forward "
                f"that changes it), and stage {self.program.stage} has run the forward of the next micro-batch "
                "before, which would have found it changed. Use AvgPipeStrategy(recompute=...) in the place of "
                "checkpoint, which repeats without such effects, or keep the unit on the last stage with split_points"
            )

    @contextmanager
    def in_backward(self, micro_batch: int) -> Iterator[dict[int, str]]:
        """Run a backward, or a part of one, within this context; yields ``id -> name`` of copies of weights."""
        seeded = self._seeded(micro_batch) if micro_batch in self._kept_by_seeding else _NOTHING
        with self.module.placed() as copies, seeded:
            try:
                yield copies
            except RuntimeError as error:
                explain_overwritten(error, self.program, self.module.module)
                raise

    @contextmanager
    def _seeded(self, micro_batch: int) -> Iterator[None]:
        """Run a backward within this context that may seed torch's generators as its forward did (RevNets).

        Modules that seed, and their submodules, get back the attributes that they had in the forward, such as the seed.
        At the end, attributes and generators are restored.
        """
        with attributes(self._seeding).restored(), restored(generators(self._device)):
            self._kept_by_seeding[micro_batch].restore()
            yield

    def roots(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Return the tensors from which a micro-batch's backward starts; empty if its forward is repeated first."""
        stash = self.stash[micro_batch]
        return stash.roots if isinstance(stash, Stash) else ()

    def clear(self) -> None:
        """Forget everything about unfinished micro-batches."""
        if self._casts is not None:
            self._casts.clear()
        self.module.attributes.end()
        self.stash.clear()
        self._kept_by_seeding.clear()
        for part in self.parts.values():
            part.clear()
        self.results.clear()
        self.skipped.clear()


def check_runnable(schedule: Schedule) -> None:
    """Check that stages can run a schedule, before any of them begins.

    Raises:
        ScheduleError: it has a kind of actions that stages have no handler for.
    """
    check_can_run(schedule)
    kinds = dict.fromkeys(action.kind for row in schedule.rows for action in row)
    known = dict.fromkeys((FORWARD, BACKWARD, *(kind for part in PARTS for kind in part.handlers)))
    strange = [f"{kind.name} ({kind})" for kind in kinds if kind not in known]
    if strange:
        able = ", ".join(f"{kind.name} ({kind})" for kind in known)
        raise ScheduleError(
            f"the schedule {schedule.name!r} has actions that stages cannot run: {', '.join(strange)}; they can run "
            f"{able}. Use another schedule for training; this one can be simulated"
        )


def _roots(replayed: Replayed) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in replayed.sent if tensor.requires_grad])


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return the same numbers without history, as a leaf for which a gradient can be requested."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _range(name: str) -> AbstractContextManager[Any]:
    """Return a range for torch's profiler if that runs; the range alone costs as much as a small operation."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()

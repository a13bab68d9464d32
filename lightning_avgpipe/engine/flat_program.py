"""Flat programs: a stage's part of a step as a list of instructions, written down while the step is followed once.

::

    micro-batch 0      the step's Python runs             x = embed(x) + pos(arange)   self.log(...)
                       and what it does is written        slot 3 = embed(slot 0); slot 4 = arange(32); ...
    micro-batches 1..  the list runs, no Python of the step

A step does the same for each micro-batch of an iteration if its Python has no side effects and does not branch on
numbers of values. Questions about the batch (is anything masked?) are instructions of their own: if the answer differs,
the micro-batch is followed instead. A program holds constants of its iteration, so the next one writes it anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.tracer import function_name
from lightning_avgpipe.engine.attestation import Attested
from lightning_avgpipe.engine.operation import Operation, OperationResult, Runner
from lightning_avgpipe.engine.path import Entry
from lightning_avgpipe.engine.randomness import Draw, Draws
from lightning_avgpipe.engine.templates import Fields, Items, fill, key_of, slots_in
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import TensorMeta
from lightning_avgpipe.utils.tensors import tensor_arguments

_NOTHING = contextlib.nullcontext()

InstructionKind = Literal["glue", "question", "object", "node", "observe", "skipped"]
Observe = Callable[[Callable[..., Any], Any, Any], Any]


class Surprise(Exception):
    """An answer that differs, so that the step must be followed. Only operations on the batch have run so far."""


@dataclass(frozen=True)
class Instruction:
    """One operation of a program.

    Attributes:
        kind: free ``"glue"``, a ``"question"`` about the batch, an ``"object"`` that is made anew, a ``"node"``, a call
            that only looks at values (``"observe"``), or a call of another stage (``"skipped"``).
        run: executes the operation.
        args: templates of the positional arguments.
        kwargs: names and templates of the keyword arguments.
        made: slots of the tensors that it returns, in order, or of the object.
        node: node of the graph, for a node.
        module: called module, for a call.
        answer: expected answer, for a question.
        draw: random stream that begins before it, for glue that may draw.
        looks: properties of the tensors that a node returned, see :func:`look_of`.
        entry: description of a node's result for later stages; None: it differs between micro-batches.
        apart: whether a node that returns an argument must return a view of it.
        dropped: slots that no later instruction needs.
    """

    kind: InstructionKind
    run: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    made: tuple[int, ...] = ()
    node: Node | None = None
    module: nn.Module | None = None
    answer: Any = None
    draw: Draw | None = None
    looks: tuple[Any, ...] = ()
    entry: Entry | None = None
    apart: bool = False
    dropped: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.node or f"{function_name(self.run)}()")

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for instructions that do the same."""
        taken = key_of(Items(tuple, self.args)), key_of(Fields(self.kwargs))
        return self.kind, function_name(self.run), id(self.module), taken, self.made, self.answer, self.draw, self.apart

    @property
    def drawn(self) -> tuple[str, ...]:
        """The paths of the modules that a node calls and that may draw random numbers."""
        return (self.node.name, *self.node.drawn) if self.node is not None and self.node.kind == "call" else ()

    @property
    def used(self) -> tuple[int, ...]:
        """The slots that the instruction reads or fills."""
        return (*slots_in(self.args), *slots_in(part for _, part in self.kwargs), *self.made)


@dataclass(frozen=True)
class Done:
    """The outcome of a program.

    Attributes:
        result: result of the step.
        sent: tensors for the next stage.
        entries: descriptions of the nodes' results, for later stages.
    """

    result: Any
    sent: tuple[Tensor, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class FlatProgram:
    """The instructions of a stage for one micro-batch.

    Attributes:
        instructions: instructions in order; those that need only the batch come first.
        num_slots: number of slots for tensors and objects.
        given: slots of the tensors of the batch, then of the received tensors.
        sent: templates of the tensors that go to the next stage.
        result: template of the step's result, on the last stage.
        attested: requests of the step for the nodes, see :mod:`~lightning_avgpipe.engine.attestation`.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    given: tuple[int, ...]
    sent: tuple[Any, ...]
    result: Any
    attested: tuple[Attested, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for programs that do the same."""
        keys = tuple(instruction.key for instruction in self.instructions)
        return keys, tuple(map(key_of, self.sent)), key_of(self.result), self.attested

    @property
    def answers(self) -> tuple[Any, ...]:
        """The answers about the batch for which the program was written."""
        return tuple(instruction.answer for instruction in self.instructions if instruction.kind == "question")

    def dropping_early(self) -> FlatProgram:
        """Return the program in which each instruction drops the slots that it is the last to use."""
        kept = {*slots_in(self.sent), *slots_in((self.result,))}
        last = {slot: i for i, instruction in enumerate(self.instructions) for slot in instruction.used}
        dropped: list[list[int]] = [[] for _ in self.instructions]
        for slot, i in last.items():
            if slot not in kept:
                dropped[i].append(slot)
        instructions = zip(self.instructions, dropped, strict=True)
        return replace(self, instructions=tuple(replace(one, dropped=tuple(slots)) for one, slots in instructions))

    def run(self, tensors: Sequence[Tensor], runner: Runner, observe: Observe | None) -> Done:
        """Run the program on a micro-batch.

        Args:
            tensors: tensors of the batch, then the received ones.
            runner: executes nodes.
            observe: call functions that look at values; None: they are called directly.
        Raises:
            Surprise: the batch gives another answer.
            StepChangedError: an operation returned another number of tensors.
        """
        slots: list[Any] = [None] * self.num_slots
        entries: list[Entry] = []
        for slot, tensor in zip(self.given, tensors, strict=True):
            slots[slot] = tensor
        for instruction in self.instructions:
            if instruction.kind == "skipped":
                if runner.draws is not None:
                    runner.draws.skip(instruction.drawn)
                continue
            if instruction.draw is not None and runner.draws is not None:
                runner.draws.begin_draw(instruction.draw)
            args = tuple([fill(part, slots) for part in instruction.args])
            kwargs = {name: fill(part, slots) for name, part in instruction.kwargs}
            if instruction.kind == "object":
                slots[instruction.made[0]] = instruction.run(args)
                continue
            if instruction.kind == "node":
                outcome = _execute(instruction, args, kwargs, runner)
                made = outcome.tensors
                entries.append(_entry(instruction, outcome))
            else:
                made = _free(instruction, args, kwargs, runner, observe)
            if len(made) != len(instruction.made):
                raise StepChangedError(
                    f"{instruction} returned {len(instruction.made)} tensors with the first micro-batch of this batch, "
                    f"and {len(made)} now; return the same structure for every micro-batch, or set static_step=False"
                )
            for slot, tensor in zip(instruction.made, made, strict=True):
                slots[slot] = tensor
            for slot in instruction.dropped:
                slots[slot] = None
        return Done(fill(self.result, slots), tuple(fill(part, slots) for part in self.sent), tuple(entries))


def _free(instruction: Instruction, args: Any, kwargs: Any, runner: Runner, observe: Observe | None) -> list[Tensor]:
    """Execute an instruction that is no node; return the tensors of its result."""
    if instruction.kind == "observe" and observe is not None:
        result = observe(instruction.run, args, kwargs)
    else:
        with _called(instruction.module, runner):
            result = instruction.run(*args, **kwargs)
    if instruction.kind == "question" and result != instruction.answer:
        raise Surprise
    return [result] if type(result) is Tensor else tree.tensors(result)


def _execute(instruction: Instruction, args: Any, kwargs: Any, runner: Runner) -> OperationResult:
    node, module = instruction.node, instruction.module
    assert node is not None
    tensors = tensor_arguments(args, kwargs) if node.opens else []
    operation = Operation(node.kind, node.name, instruction.run, args, kwargs, tensors, module)
    _, objects = operation.opened(node)
    with _called(module, runner):
        outcome = runner.run(operation, node, objects)
    return outcome.apart(node, tree.tensors((args, kwargs))) if instruction.apart else outcome


def _called(module: nn.Module | None, runner: Runner) -> contextlib.AbstractContextManager[None]:
    """Call a unit within this context, so that it draws from its own stream."""
    return _NOTHING if module is None or runner.draws is None else _calling(module, runner.draws)


@contextlib.contextmanager
def _calling(module: nn.Module, draws: Draws) -> Iterator[None]:
    draws.enter(module)
    try:
        yield
    finally:
        draws.leave(module)


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor on which descriptions for later stages depend."""
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride()


def _entry(instruction: Instruction, outcome: OperationResult) -> Entry:
    """Return the description for later stages: the written one if it is still right, which saves making it."""
    if instruction.entry is None or tuple(map(look_of, outcome.tensors)) != instruction.looks:
        return outcome.entry
    return instruction.entry


def description(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the properties that tensors must share with those for which a program was written."""
    return tuple(
        (type(t), t.layout, t.device, TensorMeta.of(t) if t.layout is torch.strided else t.shape) for t in tensors
    )

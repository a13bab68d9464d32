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

import enum
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.attestation import Attested
from lightning_avgpipe.engine.part import Entry, Observe, OperationResult, Part, Replayed, Runner
from lightning_avgpipe.engine.randomness import Draw
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import tensor_arguments

VALUES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(...)),
        *(torch.memory_format, torch.Size, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    )
)
SAME = (nn.Module, type, enum.Enum)  # objects that are the same for each micro-batch


class TensorSlot(NamedTuple):
    """A slot for a tensor, or for an object that is made anew."""

    number: int


@dataclass(frozen=True)
class Register:
    """A module's register and name of a parameter or buffer, which may be another object for another micro-batch."""

    held: dict[str, Any] = field(compare=False)
    name: str
    number: int  # the id of the register

    @classmethod
    def of(cls, held: dict[str, Any], name: str) -> Register:
        """Return the template of what a module's register holds under a name."""
        return cls(held, name, id(held))


class Items(NamedTuple):
    """A template of a list, tuple or slice."""

    kind: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]


class Fields(NamedTuple):
    """A template of a dict."""

    parts: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Fixed:
    """A value that is the same for each micro-batch; templates are equal if their keys are."""

    value: Any = field(compare=False)
    key: Any

    @classmethod
    def of(cls, value: Any) -> Fixed:
        """Return the template of a value, whose key is the value itself where that can be compared."""
        kind = type(value)
        return cls(value, (kind, value) if kind in VALUES else TensorMeta.of(value) if kind is Absent else id(value))


def fill(template: Any, slots: Sequence[Any]) -> Any:
    """Return the argument that a template describes, with these tensors."""
    kind = type(template)
    if kind is TensorSlot:
        return slots[template[0]]
    if kind is Fixed:
        return template.value
    if kind is Items:
        return template[0]([fill(part, slots) for part in template[1]])
    if kind is Register:
        return template.held[template.name]
    return {name: fill(part, slots) for name, part in template[0]}


def slice_of(parts: list[Any]) -> slice:
    """Return a slice with this start, stop and step."""
    return slice(*parts)


def parts_of(templates: Iterable[Any]) -> list[Any]:
    """Return the templates of single values in templates."""
    found: list[Any] = []
    for template in templates:
        kind = type(template)
        if kind is Items:
            found += parts_of(template.parts)
        elif kind is Fields:
            found += parts_of(part for _, part in template.parts)
        else:
            found.append(template)
    return found


def slots_in(templates: Iterable[Any]) -> list[int]:
    """Return the slots in templates."""
    return [part.number for part in parts_of(templates) if type(part) is TensorSlot]


InstructionKind = Literal["glue", "question", "object", "node", "observe", "skipped"]


class Surprise(Exception):
    """An answer that differs, so that the step must be followed. Only operations on the batch have run so far."""


@dataclass(frozen=True)
class Instruction:
    """One operation of a program. Instructions are equal if they do the same.

    Attributes:
        kind: free ``"glue"``, a ``"question"`` about the batch, an ``"object"`` that is made anew, a ``"node"``, a call
            that only looks at values (``"observe"``), or a call of another stage (``"skipped"``).
        name: name of the function.
        run: executes the operation.
        args: templates of the positional arguments.
        kwargs: names and templates of the keyword arguments.
        made: slots of the tensors that it returns, in order, or of the object.
        node: node of the graph, for a node.
        module: called module, for a call.
        answer: expected answer, for a question; the pickled object, for an object.
        draw: random stream that begins before it, for glue that may draw.
        looks: properties of the tensors that a node returned, see :func:`look_of`.
        entry: description of a node's result for later stages; None: it differs between micro-batches.
        separated: whether a node that returns an argument must return a view of it.
        is_plain: whether all that a node does is to compute its result, while nothing watches it.
    """

    kind: InstructionKind
    name: str
    run: Callable[..., Any] = field(compare=False)
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    made: tuple[int, ...] = ()
    node: Node | None = field(default=None, compare=False)
    module: nn.Module | None = None
    answer: Any = None
    draw: Draw | None = None
    looks: Sequence[Any] = field(default=(), compare=False)
    entry: Entry | None = field(default=None, compare=False)
    separated: bool = False
    is_plain: bool = False

    def __str__(self) -> str:
        return str(self.node or f"{self.name}()")

    @property
    def drawn(self) -> tuple[str, ...]:
        """The paths of the modules that a node calls and that may draw random numbers."""
        return (self.node.name, *self.node.drawn) if self.node is not None and self.node.kind == "call" else ()


@dataclass(frozen=True)
class FlatProgram:
    """The instructions of a stage for one micro-batch. Programs are equal if they do the same.

    Attributes:
        instructions: instructions in order; those that need only the batch come first.
        num_slots: number of slots for tensors and objects.
        given: slots of the tensors of the batch, then of the received tensors.
        sent: templates of the tensors that go to the next stage.
        result: template of the step's result, on the last stage.
        attested: requests of the step for the nodes so far, see :mod:`~lightning_avgpipe.engine.attestation`.
        entries: descriptions of what the nodes so far returned when the program was written.
        dropped: for each instruction the slots that no later one needs.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int = field(compare=False)
    given: tuple[int, ...] = field(compare=False)
    sent: tuple[Any, ...]
    result: Any
    attested: tuple[Attested, ...]
    entries: tuple[Entry, ...] = field(compare=False)
    dropped: tuple[Sequence[int], ...] = field(default=(), compare=False)

    @property
    def answers(self) -> tuple[Any, ...]:
        """The answers about the batch for which the program was written."""
        return tuple(instruction.answer for instruction in self.instructions if instruction.kind == "question")

    def lean(self) -> FlatProgram:
        """Return the program without instructions that only make a tensor for an earlier stage (``torch.arange``)."""
        needed = {*slots_in(self.sent), *slots_in((self.result,))}
        instructions: list[Instruction] = []
        dropped: list[list[int]] = []
        for one in reversed(self.instructions):
            given = parts_of((*one.args, *(part for _, part in one.kwargs)))
            only_makes = one.kind == "glue" and one.module is None and not any(map(_is_tensor, given))
            if only_makes and needed.isdisjoint(one.made):
                continue
            dropped.append([*{*slots_in(given), *one.made}.difference(needed)])
            needed.update(dropped[-1])
            instructions.append(one)
        return replace(self, instructions=tuple(instructions[::-1]), dropped=tuple(dropped[::-1]))

    def run(self, tensors: Sequence[Tensor], part: Part, runner: Runner) -> Replayed:
        """Run the program on a micro-batch.

        Args:
            tensors: tensors of the batch, then the received ones.
            part: part of the step.
            runner: executes its nodes.
        Raises:
            Surprise: the batch gives another answer.
            StepChangedError: an operation returned another number of tensors.
        """
        slots: list[Any] = [None] * self.num_slots
        own: list[Entry] = []
        differs = False
        for slot, tensor in zip(self.given, tensors, strict=True):
            slots[slot] = tensor
        for instruction, dropped in zip(self.instructions, self.dropped, strict=True):
            kind = instruction.kind
            if kind == "skipped":
                runner.draws.skip(instruction.drawn)
                continue
            if instruction.draw is not None:
                runner.draws.begin_draw(instruction.draw)
            args = tuple([fill(one, slots) for one in instruction.args])
            kwargs = {name: fill(one, slots) for name, one in instruction.kwargs} if instruction.kwargs else {}
            if kind == "object":
                slots[instruction.made[0]] = instruction.run(args)
                continue
            if kind == "node":
                outcome = _execute(instruction, args, kwargs, runner)
                made, entry = outcome.tensors, instruction.entry
                if entry is None or [look_of(tensor) for tensor in made] != instruction.looks:
                    differs, entry = True, outcome.entry
                own.append(entry)
            else:
                made = _free(instruction, args, kwargs, runner, part.observe)
            if len(made) != len(instruction.made):
                raise StepChangedError(
                    f"{instruction} returned {len(instruction.made)} tensors with the first micro-batch of this batch, "
                    f"and {len(made)} now; return the same structure for every micro-batch, or set static_step=False"
                )
            for slot, tensor in zip(instruction.made, made, strict=True):
                slots[slot] = tensor
            for slot in dropped:
                slots[slot] = None
        entries = (*part.entries, *own) if differs and not part.program.is_last else self.entries
        sent = tuple([fill(one, slots) for one in self.sent])
        return Replayed(fill(self.result, slots), sent, entries, attested=self.attested)


def _free(instruction: Instruction, args: Any, kwargs: Any, runner: Runner, observe: Observe | None) -> list[Tensor]:
    """Execute an instruction that is no node; return the tensors of its result."""
    if instruction.kind == "observe" and observe is not None:
        result = observe(instruction.run, args, kwargs)
    elif instruction.module is not None:
        result = runner.draws.call(instruction.module, instruction.run, args, kwargs)
    else:
        result = instruction.run(*args, **kwargs)
    if instruction.kind == "question" and result != instruction.answer:
        raise Surprise
    return [result] if type(result) is Tensor else tree.tensors(result)


def _execute(instruction: Instruction, args: Any, kwargs: Any, runner: Runner) -> OperationResult:
    node, module = instruction.node, instruction.module
    assert node is not None
    if instruction.is_plain and runner.is_plain:
        run, draws = instruction.run, runner.draws
        result = run(*args, **kwargs) if module is None else draws.call(module, run, args, kwargs)
        return OperationResult(result, [result] if type(result) is Tensor else tree.tensors(result))
    tensors = tensor_arguments(args, kwargs) if node.writes_objects else []
    operation = Operation(node.kind, node.name, instruction.run, args, kwargs, tensors, module)
    _, objects = operation.with_objects(node)
    if module is None:
        outcome = runner.run(operation, node, objects)
    else:
        outcome = runner.draws.call(module, runner.run, (operation, node, objects), {})
    return outcome.separated(node, tree.tensors((args, kwargs))) if instruction.separated else outcome


def _is_tensor(template: Any) -> bool:
    """Return whether the template of a single value may stand for a tensor."""
    return type(template) is not Fixed or isinstance(template.value, Tensor)


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor on which descriptions for later stages depend."""
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride()


def description(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties that a tensor must share with the one for which a program was written."""
    stride = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.device, tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad, stride

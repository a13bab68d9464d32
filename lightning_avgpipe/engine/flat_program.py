"""Flat programs: a stage's part of a step as a list of instructions, written while the step is followed once.

::

    micro-batch 0      the step's Python runs             x = embed(x) + pos(arange)   self.log(...)
                       and what it does is written        slot 3 = embed(slot 0); slot 4 = arange(32); ...
    micro-batches 1..  the list runs, no Python of the step

A step does the same for each micro-batch of an iteration if its Python has no side effects and does not branch on
numbers of values. Questions about the batch (is anything masked?) are instructions of their own. A micro-batch is
followed instead if an answer differs, or the shape of something that is computed from the batch (the targets that are
not masked), or the form of what a node returns: a flag, a structure, a shape that depends on numbers. A program holds
constants of its iteration, so each iteration writes a new one.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation, writes
from lightning_avgpipe.capture.tracer import call_module, function_name
from lightning_avgpipe.engine.attestation import Request
from lightning_avgpipe.engine.part import (
    Observe,
    OperationResult,
    Part,
    Path,
    ReplayContext,
    Replayed,
    ResultDescription,
    Runner,
)
from lightning_avgpipe.engine.purity import Purity
from lightning_avgpipe.engine.randomness import Draw
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors, tensor_arguments
from lightning_avgpipe.utils.torch_compat import address, modes

VALUES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(...)),
        *(torch.memory_format, torch.Size, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    )
)
_SIZED = frozenset(
    ("argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "unique", "unique_consecutive")
)
_FREE = ("glue", "question")  # kinds of instructions that are no nodes, and compute with the batch
SHARED_TYPES = (nn.Module, type, enum.Enum)  # objects that are the same for each micro-batch


class TensorSlot(NamedTuple):
    """A template of a tensor, or of an object that is made anew: the number of its slot."""

    number: int


@dataclass(frozen=True)
class Register:
    """A template of a parameter or buffer: the module's dict that holds it, and its name there.

    Another micro-batch may find another object there.
    """

    held: dict[str, Any] = field(compare=False)
    name: str
    number: int  # id of the dict


class Items(NamedTuple):
    """A template of a list, tuple, slice or dict."""

    kind: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class ConstantTemplate:
    """A template of a value that is the same for each micro-batch. Two are equal if their keys are."""

    value: Any = field(compare=False)
    key: Any

    @classmethod
    def of(cls, value: Any) -> ConstantTemplate:
        """Return the template of a value. Its key is the value if that can be compared, else a description or id."""
        kind = type(value)
        return cls(value, (kind, value) if kind in VALUES else TensorMeta.of(value) if kind is Absent else id(value))


def fill(template: Any, slots: Sequence[Any]) -> Any:
    """Return the argument that a template describes, with the contents of these slots."""
    kind = type(template)
    if kind is TensorSlot:
        return slots[template[0]]
    if kind is ConstantTemplate:
        return template.value
    if kind is Items:
        return template[0]([fill(part, slots) for part in template[1]])
    return template.held[template.name]


def slice_of(parts: list[Any]) -> slice:
    """Return a slice with this start, stop and step."""
    return slice(*parts)


def dict_of(parts: list[Any]) -> dict[Any, Any]:
    """Return a dict with these keys and these values."""
    return dict(zip(*parts, strict=True))


def parts_of(templates: Iterable[Any]) -> list[Any]:
    """Return the templates of single values within nested templates."""
    found: list[Any] = []
    for template in templates:
        if type(template) is Items:
            found += parts_of(template.parts)
        else:
            found.append(template)
    return found


def slots_in(templates: Iterable[Any]) -> list[int]:
    """Return the numbers of the slots within nested templates."""
    return [part.number for part in parts_of(templates) if type(part) is TensorSlot]


InstructionKind = Literal["glue", "question", "object", "node", "observe", "skipped"]


class AnswerChanged(Exception):
    """The batch gives another answer, so the step must be followed. Only operations on the batch have run so far."""


class FormChanged(Exception):
    """An instruction has returned something of another form, so the step must be followed.

    Args:
        instruction: the instruction.
        leaves: whether the program has logged something, or changed tensors that outlive it.
    """

    def __init__(self, instruction: Instruction, leaves: bool) -> None:
        super().__init__(f"{instruction} returns something of another form with each micro-batch")
        self.instruction, self.leaves = instruction, leaves


@dataclass(frozen=True)
class Instruction:
    """One operation of a program. Instructions are equal if they do the same.

    Attributes:
        kind: free ``"glue"``; a ``"question"`` about the batch; an ``"object"`` to make anew; a ``"node"``; a call that
            only looks at values (``"observe"``); or a call that another stage executes (``"skipped"``).
        name: name of the function.
        run: executes the operation.
        args: templates of the positional arguments.
        kwargs: names and templates of the keyword arguments.
        made: slots of the tensors that it returns, in order, or of the object.
        node: node of the graph, for a node.
        module: called module, for a call.
        answer: expected answer, for a question; the pickled object, for an object; else the form of the result.
        draw: random stream that begins before the instruction, for glue that may draw.
        entry: description of a node's result for later stages; None: it differs between micro-batches.
        separated: whether a node that returns an argument must return a view of it.
        is_plain: whether a node writes into no objects, and needs neither ``separated`` nor a watch over its draws.
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
    entry: ResultDescription | None = field(default=None, compare=False)
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
        requests: requests for the nodes up to the end of this stage, see :mod:`~lightning_avgpipe.engine.attestation`.
        descriptions: descriptions of what these nodes returned when the program was written.
        dropped: for each instruction the slots that no later one needs.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int = field(compare=False)
    given: tuple[int, ...] = field(compare=False)
    sent: tuple[Any, ...]
    result: Any
    requests: tuple[Request, ...]
    descriptions: tuple[ResultDescription, ...] = field(compare=False)
    dropped: tuple[Sequence[int], ...] = field(default=(), compare=False)

    @property
    def answers(self) -> tuple[Any, ...]:
        """The answers about the batch, and the shapes computed from it, for which the program was written."""
        return tuple(one.answer for one in self.instructions if one.kind in _FREE)

    def lean(self) -> FlatProgram:
        """Return the program without instructions that only make tensors for other stages (``torch.arange``)."""
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
            AnswerChanged: the batch gives another answer.
            FormChanged: a node, or an instruction after nodes, logs or writes, returns something of another form.
        """
        slots: list[Any] = [None] * self.num_slots
        own: list[ResultDescription] = []
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
                if form_of(outcome) != instruction.answer:
                    raise FormChanged(instruction, self._leaves_something(until=instruction))
                made, entry = outcome.tensors, instruction.entry
                if entry is None:
                    differs, entry = True, outcome.entry
                own.append(entry)
            else:
                result = _free(instruction, args, kwargs, runner, part.observe)
                made = [result] if type(result) is Tensor else tree.tensors(result)
                if kind != "question" and _free_form(kind, instruction.module, result, made) != instruction.answer:
                    raise self._other_form(instruction, bool(own))
            for slot, tensor in zip(instruction.made, made, strict=True):
                held = slots[slot]
                if held is not None and held is not tensor:  # when written, this tensor was the same as an earlier one
                    raise self._other_form(instruction, bool(own))
                slots[slot] = tensor
            for slot in dropped:
                slots[slot] = None
        descriptions = (*part.descriptions, *own) if differs and not part.program.is_last else self.descriptions
        sent = tuple([fill(one, slots) for one in self.sent])
        return Replayed(fill(self.result, slots), sent, descriptions, requests=self.requests)

    def _other_form(self, instruction: Instruction, nodes_have_run: bool) -> Exception:
        """Return the error for an instruction that has returned something of another form."""
        leaves = self._leaves_something(until=instruction)
        return FormChanged(instruction, leaves) if nodes_have_run or leaves else AnswerChanged()

    def _leaves_something(self, until: Instruction) -> bool:
        """Return whether the instructions up to this one log, or change tensors in place."""
        for one in self.instructions:
            if one.kind == "observe" or (one.node is not None and (one.node.writes or one.node.changes)):
                return True
            if one is until:
                break
        return False


def _free(instruction: Instruction, args: Any, kwargs: Any, runner: Runner, observe: Observe | None) -> Any:
    """Execute an instruction that is not a node, and return its result."""
    if instruction.kind == "observe" and observe is not None:
        result = observe(instruction.run, args, kwargs)
    elif instruction.module is not None:
        result = runner.draws.call(instruction.module, instruction.run, args, kwargs)
    else:
        result = instruction.run(*args, **kwargs)
    if instruction.kind == "question" and result != instruction.answer:
        raise AnswerChanged
    return result


def _free_form(kind: InstructionKind, module: nn.Module | None, result: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the form of what a free function, a free unit, or a call that looks at values has returned.

    For one tensor from a function this is its shape. What metrics return is described without its tensors, whose
    shapes may depend on numbers.
    """
    if kind == "observe":
        return _form(result, ())
    return tensors[0].shape if module is None and type(result) is Tensor else _form(result, tensors)


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
    return type(template) is not ConstantTemplate or isinstance(template.value, Tensor)


def form_of(outcome: OperationResult) -> Any:
    """Return everything in a node's result, except the numbers in tensors, on which the step's Python may branch."""
    if outcome.parcel is not None:
        return list(map(description, outcome.tensors)), outcome.parcel.content
    return _form(outcome.result, outcome.tensors)


def _form(result: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the structure of a result, the descriptions of its tensors, and its other leaves."""
    looks = list(map(description, tensors))
    if type(result) is Tensor:
        return looks
    leaves, spec = tree.flatten(result)
    return looks, spec, [None if isinstance(leaf, Tensor) else ConstantTemplate.of(leaf) for leaf in leaves]


def description(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor on which a program, and the descriptions for later stages, depend."""
    stride = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.device, tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad, stride


# -- writing: a stage reports to a writer what it does while it follows a step -------------------------------------


Told = TypeVar("Told", bound=Callable[..., None])


class Unwritable(Exception):
    """A step cannot be written down as a program; the message says why."""


def _writing(method: Told) -> Told:
    """Decorate a method of the writer: skip it if there can be no program, and refuse if it raises ``Unwritable``."""

    @functools.wraps(method)
    def told(writer: ProgramWriter, *args: Any, **kwargs: Any) -> None:
        if writer.why_not is None:
            try:
                method(writer, *args, **kwargs)
            except Unwritable as error:
                writer.refuse(str(error))

    return told  # type: ignore[return-value]


@dataclass
class ProgramWriter:
    """A writer of one program, which a stage calls while it follows the step.

    Args:
        module: the whole module.
        context: data that all replays of the stage share.
        checks_purity: whether the step's Python is checked for side effects.

    Attributes:
        why_not: reason why there can be no program; None: none so far.
        program: the program, once the step has ended.
        draw: random stream of the glue function that is being called.
    """

    module: nn.Module
    context: ReplayContext
    checks_purity: bool
    why_not: str | None = None
    program: FlatProgram | None = None
    draw: Draw | None = None
    _held: Mapping[int, Any] | None = None
    _arguments: tuple[Any, Any] = ((), ())
    _takes_objects: bool = False
    _objects: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _after: dict[int, bytes] = field(default_factory=dict)
    _instructions: list[Instruction] = field(default_factory=list)
    _slots: KnownTensors[int] = field(default_factory=KnownTensors)
    _memory: dict[Any, int] = field(default_factory=dict)  # slot or template -> address of its tensor
    _num_slots: int = 0
    _given: tuple[int, ...] = ()
    _began_in: tuple[Any, ...] = ()

    def refuse(self, why: str) -> None:
        """Note why there can be no program; the first reason is kept."""
        self.why_not, self.program = self.why_not or why, None
        self._instructions.clear()

    @_writing
    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin a program with the tensors of the batch and the received ones."""
        self._given = tuple(map(self._new, tensors))
        self._began_in = modes(self.context.device)

    def checked(self, inside: Callable[[], bool]) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the step, in which its Python is checked for side effects if ``checks_purity``.

        Args:
            inside: returns whether a unit is running.
        """
        return Purity(inside, self.module, self.refuse) if self.checks_purity else contextlib.nullcontext()

    @_writing
    def skipped(self, node: Node) -> None:
        """Note that a node of another stage was skipped."""
        if node.writes:
            raise Unwritable(f"{node} writes into its arguments")
        if node.kind == "call":
            self._instructions.append(Instruction("skipped", node.name, call_module, node=node))

    @_writing
    def call(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of a unit that depends on the batch alone."""
        if any(isinstance(tensor, Absent) for tensor in tree.tensors((args, kwargs))):
            return
        if not tree.tensors(result):
            raise Unwritable(f"a {type(module).__name__} returns no tensors, but facts about the batch")
        form = _form(result, tree.tensors(result))
        self._write("glue", partial(call_module, module), args, kwargs, result, module, answer=form)

    @_writing
    def glue(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Note a call of a free function with these tensors."""
        if any(isinstance(tensor, Absent) for tensor in tensors):
            return  # its result is absent too
        made = tree.tensors(result)
        if not (made or tensors):
            return
        if not (made or result is None or _is_plain(result)):
            raise Unwritable(f"{function_name(function)}() returns something other than tensors")
        if made or result is None:
            self._write("glue", function, args, kwargs, result, answer=_free_form("glue", None, result, made))
        else:
            self._write("question", function, args, kwargs, (), answer=result)

    @_writing
    def begin_node(self, operation: Operation) -> None:
        """Note a node's arguments before it is executed, since it may change them."""
        self._arguments = self._templates(operation.args, operation.kwargs, objects=True)

    @_writing
    def node(self, operation: Operation, node: Node, outcome: OperationResult, separated: bool) -> None:
        """Note a node that was executed here.

        Args:
            separated: whether views replaced arguments in its result, see :meth:`OperationResult.separated`.
        """
        if node.lasting or node.exports or node.generators or node.kind == "region":
            raise Unwritable(f"{node} writes into objects that outlive the step, or is repeated in its backward")
        if node.reads_numbers or (node.kind == "glue" and not outcome.tensors):
            raise Unwritable(f"{node} returns numbers from tensors")
        if node.kind == "glue" and _is_sized_by_numbers(operation):
            raise Unwritable(f"{node} returns a shape that depends on numbers in tensors")
        if operation.module is not None and (operation.module._forward_hooks or operation.module._forward_pre_hooks):
            raise Unwritable(f"{node} has hooks")
        run = operation.run if operation.module is None else partial(call_module, operation.module)
        differs = node.writes_objects or not all(map(_is_alike, tree.leaves(outcome.result)))
        self._write(
            "node",
            run,
            None,
            None,
            outcome.tensors,
            operation.module,
            node=node,
            answer=form_of(outcome),
            entry=None if differs else outcome.entry,
            separated=separated,
            is_plain=not (node.writes_objects or separated or self.context.drawing.watches_functions(node)),
        )
        self._after = {n: self._pickled(item)[0] for n, item in self._objects.values() if self.checks_purity}

    @_writing
    def observed(self, run: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that only looked at values."""
        if not all(leaf is None or isinstance(leaf, Tensor) for leaf in tree.leaves(result)):
            raise Unwritable(f"{function_name(run)}() returns numbers from tensors")
        self._write("observe", run, args, kwargs, result, answer=_free_form("observe", None, result, ()))

    @_writing
    def end(self, replayed: Replayed, complete: bool) -> None:
        """Complete the program when the step has ended.

        Args:
            replayed: outcome of the micro-batch.
            complete: whether the step went as far as when it was captured.
        """
        if not complete:
            raise Unwritable("it ended early")
        self._takes_objects = True
        sent, result = tuple(map(self._template, replayed.sent)), self._template(replayed.result)
        # skipped calls matter only for the random streams of modules that are called here as well
        called = {path for one in self._instructions if one.kind == "node" for path in one.drawn}
        instructions = [one for one in self._instructions if one.kind != "skipped" or not called.isdisjoint(one.drawn)]
        if not any(one.node is not None and one.node.writes for one in instructions):
            instructions = self._batch_first(instructions)
        behind = itertools.dropwhile(lambda one: one.kind in _FREE, instructions)
        if any(one.kind == "question" for one in behind):
            raise Unwritable("it asks what is in the batch, and changes tensors in between")
        assert not isinstance(replayed.descriptions, Path)
        told = replayed.requests, replayed.descriptions
        self.program = FlatProgram(tuple(instructions), self._num_slots, self._given, sent, result, *told).lean()

    def _batch_first(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Return the instructions with those on the batch first, so that other answers are found before any effect.

        A free function or unit stays behind a node, a log or an object if it takes what another one that stays has made
        or written, or lasting tensors that a called unit may have changed, or if it may write into memory that one of
        those that stay uses.
        """
        first: list[Instruction] = []
        rest: list[Instruction] = []
        used: set[int] = set()  # memory that the instructions that stay use
        late: set[int] = set()  # memory whose contents may be other ones behind them
        lasting: set[int] = set()  # memory of the lasting tensors so far; results may be views of them
        called: list[nn.Module] = []  # units among them whose memory is not in ``late`` yet
        for one in instructions:
            parts = [part for part in parts_of((*one.args, *(part for _, part in one.kwargs))) if part in self._memory]
            memory, is_free = {self._memory[part] for part in parts}, one.kind in _FREE
            lasting.update(self._memory[part] for part in parts if type(part) is not TensorSlot)
            written = memory if _writes(one) else set()
            if is_free and one.module is not None:  # it may begin to change its buffers
                own = set(map(address, one.module.buffers()))
                memory, written, lasting = memory | own, written | own, lasting | own
            if called and not memory.isdisjoint(lasting):  # found only when needed, since few steps use them
                of_units = (part for unit in called for part in _held_tensors(unit).values())
                late.update(address(fill(part, ())) for part in of_units)
                called.clear()
            if is_free and memory.isdisjoint(late) and written.isdisjoint(used):
                first.append(one)
                continue
            rest.append(one)
            used |= memory
            if one.kind != "node":  # what takes the results of a node is a node as well
                late.update(written, (self._memory[slot] for slot in map(TensorSlot, one.made) if slot in self._memory))
            elif one.module is not None:
                late |= memory & lasting
                called.append(one.module)
        return [*first, *rest]

    def _write(
        self,
        kind: InstructionKind,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        module: nn.Module | None = None,
        **more: Any,
    ) -> None:
        """Append an instruction. The arguments of a node were noted by :meth:`begin_node`."""
        if modes(self.context.device) != self._began_in:
            what = more.get("node", function_name(run))
            raise Unwritable(f"{what} runs in another mode than the step begins in")
        templates, named = self._arguments if kind == "node" else self._templates(args, kwargs)
        made = tuple(map(self._slot_of_result, tree.tensors(result)))
        draw = None if module is not None or kind == "observe" else self.draw
        self._instructions.append(
            Instruction(kind, function_name(run), run, templates, named, made, module=module, draw=draw, **more)
        )

    def _templates(self, args: Any, kwargs: Any, objects: bool = False) -> tuple[Any, Any]:
        """Return arguments as templates.

        Args:
            objects: whether objects that the step has made, such as a cache, are allowed.
        """
        self._takes_objects = objects
        named = tuple((name, self._template(part)) for name, part in kwargs.items())
        return tuple(map(self._template, args)), named

    def _slot_of_result(self, tensor: Tensor) -> int:
        """Return the slot of a result; a known tensor keeps its slot."""
        known = self._slots.own_value_of(tensor)
        return self._new(tensor) if known is None else known

    def _new(self, tensor: Tensor) -> int:
        number, self._num_slots = self._num_slots, self._num_slots + 1
        self._slots.learn(tensor, number)
        self._memory[TensorSlot(number)] = address(tensor)
        return number

    def _template(self, item: Any) -> Any:
        kind = type(item)
        if isinstance(item, Tensor):
            return self._of_tensor(item)
        if kind in VALUES or isinstance(item, SHARED_TYPES):
            return ConstantTemplate.of(item)
        if kind is tuple or kind is list:
            return Items(kind, tuple(map(self._template, item)))
        if kind is dict:
            return Items(dict_of, (self._template(tuple(item)), self._template(tuple(item.values()))))
        if kind is slice:
            return Items(slice_of, tuple(map(self._template, (item.start, item.stop, item.step))))
        return self._of_object(item)

    def _of_object(self, item: Any) -> TensorSlot:
        """Return the slot of an object, which is made anew for each micro-batch as it was when a unit first took it."""
        known = self._objects.get(id(item))
        if known is not None:
            if self.checks_purity and self._after.get(known[0]) != self._pickled(item)[0]:
                raise Unwritable(f"the step changes a {type(item).__qualname__} between units")
            return TensorSlot(known[0])
        if not self._takes_objects:
            raise Unwritable(f"the step passes on an object of {type(item).__module__}.{type(item).__qualname__}")
        data, references = self._pickled(item)
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._objects[id(item)] = slot, item
        restored = partial(self.context.packer.unpickled, data)
        name = type(item).__qualname__
        self._instructions.append(Instruction("object", name, restored, references, made=(slot,), answer=data))
        return TensorSlot(slot)

    def _pickled(self, item: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Pickle an object without the tensors in it; return the bytes and templates of the tensors."""
        try:
            data, tensors = self.context.packer.pickled(item)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise Unwritable(f"the step passes on an object that cannot be copied: {error}") from error
        return data, tuple(map(self._template, tensors))

    def _of_tensor(self, tensor: Tensor) -> Any:
        slot = self._slots.own_value_of(tensor)
        if slot is not None:
            return TensorSlot(slot)
        if isinstance(tensor, Absent):  # nothing needs its numbers
            return ConstantTemplate.of(tensor)
        if self._held is None:  # found only when needed, since few steps use it
            self._held = _held_tensors(self.module)
        if (held := self._held.get(id(tensor))) is not None:
            self._memory[held] = address(tensor)
            return held
        raise Unwritable("the step uses a tensor that comes from neither the batch, the model nor an operation")


# The writer for a step that is not written down; it ignores all calls and never uses its context.
NULL_WRITER = ProgramWriter(nn.Module(), cast(Any, None), False, why_not="no program of it is needed")


def _held_tensors(module: nn.Module) -> dict[int, Any]:
    """Return the templates of the tensors that modules hold, by ids of the tensors."""
    found: dict[int, Any] = {}
    for part in module.modules():
        for held in vars(part).values():
            if isinstance(held, (Tensor, list, tuple)):
                found.update((id(tensor), ConstantTemplate.of(tensor)) for tensor in tree.tensors(held))
        for register in (part._parameters, part._buffers):
            named: dict[str, Any] = register  # type: ignore[assignment]
            found.update(
                (id(tensor), Register(named, name, id(named))) for name, tensor in named.items() if tensor is not None
            )
    return found


def _writes(instruction: Instruction) -> bool:
    """Return whether a free function or unit writes into an argument."""
    module, named = instruction.module, dict(instruction.kwargs)
    if module is not None:
        return any(getattr(part, "inplace", False) for part in module.modules())
    in_place = named.get("inplace")
    return writes(instruction.name) or "out" in named or (type(in_place) is ConstantTemplate and bool(in_place.value))


def _is_sized_by_numbers(operation: Operation) -> bool:
    """Return whether a function's result has a shape that depends on the numbers of its arguments."""
    if operation.name == "__getitem__":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tree.tensors(operation.args[1:]))
    return operation.name in _SIZED or (operation.name == "where" and len(operation.args) == 1)


def _is_alike(leaf: Any) -> bool:
    """Return whether a leaf of a node's result is a tensor, or None, which is the same for each micro-batch."""
    return leaf is None or isinstance(leaf, Tensor)


def _is_plain(item: Any) -> bool:
    """Return whether a value can be compared with what another micro-batch gives."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_plain, item))
    return type(item) in (bool, int, float, str)

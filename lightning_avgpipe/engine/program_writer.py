"""Write down flat programs: a writer is told what a stage does while the stage follows a step."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.capture.tracer import call_module, function_name
from lightning_avgpipe.engine.flat_program import (
    SAME,
    VALUES,
    Fields,
    Fixed,
    FlatProgram,
    Instruction,
    InstructionKind,
    Items,
    Register,
    TensorSlot,
    look_of,
    slice_of,
)
from lightning_avgpipe.engine.part import OperationResult, Path, Replayed
from lightning_avgpipe.engine.purity import Purity
from lightning_avgpipe.engine.randomness import Draw, Drawing
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.utils.torch_compat import modes


class Unwritable(Exception):
    """An error that says why a step cannot be written down."""


@dataclass
class ProgramWriter:
    """A writer of one program, which a stage calls while it follows the step.

    Args:
        module: the whole module.
        packer: packer of the module.
        device: device of the stage.
        drawing: modules that draw random numbers.
        checks_purity: whether the step's Python is checked for side effects.

    Attributes:
        why_not: reason why there can be no program; None: none so far.
        program: the program, once the step has ended.
        draw: random stream of the glue function that is being called.
    """

    module: nn.Module
    packer: Packer
    device: torch.device
    drawing: Drawing
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
    _slots: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    _num_slots: int = 0
    _given: tuple[int, ...] = ()
    _began_in: tuple[Any, ...] = ()

    def refuse(self, why: str) -> None:
        """Note that there can be no program; the first reason counts."""
        self.why_not = self.why_not or why
        self._instructions.clear()

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin a program with the tensors of the batch and the received ones."""
        self._given = tuple(map(self._new, tensors))
        self._began_in = modes(self.device)

    @contextlib.contextmanager
    def checked(self, inside: Callable[[], bool]) -> Iterator[None]:
        """Run the step within this context, and check its Python for side effects if that is wanted.

        Args:
            inside: return whether a unit is running.
        """
        if not self.checks_purity:
            yield
            return
        with Purity(inside, self.module) as purity:
            yield
        if purity.why_not is not None:
            self.refuse(purity.why_not)

    def skipped(self, node: Node) -> None:
        """Note that a node of another stage was skipped."""
        if node.writes:
            self.refuse(f"{node} writes into what it is given")
        elif node.kind == "call" and self.why_not is None:
            self._instructions.append(Instruction("skipped", node.name, call_module, node=node))

    def call(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of a unit that depends on the batch alone."""
        if any(isinstance(tensor, Absent) for tensor in tree.tensors((args, kwargs))):
            return
        if not tree.tensors(result):
            self.refuse(f"a {type(module).__name__} tells the step what is in the batch")
        self._write("glue", partial(call_module, module), args, kwargs, result, module=module)

    def glue(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Note a call of a free function with these tensors."""
        name = function_name(function)
        if any(isinstance(tensor, Absent) for tensor in tensors):
            return  # its result is absent too
        if not isinstance(result, Tensor) and not tree.tensors(result):
            if tensors and result is not None and not _is_plain(result):
                self.refuse(f"{name}() gives the step something else than tensors")
            elif tensors:
                self._write("glue" if result is None else "question", function, args, kwargs, (), answer=result)
            return
        self._write("glue", function, args, kwargs, result)

    def begin_node(self, operation: Operation) -> None:
        """Note a node's arguments before it is executed, while they hold what the node is given."""
        if self.why_not is not None:
            return
        try:
            self._arguments = self._templates(operation.args, operation.kwargs, objects=True)
        except Unwritable as error:
            self.refuse(str(error))

    def node(self, operation: Operation, node: Node, outcome: OperationResult, separated: bool) -> None:
        """Note a node that was executed here.

        Args:
            separated: whether it returns a view of an argument.
        """
        if node.lasting or node.exports or node.generators or node.kind == "region":
            self.refuse(f"{node} writes into objects that outlive the step, or is repeated in its backward")
        elif node.reads_numbers or (node.kind == "glue" and (outcome.result is None or not outcome.tensors)):
            self.refuse(f"{node} tells the step numbers")
        elif operation.module is not None and (operation.module._forward_hooks or operation.module._forward_pre_hooks):
            self.refuse(f"{node} has hooks")
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
            looks=list(map(look_of, outcome.tensors)),
            entry=None if differs else outcome.entry,
            separated=separated,
            is_plain=not (node.writes_objects or separated or self.drawing.watches_functions(node)),
        )
        if self.why_not is not None:
            return
        try:
            self._after = {
                number: self._pickled(item)[0] for number, item in self._objects.values() if self.checks_purity
            }
        except Unwritable as error:
            self.refuse(str(error))

    def observed(self, run: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that has looked at values."""
        self._write("observe", run, args, kwargs, result)

    def end(self, replayed: Replayed, complete: bool) -> None:
        """Complete the program when the step has ended.

        Args:
            replayed: outcome of the micro-batch.
            complete: whether the step went as far as when it was captured.
        """
        if not complete:
            self.refuse("it ended early")
        if self.why_not is not None:
            return
        # skipped calls matter only for the random streams of modules that are called here as well
        called = {path for one in self._instructions if one.kind == "node" for path in one.drawn}
        instructions = [one for one in self._instructions if one.kind != "skipped" or not called.isdisjoint(one.drawn)]
        if any(one.kind == "question" for one in instructions):
            if any(one.node is not None and one.node.writes for one in instructions):
                self.refuse("it asks what is in the batch, and writes into tensors")
                return
            # instructions on the batch come first, so that a surprise comes before any side effect
            instructions.sort(key=lambda one: one.kind not in ("glue", "question"))
        try:
            sent, result = tuple(map(self._template, replayed.sent)), self._template(replayed.result)
        except Unwritable as error:
            self.refuse(str(error))
            return
        assert not isinstance(replayed.entries, Path)
        told = replayed.attested, replayed.entries
        self.program = FlatProgram(tuple(instructions), self._num_slots, self._given, sent, result, *told).lean()

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
        """Append an instruction; the arguments of a node have been noted before it was executed."""
        if self.why_not is not None:
            return
        try:
            if modes(self.device) != self._began_in:
                what = more.get("node", function_name(run))
                raise Unwritable(f"{what} runs in another mode than the step begins in")
            templates, named = self._arguments if kind == "node" else self._templates(args, kwargs)
            made = tuple(map(self._slot_of_result, tree.tensors(result)))
        except Unwritable as error:
            self.refuse(str(error))
            return
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
        known = self._slot(tensor)
        return self._new(tensor) if known is None else known

    def _new(self, tensor: Tensor) -> int:
        number = self._num_slots
        self._num_slots += 1
        self._slots[id(tensor)] = weakref.ref(tensor), number
        return number

    def _slot(self, tensor: Tensor) -> int | None:
        entry = self._slots.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _template(self, item: Any) -> Any:
        kind = type(item)
        if isinstance(item, Tensor):
            return self._of_tensor(item)
        if kind in VALUES or isinstance(item, SAME):
            return Fixed.of(item)
        if kind is tuple or kind is list:
            return Items(kind, tuple(map(self._template, item)))
        if kind is dict:
            return Fields(tuple((name, self._template(part)) for name, part in item.items()))
        if kind is slice:
            return Items(slice_of, tuple(map(self._template, (item.start, item.stop, item.step))))
        return self._of_object(item)

    def _of_object(self, item: Any) -> TensorSlot:
        """Return a slot for an object that is made anew for each micro-batch, as it is when a unit first takes it."""
        known = self._objects.get(id(item))
        if known is not None:
            if self.checks_purity and self._after.get(known[0]) != self._pickled(item)[0]:
                raise Unwritable(f"the step changes a {type(item).__qualname__} between units")
            return TensorSlot(known[0])
        if not self._takes_objects:
            raise Unwritable(f"the step hands on an object of {type(item).__module__}.{type(item).__qualname__}")
        data, references = self._pickled(item)
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._objects[id(item)] = slot, item
        restored = partial(self.packer.unpickled, data)
        name = type(item).__qualname__
        self._instructions.append(Instruction("object", name, restored, references, made=(slot,), answer=data))
        return TensorSlot(slot)

    def _pickled(self, item: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Return a pickled object without the tensors in it, and templates of these."""
        try:
            data, tensors = self.packer.pickled(item)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise Unwritable(f"the step hands on an object that cannot be copied: {error}") from error
        return data, tuple(map(self._template, tensors))

    def _of_tensor(self, tensor: Tensor) -> Any:
        slot = self._slot(tensor)
        if slot is not None:
            return TensorSlot(slot)
        if isinstance(tensor, Absent):  # nothing needs its numbers
            return Fixed.of(tensor)
        if self._held is None:  # found only when needed, since few steps use it
            self._held = _held_tensors(self.module)
        if (held := self._held.get(id(tensor))) is not None:
            return held
        raise Unwritable("the step uses a tensor that comes from neither the batch, the model nor an operation")


def _held_tensors(module: nn.Module) -> dict[int, Any]:
    """Return templates of the tensors that modules hold, by their ids."""
    found: dict[int, Any] = {}
    for part in module.modules():
        for held in vars(part).values():
            if isinstance(held, (Tensor, list, tuple)):
                found.update((id(tensor), Fixed.of(tensor)) for tensor in tree.tensors(held))
        for register in (part._parameters, part._buffers):
            named: dict[str, Any] = register  # type: ignore[assignment]
            found.update((id(tensor), Register.of(named, name)) for name, tensor in named.items() if tensor is not None)
    return found


def _is_alike(leaf: Any) -> bool:
    """Return whether a leaf of a node's result is the same for each micro-batch, or a tensor."""
    return leaf is None or isinstance(leaf, Tensor)


def _is_plain(item: Any) -> bool:
    """Return whether a value can be compared with what another micro-batch gives."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_plain, item))
    return type(item) in (bool, int, float, str)

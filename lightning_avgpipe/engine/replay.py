"""Replay: execute the whole step function, of which only one stage's part happens.

::

    stage 1 of 3:     embed   block0 | block1   block2 | block3   head   loss
                      skipped        | executed        | not reached
    values:           absent or      | real            | the step ends with an exception
                      received       |                 |

Nodes of earlier stages give back the values that were received, or absent ones. The nodes of this stage run. Before
the first node of a later stage the step is left. Free glue runs wherever it stands. A micro-batch with which the step
does something else takes a detour.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.tracer import StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.engine.detour import Detour, Entry, Path, Step
from lightning_avgpipe.engine.randomness import Drawing, Draws
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer, Parcel
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta, described
from lightning_avgpipe.utils.random_streams import RandomKey, host_stream, stream
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address, version_of

Observe = Callable[[Callable[..., Any], Any, Any], Any]
Repeat = Callable[[Node, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Replayed:
    """What a stage made of one micro-batch.

    Attributes:
        result: of the step function; None unless this is the last stage.
        sent: the values that the program sends, in its order; or those of a detour.
        entries: what the nodes up to the end of this stage returned, or their path.
        tapped: copies of the values that are alive where that was asked for, and what the nodes before it returned;
            None if the step did not come there.
    """

    result: Any
    sent: tuple[Tensor, ...]
    entries: tuple[Entry, ...] | Path
    tapped: tuple[tuple[Tensor, ...], tuple[Entry, ...]] | None = None


_NOTHING = contextlib.nullcontext()


class _StageEnd(BaseException):
    """Leaves the step function; no error, so not an Exception that user code might catch."""


def replay(
    program: StageProgram,
    run: Callable[..., Any],
    args: Sequence[Any],
    units: Mapping[int, str],
    owned: Mapping[int, str],
    received: Sequence[Tensor] = (),
    entries: tuple[Entry, ...] | Path = (),
    key: RandomKey | None = None,
    drawing: Drawing | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    observe: Observe | None = None,
    repeat: Repeat | None = None,
    packer: Packer | None = None,
    tap: int = 0,
    after_unit: Callable[[], None] = nothing,
) -> Replayed:
    """Execute one stage's part of a step on one micro-batch.

    Args:
        program: what to do.
        run: executes the step function.
        args: its arguments, the micro-batch first.
        units: ``id(module) -> path``.
        owned: ``id -> full name`` of parameters, and of buffers that glue changes.
        received: tensors for ``program.receives``, in its order; or for the values of a path.
        entries: what the nodes of earlier stages returned; fewer if the step returned None on one of them. Or the path
            that they took.
        key: names this execution, for random numbers.
        drawing: the modules that draw; None: nothing does.
        device: of this stage.
        observe: calls ``self.log`` and metrics on the last stage; None: as they are.
        repeat: makes what executes a unit into what keeps less for the backward.
        packer: of the module; None if no unit writes into objects.
        tap: position, behind the start of the program, where values are copied; 0: nowhere.
        after_unit: called after each unit.
    Raises:
        StepChangedError: the step did something else than when it was captured.
        AbsentValueError: the step needs a value that was not sent.
    """
    key = key or RandomKey(0)
    draws = None if drawing is None else Draws(drawing, key, device)
    replayer = _Replayer(
        program, units, owned, received, entries, draws, device, observe, repeat, packer, tap, after_unit
    )
    # Stages of one process share the batch, and the step may change it: its containers, or even its tensors.
    args = tree.map_tensors(torch.clone if program.graph.batch_writes else _same, tuple(args))
    with (
        _NOTHING if draws is None else stream(key.derive("step"), device),
        _NOTHING if draws is None else watching(draws),
        _NOTHING if draws is None else host_stream(key.derive("host")),
        replayer.following(compiled=drawing is None or not drawing.seen),
    ):
        try:
            result = run(*args)
        except _StageEnd:
            result = None
        else:
            replayer.check_finished(result)
        finally:
            replayer.restore()
    return Replayed(result, replayer.sent(), replayer.entries(), replayer.tapped)


class _Replayer(StepTracer):
    def __init__(
        self,
        program: StageProgram,
        units: Mapping[int, str],
        owned: Mapping[int, str],
        received: Sequence[Tensor],
        path: tuple[Entry, ...] | Path,
        draws: Draws | None,
        device: torch.device,
        observe: Observe | None,
        repeat: Repeat | None,
        packer: Packer | None,
        tap: int,
        after_unit: Callable[[], None],
    ) -> None:
        super().__init__(units, owned, device)
        self._observe = observe
        self._repeat = repeat
        self._packer = packer
        self._after_unit = after_unit
        self._written: list[tuple[Any, Objects, Objects]] = []  # lasting objects, before and after units were skipped
        self._program = program
        self._nodes = program.graph.nodes
        self._resident = program.graph.resident
        self._upkeep = program.upkeep
        self._elsewhere = program.elsewhere
        self._detour: Detour | None = None  # once this stage is off the captured path
        if isinstance(path, Path):
            self._upstream, values, self._start = path.entries, path.values, len(path.entries)
            self._ended = self._start if path.ended else None
            self._detour = Detour(program, self._upstream, path.shared)
        else:
            self._upstream, values, self._start = path, program.receives, program.start
            self._ended = len(path) if len(path) < program.start else None
        self._received = dict(zip(values, received, strict=True))
        self._own: list[Entry | Step] = []
        self._objects: dict[int, Tensor] = {}  # values of earlier stages, as the tensors that stand for them here
        self._tap = tap
        self.tapped: tuple[tuple[Tensor, ...], tuple[Entry, ...]] | None = None
        self._sends = frozenset((*program.sends, *(program.graph.live(tap) if tap else ())))
        self._made: dict[int, Tensor] = {}  # values of this stage that will be sent
        self._position = 0
        self._observed: list[Tensor] = []  # what the last stage will look at
        self._left = False  # whether a step off the captured path has returned None
        self._draws = draws
        self._device = device

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        if path not in self._resident and not any(self.value_of(t) is not None for t in tensors):
            return run(*args, **kwargs)
        return self._at_node("call", path, run, args, kwargs, tensors, module)

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, name = tensor_arguments(args, kwargs), function_name(func)
        if self._draws is not None:
            self._draws.function(name)
        for tensor in tensors:
            if id(tensor) in self._owned or self.value_of(tensor) is not None:
                return self._at_node("glue", name, func, args, kwargs, tensors)
        return func(*args, **kwargs)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._at_node("region", "", run, args, kwargs, tensor_arguments(args, kwargs))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._program.is_last:
            self._observed += tree.tensors((args, kwargs))
            return Absent(TensorMeta((), torch.get_default_dtype(), False, False), self._device, "a metric")
        return run(*args, **kwargs) if self._observe is None else self._observe(run, args, kwargs)

    def _at_node(
        self,
        kind: str,
        name: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        module: nn.Module | None = None,
    ) -> Any:
        position, program = self._position, self._program
        if position == self._tap > self._start and self._detour is None:
            values = tuple(self._sent(value).detach().clone() for value in program.graph.live(position))
            self.tapped = values, (*self._upstream, *self._own)  # type: ignore[arg-type]
        if position == self._ended:
            raise self._changed(kind, name, None)
        if position < self._start and isinstance(self._upstream[position], Step):
            return self._skip_step(kind, name, args, kwargs, tensors, module)
        node = self._nodes[position] if position < len(self._nodes) else None
        if position >= self._start and (self._detour is not None or not _is(node, kind, name)):
            return self._off_path(kind, name, run, args, kwargs, tensors, module)
        if position == program.end:
            raise _StageEnd
        if not _is(node, kind, name):
            raise self._changed(kind, name, node)
        assert node is not None
        self._position += 1
        objects = _opened(node, args, kwargs, module)
        if objects is not None:
            tensors = [*tensors, *objects.tensors]
        entry: Entry | None = self._elsewhere.get(position)
        if entry is not None and position >= self._start and not program.is_last:
            self._own.append(entry)
        if entry is None and position < self._start and position not in self._upkeep:
            entry = self._upstream[position]  # type: ignore[assignment]
        if entry is not None:
            return self._skip(node, entry, tensors, objects)
        result, leaves, entry = self._execute(node, run, args, kwargs, objects)
        if not self._is_alike(node, leaves, tensors):
            self._begin_detour(node, len(leaves))
            self._note(node, leaves, tensors, (), described(result) if entry is None else entry)
            return result
        if objects is None and not set(map(id, leaves)).isdisjoint(map(id, tensors)):
            result, leaves = self._apart(node, result, tensors)
        for value, leaf in zip(node.outputs, leaves, strict=True):
            if value >= 0:
                self._register(leaf, value)
        for i, value, of_base in node.writes:
            target = tensors[i]._base if of_base else tensors[i]
            if target is not None:
                self._register(target, value)
        if (not program.is_last or position < self._tap) and node.index >= self._start:
            self._own.append(described(result) if entry is None else entry)
        return result

    # -- detours ----------------------------------------------------------------------------------------------------

    def _skip_step(
        self, kind: str, name: str, args: Any, kwargs: Any, tensors: list[Tensor], module: nn.Module | None
    ) -> Any:
        """A node that an earlier stage has executed off the captured path."""
        step = self._upstream[self._position]
        assert isinstance(step, Step)
        node, entry = step
        if not _is(node, kind, name):
            raise self._changed(kind, name, node)
        self._position += 1
        objects = _opened(node, args, kwargs, module)
        return self._skip(node, entry, tensors if objects is None else [*tensors, *objects.tensors], objects)

    def _off_path(
        self,
        kind: str,
        name: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        module: nn.Module | None,
    ) -> Any:
        """A node that was not there when the step was captured."""
        program, position = self._program, self._position
        names = {name} if kind == "call" else {self._owned[id(t)] for t in tensors if id(t) in self._owned}
        detour = self._detour or Detour(program, self._upstream)
        if not (detour.may_run(kind, names) or detour.is_later(names)):
            expected = self._nodes[position] if self._detour is None and position < len(self._nodes) else None
            raise self._changed(kind, name, expected)
        self._detour = detour
        if detour.is_later(names):
            self._leave(names, tensors)
            raise _StageEnd
        self._position += 1
        node = detour.node(position, kind, name)
        objects = _opened(node, args, kwargs, module)
        if objects is not None:
            tensors = [*tensors, *objects.tensors]
        versions = [version_of(tensor) for tensor in tensors]
        result, leaves, entry = self._execute(node, run, args, kwargs, objects)
        writes = self._writes(node, tensors, versions)
        self._note(node, leaves, tensors, writes, described(result) if entry is None else entry)
        return result

    def _is_alike(self, node: Node, leaves: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
        """Whether a captured node gave back what it was given where it did so then, and as many tensors."""
        if len(leaves) != len(node.outputs):
            return False
        for value, leaf in zip(node.outputs, leaves, strict=True):
            if value < 0:
                if leaf is not tensors[-1 - value]:
                    return False
            elif value in node.inputs and not (self.is_known(leaf) and self._known[id(leaf)][1] == value):
                return False
        return True

    def _apart(self, node: Node, result: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The result of a captured node that gives back what it was given, and gave something new then.

        A view stands for that, which gets the number of the new one; what was given keeps its own.
        """
        given = set(map(id, tensors))
        leaves, spec = tree.flatten(result)
        values = iter(node.outputs)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = next(values)
                if id(leaf) in given and value >= 0 and value not in node.inputs:
                    leaves[i] = leaf.view_as(leaf)
        return tree.unflatten(leaves, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _begin_detour(self, node: Node, found: int) -> None:
        """A captured node of this stage gives something else than then."""
        program = self._program
        names = {node.name} if node.kind == "call" else set(node.parameters)
        detour = Detour(program, self._upstream)  # type: ignore[arg-type]
        here = node.index >= self._start and node.index not in self._upkeep and not node.writes
        if found != len(node.outputs) or not here or not detour.may_run(node.kind, names):
            raise StepChangedError(
                f"{node} returned {len(node.outputs)} tensors when {program.graph.step} was captured, and returned "
                f"{found} now{', or what it was given only then' if found == len(node.outputs) else ''} (stage "
                f"{program.stage}); return the same structure for every batch, with empty tensors where there is "
                "nothing to return"
            )
        self._detour = detour

    def _note(
        self,
        node: Node,
        leaves: Sequence[Tensor],
        tensors: Sequence[Tensor],
        writes: tuple[tuple[int, int, bool], ...],
        entry: Entry,
    ) -> None:
        """A node was executed off the captured path."""
        assert self._detour is not None
        node = replace(node, outputs=self._outputs(node.kind, leaves, tensors), writes=writes)
        self._detour.note(node)
        if not self._program.is_last:
            self._own.append(Step(node, entry))

    def _outputs(self, kind: str, leaves: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Numbers for what a node off the path gave, as of :attr:`Node.outputs`."""
        assert self._detour is not None
        outputs = []
        for leaf in leaves:
            same = next((i for i, t in enumerate(tensors) if t is leaf), None)
            if not self.is_known(leaf) and same is None:
                self.know(leaf, self._detour.number())
            outputs.append(self._known[id(leaf)][1] if self.is_known(leaf) else -1 - (same or 0))
        weights = {address(t) for t in tensors if kind == "glue" and id(t) in self._owned}
        if weights:
            views = zip(outputs, leaves, strict=True)
            self._detour.share([value for value, leaf in views if value >= 0 and address(leaf) in weights])
        return tuple(outputs)

    def _writes(
        self, node: Node, tensors: Sequence[Tensor], versions: Sequence[int]
    ) -> tuple[tuple[int, int, bool], ...]:
        """What a node off the path has written into, as of :attr:`Node.writes`."""
        assert self._detour is not None
        writes = []
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(tensor) == version:
                continue
            known = self.value_of(tensor)
            if not self._detour.may_write(known, id(tensor) in self._owned):
                raise StepChangedError(
                    f"{node} writes into a weight, or a tensor that others may share, which it did not do when "
                    f"{self._program.graph.step} was captured (stage {self._program.stage}); compute out of place"
                )
            if known is not None:
                writes.append((i, known, not self.is_known(tensor)))
        return tuple(writes)

    def _leave(self, names: set[str], tensors: Sequence[Tensor]) -> None:
        """The rest of a detour, which needs these tensors, is for later stages."""
        assert self._detour is not None
        used = (*tensors, *self._observed, *_variables())
        needed = [value for t in used if (value := self.value_of(t)) is not None]
        self._detour.leave(names, needed, {v: t for ref, v in self._known.values() if (t := ref()) is not None})

    # -- skipped and executed ---------------------------------------------------------------------------------------

    def _skip(self, node: Node, entry: Entry, tensors: list[Tensor], objects: Objects | None) -> Any:
        if self._draws is not None and node.drawn:
            self._draws.skip(node.drawn)
        for i, value, of_base in node.writes:
            target = tensors[i]._base if of_base else tensors[i]
            if target is not None and value not in self._objects and not self.is_known(target):
                # A free tensor (say, torch.zeros) that an earlier stage wrote into.
                self._objects[value] = target
                self.know(target, value)
                if value in self._received:
                    target.copy_(self._received[value])
        if isinstance(entry, TensorMeta):
            return self._stand_in(node, 0, entry, tensors)
        if isinstance(entry, Parcel):
            return self._open(node, entry, tensors, objects)
        spec, leaves = entry
        filled, i = [], 0
        for leaf in leaves:
            if isinstance(leaf, TensorMeta):
                filled.append(self._stand_in(node, i, leaf, tensors))
                i += 1
            else:
                filled.append(leaf.value)
        return tree.unflatten(filled, spec.spec)

    def _open(self, node: Node, parcel: Parcel, tensors: list[Tensor], objects: Objects | None) -> Any:
        """Let happen to the objects of this stage what the unit did to those of its own."""
        assert objects is not None and self._packer is not None
        given = [self._stand_in(node, i, meta, tensors) for i, meta in enumerate(parcel.tensors)]
        lasting = [objects.owners[i] for i in node.lasting if i < len(objects.owners)]
        before = [Objects.only(owner) for owner in lasting]
        try:
            result = self._packer.unpack(parcel, given, objects)
        except LookupError as error:
            raise StepChangedError(
                f"{node} was given other objects than when {self._program.graph.step} was captured (stage "
                f"{self._program.stage}): {error}. Pass the same objects for every batch"
            ) from error
        self._written += zip(lasting, before, map(Objects.only, lasting), strict=True)
        return result

    def restore(self) -> None:
        """Objects that outlive the step are again as this stage's own units left them."""
        for _, before, after in reversed(self._written):
            if not after.changes():
                before.restore()

    def _stand_in(self, node: Node, i: int, meta: TensorMeta, tensors: list[Tensor]) -> Tensor:
        value = node.outputs[i]
        if value < 0:
            return tensors[-1 - value]
        if value not in self._objects:
            tensor = self._received.get(value)
            self._objects[value] = Absent(meta, self._device, node.name) if tensor is None else tensor
            self.know(self._objects[value], value)
        return self._objects[value]

    def _execute(
        self, node: Node, run: Callable[..., Any], args: Any, kwargs: Any, objects: Objects | None
    ) -> tuple[Any, list[Tensor], Parcel | None]:
        """The result, the tensors in all that the node gave, and a parcel of it if it needs one."""
        if self._repeat is not None and node.kind == "call":
            run = self._repeat(node, run)
        if self._draws is None or node.kind == "glue":
            result = run(*args, **kwargs)
        else:
            # a region is code of the step itself, whose path is ""
            inside = "" if node.kind == "region" else node.name
            with self._draws.functions((inside, *node.drawn)):
                result = run(*args, **kwargs)
        if node.kind == "call":
            self._after_unit()
        if objects is not None and self._packer is not None:
            parcel, leaves = self._packer.pack(result, objects)
            return result, leaves, parcel
        return result, [result] if type(result) is Tensor else tree.tensors(result), None

    def _register(self, tensor: Tensor, value: int) -> None:
        self.know(tensor, value)
        if value in self._sends:
            self._made[value] = tensor

    # -- the end ----------------------------------------------------------------------------------------------------

    def sent(self) -> tuple[Tensor, ...]:
        """Tensors for ``program.sends``; empty ones for what was not made because the step ended before."""
        if self._detour is not None:
            return self._detour.sent
        return tuple(self._sent(value) for value in self._program.sends)

    def _sent(self, value: int) -> Tensor:
        for known in (self._made, self._objects, self._received):
            tensor = known.get(value)
            if tensor is not None:
                return tensor
        return torch.empty(0, device=self._device)

    def entries(self) -> tuple[Entry, ...] | Path:
        """What all nodes up to the end of this stage returned."""
        entries = (*self._upstream, *self._own) if self._own else self._upstream
        if self._detour is None:
            return entries  # type: ignore[return-value]
        return Path(entries, self._detour.values, self._detour.shared, self._left)

    def check_finished(self, result: Any) -> None:
        """The step must have come as far as it did when it was captured, or have returned None, and on all stages."""
        position, program = self._position, self._program
        expected = self._start if program.is_last else program.end
        if self._detour is not None and not program.is_last and position != self._ended:
            self._left = result is None
            self._leave(set(), tree.tensors(result))
            return
        if position < expected and (result is not None or position != (self._ended or position)):
            raise self._changed(None, None, self._nodes[position])

    def _changed(self, kind: str | None, name: str | None, node: Node | None) -> StepChangedError:
        now = "it ended" if kind is None else f"it came to {_called(kind, name)} at {source_line()}"
        then = "it ended" if node is None else f"it came to {node}"
        return StepChangedError(
            f"{self._program.graph.step} does not do what it did when it was captured: after {self._position} nodes "
            f"{then} then, {now} now (stage {self._program.stage}). What a step calls must not depend on the batch, "
            "the time or chance, unless its units come in the order of the stages; move the difference into one unit, "
            "or keep it on the last stage with split_points"
        )


def _is(node: Node | None, kind: str, name: str) -> bool:
    return node is not None and node.kind == kind and (node.name == name or kind == "region")


def _opened(node: Node, args: Any, kwargs: Any, module: nn.Module | None) -> Objects | None:
    """What a node may write into besides tensors."""
    if not node.opens:
        return None
    return Objects((args, kwargs), module.modules() if module is not None and node.exports else ())


def _variables() -> list[Tensor]:
    """Tensors in the local variables of the functions that the step is in, which it may use further on."""
    found: list[Tensor] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not replay.__code__:
        if frame.f_globals is not globals():
            found += tensor_arguments(*frame.f_locals.values())
        frame = frame.f_back
    return found


def _called(kind: str, name: str | None) -> str:
    return {"call": f"unit '{name}'", "glue": f"{name}()", "region": "a checkpoint"}[kind]


def _same(tensor: Tensor) -> Tensor:
    return tensor

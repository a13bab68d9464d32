"""Capture: run a step function once on one micro-batch and write down its call graph."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.attributes import Assignments, Mutations
from lightning_avgpipe.capture.batch_use import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.changes import Changes
from lightning_avgpipe.capture.flop_counter import Flops, recurrent_flops
from lightning_avgpipe.capture.graph import CallGraph, Node, Value
from lightning_avgpipe.capture.outermost import Outermost
from lightning_avgpipe.capture.provenance import Provenance
from lightning_avgpipe.capture.questions import Questions
from lightning_avgpipe.capture.random_use import DrawWatch, random_bits
from lightning_avgpipe.capture.snapshot import untouched
from lightning_avgpipe.capture.tracer import StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.capture.units import Units
from lightning_avgpipe.capture.visit import Visit
from lightning_avgpipe.errors import CaptureError, SkippedStepError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer
from lightning_avgpipe.utils.placeholder import described
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address, untraced, version_of

__all__ = ["capture", "owned_tensors"]


def capture(
    step: str,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    units: Sequence[str],
    device: torch.device | None = None,
    ignore: Collection[nn.Module] = (),
) -> CallGraph:
    """Record what ``run(*args)`` does with the units of ``module``. Nothing remains of the execution.

    Args:
        step: name of the step function, for messages.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of the step, the micro-batch first.
        module: whose submodules are called.
        units: paths of the submodules that are never split; what else the step calls, outside of them, is a unit too.
        device: where to compute; parameters that are elsewhere visit it one unit at a time.
        ignore: modules that only observe.

    Raises:
        SkippedStepError: the step returned None in training.
        CaptureError: the step returned no loss in training.
    """
    foresight = Foresight()
    while True:
        batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
        make = partial(_Recorder, module, units, device, foresight, ignore)
        recorder = make([*tree.tensors(batch), *Objects(batch).tensors])
        try:
            graph = _record(recorder, make, step, run, batch)
        except Exception as error:
            error.add_note(f"while {step} was followed on a first micro-batch, to learn what it calls")
            raise
        # whether an operation on a tensor changes state must be known before the tensor is first changed
        if recorder.foresight == foresight:
            return graph
        foresight = recorder.foresight


@dataclass(frozen=True)
class Foresight:
    """What must be known of a step before it is followed: it is found out by following it once more.

    Attributes:
        glue_states: buffers that glue changes: whether an operation on one is a node, before the first change.
        exports: units in whose attributes others find tensors.
        readers: units that find values in objects, and may have nothing else that makes them nodes.
        mutable: ids of objects in attributes that change: whether a unit or the code between them changes one.
    """

    glue_states: frozenset[str] = frozenset()
    exports: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    mutable: frozenset[int] = frozenset()


def _record(
    recorder: _Recorder,
    make: Callable[[Sequence[Tensor]], _Recorder],
    step: str,
    run: Callable[..., Any],
    args: Sequence[Any],
) -> CallGraph:
    module = recorder.module
    spare = tree.map_tensors(torch.clone, tuple(args))
    batch = [(leaf, version_of(leaf)) for leaf in tree.tensors(args)]
    if args:
        recorder.batch.begin(args[0])
    with untouched(module), Objects(args).restored(), recorder.visiting(), recorder.changes:
        with recorder.assignments.watched(), recorder.following(), watching(recorder.calls):
            result = run(*args)
        attributes, carried = tuple(recorder.assignments.changed()), tuple(recorder.assignments.carried())
        recorder.mutations.look()
        recorder.mutable |= recorder.mutations.found()
        of_units = set(recorder.mutations.of_units()).difference(attributes)
        recorder.watch.look()
        if step == "training_step":
            _check_loss(result)
        recorder.keep(tree.tensors(result))
        recorder.find_reassigned_buffers()
        recorder.find_shared_states()
        recorder.pinned += recorder.assignments.pinned()
        lasts = recorder.assignments.created() or recorder.mutations.holders() or of_units
        again = _once_more(make, run, spare) if lasts else None
        if again is not None:
            of_units &= set(again.mutations.of_units())
            made = recorder.assignments.created() - again.assignments.assigned()
            attributes = tuple(key for key in attributes if key not in made)
            recorder.mutations.keep(again.mutations.found())
        recorder.pinned += recorder.mutations.pinned(recorder.assignments)
        holders = tuple(recorder.mutations.holders().items())
    return CallGraph(
        step=step,
        nodes=tuple(recorder.drawn(node) for node in recorder.nodes),
        values=tuple(recorder.values),
        kept=frozenset(recorder.kept),
        units=recorder.units.found(),
        resident=frozenset(recorder.resident),
        drawing=frozenset(recorder.watch.drawing),
        host_drawing=frozenset(recorder.watch.host_drawing),
        leaves=recorder.batch.leaves(),
        batch_writes=any(version_of(leaf) != version for leaf, version in batch),
        glue_states=frozenset(recorder.glue_states),
        rewritten=frozenset(recorder.rewritten),
        attributes=attributes,
        carried=carried,
        holders=holders,
        of_units=tuple(sorted(of_units - dict(holders).keys())),
        written=recorder.mutations.written(recorder.changes.nameless),
        reads=tuple(recorder.assignments.reads.items()),
        pinned=tuple(recorder.pinned),
        leaving=frozenset(recorder.leaving),
        opened=tuple(recorder.calls.ended),
    )


def _once_more(
    make: Callable[[Sequence[Tensor]], _Recorder], run: Callable[..., Any], args: Sequence[Any]
) -> _Recorder | None:
    """What the step changes again when it runs once more; None if it cannot, which training will say.

    The rest it has made for good. All stages of a process share that and what was made with it (hooks, tables): a stage
    of its own mind would make everything once more.
    """
    again = make(tree.tensors(args))
    try:
        with again.changes, again.assignments.watched(), again.following(), watching(again.calls):
            run(*args)
    except Exception:  # of any type: it is the user's code
        return None
    return again


def _check_loss(result: Any) -> None:
    if result is None:
        raise SkippedStepError("training_step returned None, so it has not shown what leads to a loss")
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(result).__name__} instead of a loss; return a tensor, or a dict with the "
            "key 'loss', or None to skip a micro-batch"
        )


_ANYWHERE = sys.maxsize


def owned_tensors(module: nn.Module, glue_states: Collection[str]) -> dict[int, str]:
    """``id -> full name`` of the tensors whose use is a node: parameters, and buffers that glue changes, or sees."""
    owned = {id(p): name for name, p in module.named_parameters()}
    if glue_states:
        owned |= {id(b): name for name, b in module.named_buffers() if name in glue_states}
    return owned


class _Recorder(StepTracer):
    """Executes everything and notes each node."""

    rehearses = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        device: torch.device | None,
        foresight: Foresight,
        ignore: Collection[nn.Module],
        batch: Sequence[Tensor],
    ) -> None:
        self.module = module
        self.units = Units(module, units, ignore)
        self._device = device
        self._in_units = {id(t) for path in units for t in _tensors_of(module.get_submodule(path))}
        # a unit that is not called itself may have buffers that glue changes
        self._buffers = dict(module.named_buffers())
        self._buffer_names = {id(b): name for name, b in self._buffers.items()}
        self._buffers_seen: set[str] = set()  # by glue
        self.changes = Changes(module, batch)
        self.mutable = set(foresight.mutable)
        self.mutations = Mutations(module, foresight.mutable, lambda: len(self.nodes), ignore)
        self.assignments = Assignments(module, lambda: None if self._inside else len(self.nodes), ignore)
        self.glue_states = set(foresight.glue_states)
        self._exports = set(foresight.exports)
        self._readers = set(foresight.readers)
        super().__init__({}, owned_tensors(module, foresight.glue_states), device)
        self.watch = DrawWatch(module, device)
        self.calls = Calls(self.watch, self._is_outside, lambda: len(self.nodes))
        self.batch = BatchUse(device)
        self._questions = Questions()
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.kept: set[int] = set()
        self.changed_in_units: set[str] = set()
        self.rewritten: set[str] = set()
        self.resident: set[str] = set(foresight.readers)
        self.pinned: list[tuple[int, int, str]] = []
        self.leaving: set[str] = set()
        self._storages: dict[int, int] = {}
        self._provenance = Provenance()
        self._written: dict[int, tuple[Tensor, int]] = {}  # tensors that are nobody's arguments -> node that writes
        self._packer = Packer(module)
        self._writers: dict[int, list[int]] = defaultdict(list)  # lasting object -> nodes that write into it
        self._held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        exports = path in self._exports
        objects = Objects((args, kwargs), module.modules() if exports else ())
        visible = tree.tensors((args, kwargs))
        tensors = [*visible, *objects.tensors]
        versions, calls = [version_of(t) for t in tensors], len(self.watch.calls)
        random_before = random_bits(self._device)
        with self._visit(module):
            before = self._state(path)
            self.changes.begin()
            provenance = self._provenance.at(len(self.nodes), args, kwargs)
            with self.mutations.elsewhere(), provenance, Flops() as counter:
                result = run(*args, **kwargs)
            changes = self._changed(before)
        draws = random_before != random_bits(self._device)
        used = self._provenance.used
        states = self._states([*module.parameters(), *module.buffers(), *used], changes)
        result = self._provenance.followed(result, (args, kwargs), module.modules() if exports else ())
        self.mutations.pass_over()
        used += [t for t in tree.tensors(result) if self._provenance.birth(t) is not None or self.is_known(t)]
        inputs = self._inputs([*visible, *used])
        parameters = self._parameters([*module.parameters(), *used])
        free = not (inputs or parameters or states or draws or path in self.resident)
        self._find_hidden(used, f"unit '{path}'", free, path)
        if parameters or states or draws:
            self.resident.add(path)
        elif free:
            self.batch.computed([*visible, *used], len(self.nodes))
            self.assignments.computed([*visible, *used], result, len(self.nodes))
            self._provenance.forget()
            return result
        elif not self._inputs(visible):
            self._readers.add(path)
        flops = float(counter.get_total_flops()) or recurrent_flops(module, result)
        node = Node(
            len(self.nodes), "call", path, source_line(), inputs, parameters=parameters, states=states,
            changes=tuple(changes), draws=draws, drawn=tuple(self.watch.calls[calls:]),
            flops=flops + sum(t.numel() for t in tree.tensors(result)),
        )  # fmt: skip
        self._taken([*visible, *used])
        changed = {id(t) for t, version in zip(tensors, versions, strict=True) if version_of(t) != version}
        node, given = self._opened(node, result, objects, exports, not changed <= set(map(id, visible)))
        self._note_writes(node, [self._buffer(name) for name in changes], changed)
        self._add(node, given, tensors if node.opens else visible, versions)
        return result

    def _opened(
        self, node: Node, result: Any, objects: Objects, exports: bool, writes: bool
    ) -> tuple[Node, list[Tensor]]:
        """The node, and the tensors that it gave: in its result, or in all that it wrote into objects as well."""
        if not writes and not self._packer.is_needed(result, objects):
            return node, tree.tensors(result)
        try:
            given = self._packer.pack(result, objects)[1]
        except Exception as error:  # of any type: pickling runs code of the objects
            reason = f"{node} leaves in an object what cannot be sent to another stage: {error}"
            self.pinned.append((node.index + 1, _ANYWHERE, reason))
            return node, tree.tensors(result)
        written = [change.index for change in objects.changes()]
        lasting = tuple(i for i in written if self.mutations.objects.index(objects.owners[i]) is not None)
        for owner in (objects.owners[i] for i in lasting):
            first = self._writers[id(owner)][:1]
            self._writers[id(owner)].append(node.index)
            if first and not isinstance(owner, nn.Module):
                reason = f"an object of type {type(owner).__name__} that outlives the step is written to on both sides"
                self.pinned.append((first[0] + 1, node.index, reason))
        return replace(node, opens=True, exports=exports, lasting=lasting), given

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        versions, calls = [version_of(t) for t in tensors], len(self.watch.calls)
        outer = Outermost(self.watch, self._visit, self._state)
        random_before = random_bits(self._device)
        self.changes.begin()
        provenance = self._provenance.at(len(self.nodes), args, kwargs)
        with self.mutations.elsewhere(), watching(outer), provenance, Flops() as counter:
            result = run(*args, **kwargs)
        used, given = self._provenance.used, tree.tensors(result)
        names = dict.fromkeys(self.watch.path(module) for module in outer.modules)
        self._find_hidden(used, "a checkpointed region", False)
        changes = self._changed(outer.state)
        node = Node(
            len(self.nodes), "region", ", ".join(names) or "a function", source_line(),
            self._inputs([*tensors, *used]), parameters=self._parameters(used), states=self._states(used, changes),
            changes=tuple(changes),
            draws=random_before != random_bits(self._device), drawn=tuple(self.watch.calls[calls:]),
            flops=float(counter.get_total_flops()) + sum(t.numel() for t in given),
        )  # fmt: skip
        self._taken([*tensors, *used])
        self._add(node, given, tensors, versions)
        return result

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        begin = len(self.nodes)
        yield from generator
        self.pinned.append(
            (begin + 1, len(self.nodes) - 1, f"it lies in a region of torch.utils.checkpoint at {source_line()}")
        )

    def drawn(self, node: Node) -> Node:
        """The node, of whose inner calls only those of drawing modules are left."""
        drawing = self.watch.drawing | self.watch.host_drawing
        return replace(node, drawn=tuple(path for path in node.drawn if path in drawing))

    def _state(self, path: str) -> list[tuple[str, Tensor, Tensor]]:
        """Full name, tensor and what is needed to see whether it changes, for a module's parameters and buffers."""
        module = self.module.get_submodule(path)
        with untraced():  # nothing is lent for it
            state = [(self._owned[id(p)], p, p.detach()) for p in module.parameters()]
        return state + [(f"{path}.{name}", b, b.detach().clone()) for name, b in module.named_buffers()]

    def _changed(self, state: Sequence[tuple[str, Tensor, Tensor]]) -> list[str]:
        """Names of what has changed since: written into, or in another way."""
        moved = {name for name, p, before in state if name not in self._buffers and address(p) != address(before)}
        self.changes.keep((name, before) for name, _, before in state if name in moved)
        self.rewritten |= self.changes.written | moved
        # Compared by value: batch normalisation changes its statistics and does not say so.
        buffers = ((name, b, self._buffer(name), before) for name, b, before in state if name in self._buffers)
        other = {name for name, b, now, before in buffers if now is not b or not torch.equal(b, before)}
        found = self.changes.written | moved | other
        order = dict.fromkeys(name for name, _, _ in state)
        return [*(name for name in order if name in found), *sorted(found - order.keys())]

    def _states(self, used: Sequence[Tensor], changed: Sequence[str]) -> tuple[str, ...]:
        """What a node changes; and what it uses of that which other nodes change where glue sees it."""
        self.changed_in_units.update(changed)
        seen = [self._owned[id(t)] for t in used if self._owned.get(id(t)) in self.glue_states]
        return tuple(dict.fromkeys((*changed, *seen)))

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        inputs = self._inputs(tensors)
        parameters = tuple(dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned))
        name = function_name(func)
        self._find_hidden(tensors, f"{name}()", True)
        versions = [version_of(t) for t in tensors]
        self.mutations.look()
        free = not inputs and not parameters
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        mine = {known: t for t in tensors if (known := self._name_of(t)) is not None}
        self._buffers_seen.update(mine)
        random_before = random_bits(self._device)
        with self._visiting([t for t in tensors if id(t) in self._in_units]):
            before = [(n, t, t.detach().clone() if n in self._buffers else t.detach()) for n, t in mine.items()]
            self.changes.begin()
            result = func(*args, **kwargs)
            if self.changes.strange:
                self._refuse_strange(name)
            changed = self._changed(before)
        self.glue_states.update(changed)
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, len(self.nodes))
        if free:
            self.assignments.computed(tensors, result, len(self.nodes))
            return result
        states = tuple(dict.fromkeys((*changed, *(name for name in parameters if name in self.glue_states))))
        parameters = tuple(name for name in parameters if name not in self._buffers)
        draws = random_before != random_bits(self._device)
        if name in ("backward", "grad"):
            self.pinned.append((0, _ANYWHERE, f"the step calls {name}() itself at {source_line()}"))
        self._taken(tensors)
        leaves = tree.flatten(result)[0]
        plain = all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
        entry = described(result) if plain and not draws and not self.batch.knows(tensors) else None
        self._add(
            Node(len(self.nodes), "glue", name, source_line(), inputs, parameters=parameters, states=states,
                 changes=tuple(changed), entry=entry, draws=draws, asks=self._questions.asked(name, inputs, result),
                 flops=float(sum(t.numel() for t in tree.tensors(result)))),
            tree.tensors(result), tensors, versions,
        )  # fmt: skip
        self._questions.note(name, inputs, self.nodes[-1].outputs)
        return result

    def _taken(self, tensors: Sequence[Tensor]) -> None:
        """The node that comes next takes these tensors."""
        self.batch.taken(tensors, len(self.nodes))
        self.assignments.taken([t for t in tensors if self.value_of(t) is None], len(self.nodes))

    def _name_of(self, tensor: Tensor) -> str | None:
        name = self._owned.get(id(tensor))
        return self._buffer_names.get(id(tensor)) if name is None else name

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self.keep(tree.tensors((args, kwargs)))
        with self.mutations.elsewhere():
            return run(*args, **kwargs)

    def _add(self, node: Node, given: list[Tensor], tensors: list[Tensor], versions: list[int]) -> None:
        """Note a node that gave these tensors and may have written into those that it took."""
        writes: list[tuple[int, int, bool]] = []
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=False)):
            if version_of(tensor) == version:
                continue
            for target, base in ((tensor, False), (tensor._base, True)):
                if target is not None and id(target) not in self._owned:  # whose uses are known by name
                    known = self.value_of(target) if self.is_known(target) else None
                    writes.append((i, self._new_value(target, node.name) if known is None else known, base))
        outputs = []
        for leaf in given:
            if self.is_known(leaf):
                outputs.append(self._known[id(leaf)][1])
                continue
            same = next((i for i, t in enumerate(tensors) if t is leaf), None)
            outputs.append(-1 - same if same is not None else self._new_value(leaf, node.name))
        self.nodes.append(replace(node, outputs=tuple(outputs), writes=tuple(dict.fromkeys(writes))))

    def _is_outside(self, module: nn.Module) -> bool:
        """Whether a module, which is called now, is no unit and in no unit."""
        return not self._inside and self.unit(module) is None

    def unit(self, module: nn.Module) -> str | None:
        return self.units.path(module)

    def _inputs(self, tensors: list[Tensor]) -> tuple[int, ...]:
        found = (self.value_of(t) for t in tensors)
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def _new_value(self, tensor: Tensor, name: str) -> int:
        index = len(self.values)
        storage = self._storages.setdefault(address(tensor), len(self._storages))
        self.values.append(
            Value(
                index, name, tuple(tensor.shape), str(tensor.dtype), tensor.numel() * tensor.element_size(),
                tensor.requires_grad, storage,
            )
        )  # fmt: skip
        self._held.append(tensor)
        self.know(tensor, index)
        return index

    def keep(self, tensors: list[Tensor]) -> None:
        """These tensors are needed at the end of the step."""
        self.kept.update(self._inputs(tensors))
        self.batch.kept(tensors)

    def _find_hidden(self, tensors: list[Tensor], name: str, everywhere: bool, unit: str = "") -> None:
        """A tensor that was made inside a unit and came out of no node was left behind, say in a global variable.

        Args:
            tensors: that something takes.
            name: of that.
            everywhere: whether each stage behind the unit executes it.
            unit: path, if it is a unit.
        """
        end = _ANYWHERE if everywhere else len(self.nodes)
        for tensor in tensors:
            birth = self._provenance.birth(tensor)
            wrote = self._written.get(id(tensor))
            if wrote is not None and wrote[0] is tensor:
                writer = self.nodes[wrote[1]]
                if writer.name != unit or id(tensor) not in self._buffer_names:  # whose changes are known
                    reason = f"{name} at {source_line()} reads a tensor that {writer} writes into"
                    self.pinned.append((wrote[1] + 1, end, reason))
            if birth is None or birth >= len(self.nodes) or self.value_of(tensor) is not None:
                continue
            writer = self.nodes[birth]
            if writer.kind == "call" and writer.name == unit and self._keeps(unit, tensor):
                host_drawing = any(f"{path}.".startswith(f"{unit}.") for path in self.watch.host_drawing)
                if host_drawing or not self._provenance.makes_again(tensor):
                    reason = f"{name} at {source_line()} reads an attribute of its own that {writer} has made"
                    self.pinned.append((birth + 1, end, reason))
                continue
            if writer.kind == "call":
                self._exports.add(writer.name)
                self.leaving.add(writer.name)
            reason = f"{name} at {source_line()} reads a tensor that {writer} left where it cannot be followed"
            self.pinned.append((birth + 1, end, reason))

    def _keeps(self, unit: str, tensor: Tensor) -> bool:
        """Whether a tensor is in an attribute of a unit after a call that read it, so maybe in the next step as well.

        What is not is made anew in every step, and travels.
        """
        held = set(map(id, Objects((), self.module.get_submodule(unit).modules()).tensors))
        return id(tensor) in held or id(tensor._base) in held

    def _note_writes(self, node: Node, buffers: Sequence[Tensor | None], followed: Collection[int]) -> None:
        """What a unit writes into besides its arguments is not sent to other stages."""
        for tensor in (*self._provenance.written(), *(b for b in buffers if b is not None)):
            if id(tensor) not in followed:
                self._written.setdefault(id(tensor), (tensor, node.index))

    def _parameters(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned)
        return tuple(name for name in names if name not in self._buffers)

    @property
    def foresight(self) -> Foresight:
        """What has been found out."""
        return Foresight(
            frozenset(self.glue_states), frozenset(self._exports), frozenset(self._readers), frozenset(self.mutable)
        )

    def _refuse_strange(self, name: str) -> None:
        """State must have a name, by which each stage finds it and a checkpoint keeps it."""
        self.pinned.append(
            (0, _ANYWHERE, f"{name}() at {source_line()} changes a tensor in place that lives on after the step and is "
                           "no parameter or buffer; make it one with register_buffer")
        )  # fmt: skip

    def find_reassigned_buffers(self) -> None:
        """A buffer that glue replaces by a new tensor must be replaced on the last stage only."""
        for name, buffer in self._buffers.items():
            if name not in self.changed_in_units and self._buffer(name) is not buffer:
                self.glue_states.add(name)
                first = next((node.index for node in self.nodes if name in node.states), 0)
                self.pinned.append((first + 1, _ANYWHERE, f"the step assigns a new tensor to the buffer '{name}'"))

    def find_shared_states(self) -> None:
        """What a unit changes and other nodes use must be on one stage with all of them."""
        users = Counter(name for node in self.nodes for name in node.parameters)
        shared = {name for name in self.changed_in_units if users[name] > 1 or name in self._buffers_seen}
        self.glue_states |= shared

    def _buffer(self, name: str) -> Tensor | None:
        path, _, leaf = name.rpartition(".")
        return self.module.get_submodule(path)._buffers.get(leaf)

    # -- device -------------------------------------------------------------------------------------

    def visiting(self) -> Any:
        """What lies outside of units is on the device while the step is captured."""
        return Visit([t for t in _tensors_of(self.module) if id(t) not in self._in_units], self._device)

    def _visit(self, module: nn.Module) -> Any:
        return self._visiting(_tensors_of(module))

    def _visiting(self, tensors: Sequence[Tensor]) -> Any:
        named = [(self._name_of(t) or "", t) for t in tensors]
        return self.changes.visiting(Visit(tensors, self._device), named)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]

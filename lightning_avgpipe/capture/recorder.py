"""The recorder: executes a step and notes its nodes and values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.attributes import Assignments, Mutations
from lightning_avgpipe.capture.batch_use import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.flop_counter import Flops, recurrent_flops
from lightning_avgpipe.capture.graph import Node, Value
from lightning_avgpipe.capture.hidden import ANYWHERE, HiddenTensors
from lightning_avgpipe.capture.named_state import NamedState
from lightning_avgpipe.capture.outermost import Outermost
from lightning_avgpipe.capture.provenance import Provenance
from lightning_avgpipe.capture.questions import Questions
from lightning_avgpipe.capture.random_use import DrawWatch, random_bits
from lightning_avgpipe.capture.saved_tensors import tensors_of
from lightning_avgpipe.capture.shared_objects import SharedObjects
from lightning_avgpipe.capture.tracer import StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.capture.units import Units
from lightning_avgpipe.capture.visit import Visit
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer
from lightning_avgpipe.utils.placeholder import described
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address, version_of


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


def owned_tensors(module: nn.Module, glue_states: Collection[str]) -> dict[int, str]:
    """``id -> full name`` of the tensors whose use is a node: parameters, and buffers that glue changes, or sees."""
    owned = {id(p): name for name, p in module.named_parameters()}
    if glue_states:
        owned |= {id(b): name for name, b in module.named_buffers() if name in glue_states}
    return owned


class Recorder(StepTracer):
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
        self._in_units = {id(t) for path in units for t in tensors_of(module.get_submodule(path))}
        self._buffers_seen: set[str] = set()  # by glue
        self.mutable = set(foresight.mutable)
        self.mutations = Mutations(module, foresight.mutable, lambda: len(self.nodes), ignore)
        self.shared = SharedObjects(
            self.mutations.attributes, self.mutations.chosen, lambda: len(self.nodes), lambda: self._inside
        )
        self.assignments = Assignments(
            module, lambda: None if self._inside else len(self.nodes), ignore, self.shared.was_read
        )
        self.glue_states = set(foresight.glue_states)
        self._readers = set(foresight.readers)
        super().__init__({}, owned_tensors(module, foresight.glue_states), device)
        # a unit that is not called itself may have buffers that glue changes
        self.state = NamedState(module, self._owned, batch)
        self.watch = DrawWatch(module, device)
        self.calls = Calls(self.watch, self._is_outside, lambda: len(self.nodes))
        self.batch = BatchUse(device)
        self._questions = Questions()
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.kept: set[int] = set()
        self.changed_in_units: set[str] = set()
        self.resident: set[str] = set(foresight.readers)
        self.pinned: list[tuple[int, int, str]] = []
        self._storages: dict[int, int] = {}
        self._provenance = Provenance()
        self.hidden = HiddenTensors(
            module, self.nodes, self._provenance, lambda tensor: self.known.value_of(tensor) is not None,
            self.state.is_buffer, self._draws_on_host, foresight.exports,
        )  # fmt: skip
        self._packer = Packer(module)
        self._writers: dict[int, list[int]] = defaultdict(list)  # lasting object -> nodes that write into it
        self._held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        exports = path in self.hidden.exports
        objects = Objects((args, kwargs), module.modules() if exports else ())
        visible = tree.tensors((args, kwargs))
        tensors = [*visible, *objects.tensors]
        versions, calls = [version_of(t) for t in tensors], len(self.watch.calls)
        random_before = random_bits(self._device)
        with self._visit(module):
            before = self.state.of(path)
            self.state.changes.begin()
            provenance = self._provenance.at(len(self.nodes), args, kwargs)
            with self.mutations.elsewhere() as objects_changed, provenance, Flops() as counter:
                result = run(*args, **kwargs)
            changes = self.state.changed(before)
        draws = random_before != random_bits(self._device)
        used = self._provenance.used
        states = self._states([*module.parameters(), *module.buffers(), *used], changes)
        result = self._provenance.followed(result, (args, kwargs), module.modules() if exports else ())
        self.mutations.pass_over()
        used += [t for t in tree.tensors(result) if self._provenance.birth(t) is not None or t in self.known]
        inputs = self._inputs([*visible, *used])
        parameters = self._parameters([*module.parameters(), *used])
        free = not (inputs or parameters or states or draws or path in self.resident)
        self.pinned += self.hidden.find(used, f"unit '{path}'", free, path)
        if parameters or states or draws:
            self.resident.add(path)
        elif free:
            self.batch.computed([*visible, *used], len(self.nodes))
            self.assignments.computed([*visible, *used], result, len(self.nodes))
            self._provenance.forget()
            self.shared.was_free()
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
        self.shared.wrote(node.index, path, objects_changed, set(map(id, objects.owners)))
        self.hidden.wrote(node, [self.state.buffer(name) for name in changes], changed)
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
            self.pinned.append((node.index + 1, ANYWHERE, reason))
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
        outer = Outermost(self.watch, self._visit, self.state.of)
        random_before = random_bits(self._device)
        self.state.changes.begin()
        provenance = self._provenance.at(len(self.nodes), args, kwargs)
        with self.mutations.elsewhere(), watching(outer), provenance, Flops() as counter:
            result = run(*args, **kwargs)
        used, given = self._provenance.used, tree.tensors(result)
        names = dict.fromkeys(self.watch.path(module) for module in outer.modules)
        self.pinned += self.hidden.find(used, "a checkpointed region", False)
        changes = self.state.changed(outer.state)
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
        self.pinned += self.hidden.find(tensors, f"{name}()", True)
        versions = [version_of(t) for t in tensors]
        self.mutations.look()
        free = not inputs and not parameters
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        mine = {known: t for t in tensors if (known := self.state.name_of(t)) is not None}
        self._buffers_seen.update(mine)
        random_before = random_bits(self._device)
        with self._visiting([t for t in tensors if id(t) in self._in_units]):
            before = self.state.of_tensors(mine)
            self.state.changes.begin()
            result = func(*args, **kwargs)
            if self.state.changes.strange:
                self._refuse_strange(name)
            changed = self.state.changed(before)
        self.glue_states.update(changed)
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, len(self.nodes))
        if free:
            self.assignments.computed(tensors, result, len(self.nodes))
            return result
        states = tuple(dict.fromkeys((*changed, *(name for name in parameters if name in self.glue_states))))
        parameters = tuple(name for name in parameters if name not in self.state.buffers)
        draws = random_before != random_bits(self._device)
        if name in ("backward", "grad"):
            self.pinned.append((0, ANYWHERE, f"the step calls {name}() itself at {source_line()}"))
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
        self.assignments.taken([t for t in tensors if self.known.value_of(t) is None], len(self.nodes))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self.keep(tree.tensors((args, kwargs)))
        with self.mutations.elsewhere():
            return run(*args, **kwargs)

    def _add(self, node: Node, given: list[Tensor], tensors: list[Tensor], versions: list[int]) -> None:
        """Note a node that gave these tensors and may have written into those that it took."""
        self.assignments.settle()
        writes: list[tuple[int, int, bool]] = []
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=False)):
            if version_of(tensor) == version:
                continue
            for target, base in ((tensor, False), (tensor._base, True)):
                if target is not None and id(target) not in self._owned:  # whose uses are known by name
                    known = self.known.own_value_of(target)
                    writes.append((i, self._new_value(target, node.name) if known is None else known, base))
        outputs = []
        for leaf in given:
            known = self.known.own_value_of(leaf)
            if known is not None:
                outputs.append(known)
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
        found = (self.known.value_of(t) for t in tensors)
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
        self.known.learn(tensor, index)
        return index

    def keep(self, tensors: list[Tensor]) -> None:
        """These tensors are needed at the end of the step."""
        self.kept.update(self._inputs(tensors))
        self.batch.kept(tensors)

    def _parameters(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned)
        return tuple(name for name in names if name not in self.state.buffers)

    def _draws_on_host(self, unit: str) -> bool:
        return any(f"{path}.".startswith(f"{unit}.") for path in self.watch.host_drawing)

    def close(self) -> None:
        """Forget everything. It and its parts know each other, and what it has seen, all activations of a step, would
        stay until the garbage collector comes by, which may be many captures later.
        """
        vars(self).clear()

    @property
    def foresight(self) -> Foresight:
        """What has been found out."""
        return Foresight(
            frozenset(self.glue_states),
            frozenset(self.hidden.exports),
            frozenset(self._readers),
            frozenset(self.mutable),
        )

    def _refuse_strange(self, name: str) -> None:
        """State must have a name, by which each stage finds it and a checkpoint keeps it."""
        self.pinned.append(
            (0, ANYWHERE, f"{name}() at {source_line()} changes a tensor in place that lives on after the step and is "
                           "no parameter or buffer; make it one with register_buffer")
        )  # fmt: skip

    def finish(self, result: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The step has returned: attributes that it changed, and those that it keeps for the next time."""
        self.assignments.settle()
        attributes, carried = tuple(self.assignments.changed()), tuple(self.assignments.carried())
        self.mutations.look()
        self.mutable |= self.mutations.found()
        self.watch.look()
        self.keep(tree.tensors(result))
        self._find_reassigned_buffers()
        self._find_shared_states()
        self.pinned += self.assignments.pinned()
        return attributes, carried

    def _find_reassigned_buffers(self) -> None:
        """A buffer that glue replaces by a new tensor must be replaced on the last stage only."""
        for name, buffer in self.state.buffers.items():
            if name not in self.changed_in_units and self.state.buffer(name) is not buffer:
                self.glue_states.add(name)
                first = next((node.index for node in self.nodes if name in node.states), 0)
                self.pinned.append((first + 1, ANYWHERE, f"the step assigns a new tensor to the buffer '{name}'"))

    def _find_shared_states(self) -> None:
        """What a unit changes and other nodes use must be on one stage with all of them."""
        users = Counter(name for node in self.nodes for name in node.parameters)
        shared = {name for name in self.changed_in_units if users[name] > 1 or name in self._buffers_seen}
        self.glue_states |= shared

    # -- device -------------------------------------------------------------------------------------

    def visiting(self) -> Any:
        """What lies outside of units is on the device while the step is captured."""
        return Visit([t for t in tensors_of(self.module) if id(t) not in self._in_units], self._device)

    def _visit(self, module: nn.Module) -> Any:
        return self._visiting(tensors_of(module))

    def _visiting(self, tensors: Sequence[Tensor]) -> Any:
        named = [(self.state.name_of(t) or "", t) for t in tensors]
        return self.state.changes.visiting(Visit(tensors, self._device), named)

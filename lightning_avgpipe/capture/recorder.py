"""The recorder: executes a step and notes its nodes and values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.attributes import Assignments, Key, Mutations
from lightning_avgpipe.capture.batch_use import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.flop_counter import Flops, recurrent_flops
from lightning_avgpipe.capture.generator_use import GeneratorWatch
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.hidden import ANYWHERE, HiddenTensors
from lightning_avgpipe.capture.named_state import NamedState
from lightning_avgpipe.capture.outermost import Outermost
from lightning_avgpipe.capture.provenance import Provenance
from lightning_avgpipe.capture.questions import Questions
from lightning_avgpipe.capture.random_use import DrawWatch, random_bits
from lightning_avgpipe.capture.saved_tensors import tensors_of
from lightning_avgpipe.capture.shared_objects import SharedObjects
from lightning_avgpipe.capture.state_use import StateUse
from lightning_avgpipe.capture.tracer import METADATA, StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.capture.units import Units
from lightning_avgpipe.capture.values import Values
from lightning_avgpipe.capture.visit import Visit
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer
from lightning_avgpipe.utils.placeholder import described
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import is_transformed, version_of


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


class _Effects(NamedTuple):
    """What a unit does besides giving a result: to state, generators and lasting objects, and how much it computes."""

    changes: list[str]
    draws: bool
    objects_changed: list[Any]
    flops: float


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
        self.mutable = set(foresight.mutable)
        self.mutations = Mutations(module, foresight.mutable, lambda: len(self.nodes), ignore)
        self.shared = SharedObjects(
            self.mutations.attributes, self.mutations.chosen, lambda: len(self.nodes), lambda: self._inside
        )
        self.assignments = Assignments(
            module, lambda: None if self._inside else len(self.nodes), ignore, self.shared.was_read
        )
        self.generators = GeneratorWatch(self.mutations.attributes)
        self.freely: set[Key] = set()  # attributes that units assign which every stage runs that comes so far
        self._readers = set(foresight.readers)
        super().__init__({}, owned_tensors(module, foresight.glue_states), device)
        # a unit that is not called itself may have buffers that glue changes
        self.state = NamedState(module, self._owned, batch)
        self.uses = StateUse(self.state, self._owned, foresight.glue_states)
        self.watch = DrawWatch(module, device)
        self.calls = Calls(self.watch, self._is_outside, lambda: len(self.nodes))
        self.batch = BatchUse(device)
        self._questions = Questions()
        self.nodes: list[Node] = []
        self.values = Values(self.known)
        self.kept: set[int] = set()
        self.resident: set[str] = set(foresight.readers)
        self.pinned: list[tuple[int, int, str]] = []
        self._provenance = Provenance()
        self.hidden = HiddenTensors(
            module, self.nodes, self._provenance, lambda tensor: self.known.value_of(tensor) is not None,
            self.state.is_buffer, self._draws_on_host, foresight.exports,
        )  # fmt: skip
        self._packer = Packer(module)
        self._writers: dict[int, list[int]] = defaultdict(list)  # lasting object -> nodes that write into it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA and not self._inside and self._questions.told(func, self.values.of(args[:1])):
            self.nodes[-1] = replace(self.nodes[-1], asks=True)
        return super().__torch_function__(func, types, args, kwargs)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.state.foreign(module):
            self.pinned.append(
                (0, ANYWHERE, f"at {source_line()} unit '{path}' has tensors of the step as its weights")
            )
        exports = path in self.hidden.exports
        exporting = module.modules() if exports else ()
        generators = self.generators.given(Objects((args, kwargs), exporting, opaque="generators"), path)
        objects = Objects((args, kwargs), module.modules() if exports else (), generators=generators)
        visible = tree.tensors((args, kwargs))
        tensors = [*visible, *objects.tensors]
        versions, calls = [version_of(t) for t in tensors], len(self.watch.calls)
        result, (changes, draws, objects_changed, flops) = self._executed(module, path, run, args, kwargs)
        used = self._provenance.used
        states = self.uses.of_unit([*module.parameters(), *module.buffers(), *used], changes)
        result = self._provenance.followed(result, (args, kwargs), module.modules() if exports else ())
        self.mutations.pass_over()
        used += [t for t in tree.tensors(result) if self._provenance.birth(t) is not None or t in self.known]
        inputs = self.values.of([*visible, *used])
        parameters = self.uses.parameters([*module.parameters(), *used])
        free = not (inputs or parameters or states or draws or path in self.resident)
        self.pinned += self.hidden.find(used, f"unit '{path}'", free, path)
        if parameters or states or draws:
            self.resident.add(path)
        elif free:
            self.batch.computed([*visible, *used], len(self.nodes))
            self.assignments.computed([*visible, *used], result, len(self.nodes))
            self._provenance.forget()
            self.shared.was_free()
            self.mutations.between(objects_changed)
            self.freely |= self.mutations.assigned_in(module)
            self.generators.look(len(self.nodes))
            return result
        elif not self.values.of(visible):
            self._readers.add(path)
        flops = flops or recurrent_flops(module, result)
        own = set(map(id, module.parameters()))
        self._pin_handed_out([t for t in tensors if id(t) in own], f"unit '{path}'")
        node = Node(
            len(self.nodes), "call", path, source_line(), inputs, parameters=parameters, states=states,
            changes=tuple(changes), draws=draws, drawn=tuple(self.watch.calls[calls:]), generators=generators,
            flops=flops + sum(t.numel() for t in tree.tensors(result)),
        )  # fmt: skip
        self._taken([*visible, *used])
        changed = {id(t) for t, version in zip(tensors, versions, strict=True) if version_of(t) != version}
        self.generators.drew(node.index)
        writes = bool(generators) or not changed <= set(map(id, visible))
        node, given = self._opened(node, result, objects, exports, writes)
        self.shared.wrote(node.index, path, objects_changed, set(map(id, objects.owners)))
        self.hidden.wrote(node, [self.state.buffer(name) for name in changes], changed)
        self._add(node, given, tensors if node.opens else visible, versions)
        return result

    def _executed(
        self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, _Effects]:
        """The result of a unit, and what it did besides."""
        random_before = random_bits(self._device)
        self.generators.look(len(self.nodes))
        with self._visit(module):
            before = self.state.of(path)
            self.state.changes.begin()
            provenance = self._provenance.at(len(self.nodes), args, kwargs)
            with self.mutations.elsewhere() as objects_changed, provenance, Flops() as counter:
                result = run(*args, **kwargs)
            changes = self.state.changed(before)
        draws = random_before != random_bits(self._device)
        return result, _Effects(changes, draws, objects_changed, float(counter.get_total_flops()))

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
        made = self._made_generators(args, kwargs)
        self.generators.look(len(self.nodes))
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
            self.values.of([*tensors, *used]), parameters=self.uses.parameters(used),
            states=self.uses.of_unit(used, changes), changes=tuple(changes),
            draws=random_before != random_bits(self._device), drawn=tuple(self.watch.calls[calls:]),
            flops=float(counter.get_total_flops()) + sum(t.numel() for t in given),
        )  # fmt: skip
        self._taken([*tensors, *used])
        self.generators.drew(node.index)
        if made.changed():
            what = f"{node} draws random numbers from a generator that the step makes"
            self.pinned.append((node.index + 1, ANYWHERE, what))
        self._add(node, given, tensors, versions)
        return result

    def _made_generators(self, args: Any, kwargs: Any) -> Objects:
        """Those of random numbers among arguments that do not outlive the step."""
        found = Objects((args, kwargs), opaque="generators")
        chosen = self.generators.given(found, "")
        return found.among([id(one) for i, one in enumerate(found.generators) if i in chosen])

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

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        inputs = self.values.of(tensors)
        name = function_name(func)
        self.pinned += self.hidden.find(tensors, f"{name}()", True)
        versions = [version_of(t) for t in tensors]
        self.mutations.look()
        self.generators.look(len(self.nodes))
        free = not inputs and not any(id(t) in self._owned for t in tensors)
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        random_before = random_bits(self._device)
        with self._visiting([t for t in tensors if id(t) in self._in_units]):
            before = self.state.of_tensors(self.uses.seen(tensors))
            self.state.changes.begin()
            result = func(*args, **kwargs)
            if self.state.changes.strange:
                self._refuse_strange(name)
            changed = self.state.changed(before)
        self.uses.by_glue.update(changed)
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, len(self.nodes))
        if free:
            self.assignments.computed(tensors, result, len(self.nodes))
            return result
        self.generators.drew(len(self.nodes))
        self.mutations.pass_over()
        states, parameters = self.uses.of_glue(tensors, changed), self.uses.parameters(tensors)
        draws = random_before != random_bits(self._device)
        if any(map(is_transformed, [*tensors, *tree.tensors(result)])):
            reason = f"what is computed by torch.vmap or torch.func at {source_line()} cannot be followed out of it"
            self.pinned.append((len(self.nodes) + 1, ANYWHERE, reason))
        if name in ("backward", "grad"):
            self.pinned.append((0, ANYWHERE, f"the step calls {name}() itself at {source_line()}"))
        if name.endswith(".apply"):  # its backward may ask which of its inputs are the parameters that it uses
            self._pin_handed_out(tensors, f"{name}()")
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
        masks = self.values.of([t for t in tensor_arguments(*args[1:]) if t.dtype is torch.bool])
        self._questions.note(name, args, inputs, masks, self.nodes[-1].outputs)
        return result

    def _pin_handed_out(self, tensors: Sequence[Tensor], what: str) -> None:
        """What comes next takes these tensors, and those that are parameters themselves must come as such: no cut may
        lie between it and a unit that has returned them, since after a cut they would be tensors with their contents.
        """
        for tensor in tensors:
            value, name = self.known.own_value_of(tensor), self._owned.get(id(tensor))
            if value is not None and name is not None:
                giver = next(node for node in self.nodes if value in node.outputs)
                reason = f"{what} at {source_line()} takes the parameter '{name}', which {giver} has returned"
                self.pinned.append((giver.index + 1, len(self.nodes), reason))

    def _taken(self, tensors: Sequence[Tensor]) -> None:
        """The node that comes next takes these tensors."""
        self.batch.taken(tensors, len(self.nodes))
        self.assignments.taken([t for t in tensors if self.known.value_of(t) is None], len(self.nodes))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self.keep(tree.tensors((args, kwargs)))
        self.generators.look(len(self.nodes))
        with self.mutations.elsewhere():
            result = run(*args, **kwargs)
        self.generators.pass_over()
        return result

    def _add(self, node: Node, given: list[Tensor], tensors: list[Tensor], versions: list[int]) -> None:
        """Note a node that gave these tensors and may have written into those that it took."""
        self.assignments.settle()
        writes = self.values.written(tensors, versions, self._owned, node.name)
        self.nodes.append(replace(node, outputs=self.values.given(given, tensors, node.name), writes=writes))

    def _is_outside(self, module: nn.Module) -> bool:
        """Whether a module, which is called now, is no unit and in no unit."""
        return not self._inside and self.unit(module) is None

    def unit(self, module: nn.Module) -> str | None:
        return self.units.path(module)

    def keep(self, tensors: list[Tensor]) -> None:
        """These tensors are needed at the end of the step."""
        self.kept.update(self.values.of(tensors))
        self.batch.kept(tensors)

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
            frozenset(self.uses.by_glue),
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
        self.generators.look(len(self.nodes))
        self.generators.kept(vars(self.module.get_submodule(path)).get(name) for path, name in attributes)
        self.mutable |= self.mutations.found()
        self.watch.look()
        self.keep(tree.tensors(result))
        self.pinned += self.uses.reassigned(self.nodes)
        self.uses.find_shared(self.nodes)
        self.pinned += self.assignments.pinned()
        return attributes, carried

    # -- device -------------------------------------------------------------------------------------

    def visiting(self) -> Any:
        """What lies outside of units is on the device while the step is captured."""
        return Visit([t for t in tensors_of(self.module) if id(t) not in self._in_units], self._device)

    def _visit(self, module: nn.Module) -> Any:
        return self._visiting(tensors_of(module))

    def _visiting(self, tensors: Sequence[Tensor]) -> Any:
        named = [(self.state.name_of(t) or "", t) for t in tensors]
        return self.state.changes.visiting(Visit(tensors, self._device), named)

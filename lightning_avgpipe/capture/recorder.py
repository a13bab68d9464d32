"""The recorder: executes a step and notes its nodes and values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.batch_use import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.draft import ANYWHERE, Draft
from lightning_avgpipe.capture.flop_counter import Flops, recurrent_flops
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.hidden import HiddenTensors
from lightning_avgpipe.capture.named_state import Before, NamedState
from lightning_avgpipe.capture.openings import Openings
from lightning_avgpipe.capture.outermost import Outermost
from lightning_avgpipe.capture.random_use import DrawWatch
from lightning_avgpipe.capture.saved_tensors import tensors_of
from lightning_avgpipe.capture.state_use import StateUse
from lightning_avgpipe.capture.tracer import METADATA, StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.capture.units import Units
from lightning_avgpipe.capture.unnamed_state import UnnamedState
from lightning_avgpipe.capture.visit import visiting
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
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
    """What a unit does besides giving a result: to state and generators, its inner calls, and how much it computes."""

    changes: list[str]
    draws: bool
    drawn: tuple[str, ...]
    objects_changed: list[Any]
    flops: float

    def noted(self, node: Node, generators: tuple[int, ...]) -> Node:
        """A node that does it, and is given such generators."""
        changes = tuple(self.changes)
        return replace(node, changes=changes, draws=self.draws, drawn=self.drawn, generators=generators)


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
        super().__init__({}, owned_tensors(module, foresight.glue_states), device)
        self.units = Units(module, units, ignore)
        self.draft = Draft(self.known, foresight.readers)
        position = self.draft.position
        self.unnamed = UnnamedState(module, foresight.mutable, position, lambda: self._inside, ignore)
        # a unit that is not called itself may have buffers that glue changes
        self.state = NamedState(module, self._owned, batch, device)
        self.uses = StateUse(self.state, self._owned, foresight.glue_states)
        self._in_units = {id(t) for path in units for t in tensors_of(module.get_submodule(path))}
        watch = DrawWatch(module, device)
        self.calls = Calls(watch, lambda module: not self._inside and self.unit(module) is None, position)
        self.batch = BatchUse(device)
        self.hidden = HiddenTensors(module, self.draft, self.state.is_buffer, watch.draws_on_host, foresight.exports)
        self._openings = Openings(module, self.draft, self.unnamed.mutations.objects)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA and not self._inside:
            self.draft.told(func, args[:1])
        return super().__torch_function__(func, types, args, kwargs)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        draft, provenance, unnamed, index = self.draft, self.hidden.provenance, self.unnamed, self.draft.position()
        self._pin_foreign(module, path)
        exports, visible = path in self.hidden.exports, tree.tensors((args, kwargs))
        modules = [*module.modules()] if exports else []
        generators = unnamed.generators.given(Objects((args, kwargs), modules, opaque="generators"), path)
        objects = Objects((args, kwargs), modules, generators=generators)
        tensors = [*visible, *objects.tensors]
        versions = [version_of(t) for t in tensors]
        with self.state.visiting(tensors_of(module)):
            result, effects = self._executed(self.state.of(path), run, args, kwargs)
        used = provenance.used
        states = self.uses.of_unit([*module.parameters(), *module.buffers(), *used], effects.changes)
        result = provenance.followed(result, (args, kwargs), modules)
        unnamed.mutations.pass_over()
        used += [t for t in tree.tensors(result) if provenance.birth(t) is not None or t in self.known]
        inputs = draft.values.of([*visible, *used])
        parameters = self.uses.parameters([*module.parameters(), *used])
        free = not (inputs or parameters or states or effects.draws or path in draft.resident)
        draft.pinned += self.hidden.find(used, f"unit '{path}'", free, path)
        if free:
            return self._ran_freely(module, [*visible, *used], result, effects)
        if parameters or states or effects.draws:
            draft.resident.add(path)
        elif not draft.values.of(visible):
            draft.readers.add(path)
        own = set(map(id, module.parameters()))
        self._pin_handed_out([t for t in tensors if id(t) in own], f"unit '{path}'")
        flops = (effects.flops or recurrent_flops(module, result)) + _elements(result)
        node = Node(index, "call", path, source_line(), inputs, parameters=parameters, states=states, flops=flops)
        node = effects.noted(node, generators)
        self._taken([*visible, *used])
        changed = {id(t) for t, version in zip(tensors, versions, strict=True) if version_of(t) != version}
        unnamed.generators.drew(index)
        writes = bool(generators) or not changed <= set(map(id, visible))
        node, given = self._openings.opened(node, result, objects, exports, writes)
        unnamed.shared.wrote(index, path, effects.objects_changed, set(map(id, objects.owners)))
        self.hidden.wrote(node, [self.state.buffer(name) for name in effects.changes], changed)
        self._add(node, given, tensors if node.opens else visible, versions)
        return result

    def _ran_freely(self, module: nn.Module, taken: Sequence[Tensor], result: Any, effects: _Effects) -> Any:
        """A unit that depends on nothing but the batch is no node: it runs on every stage; returns its result."""
        index = self.draft.position()
        self.batch.computed(taken, index)
        self.unnamed.assignments.held.computed(taken, result, index)
        self.hidden.provenance.forget()
        self.unnamed.ran_freely(module, effects.objects_changed)
        return result

    def _executed(self, before: Before, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Effects]:
        """The result of a unit or a region, and what it did besides; its state may be noted while it runs."""
        watch = self.calls.watch
        self.unnamed.generators.look(self.draft.position())
        random_before, calls = watch.bits(), len(watch.calls)
        self.state.changes.begin()
        provenance = self.hidden.provenance.at(self.draft.position(), args, kwargs)
        with self.unnamed.mutations.elsewhere() as objects_changed, provenance, Flops() as counter:
            result = run(*args, **kwargs)
        changes, draws = self.state.changed(before), random_before != watch.bits()
        flops = float(counter.get_total_flops())
        return result, _Effects(changes, draws, tuple(watch.calls[calls:]), objects_changed, flops)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        draft = self.draft
        tensors = tensor_arguments(args, kwargs)
        versions = [version_of(t) for t in tensors]
        outer = Outermost(self.calls.watch, lambda module: self.state.visiting(tensors_of(module)), self.state.of)
        made = self._made_generators(args, kwargs)
        with watching(outer):
            result, effects = self._executed(outer.state, run, args, kwargs)
        used, given = self.hidden.provenance.used, tree.tensors(result)
        names = dict.fromkeys(self.calls.watch.path(module) for module in outer.modules)
        draft.pinned += self.hidden.find(used, "a checkpointed region", False)
        node = Node(
            draft.position(), "region", ", ".join(names) or "a function", source_line(),
            draft.values.of([*tensors, *used]), parameters=self.uses.parameters(used),
            states=self.uses.of_unit(used, effects.changes), changes=tuple(effects.changes),
            draws=effects.draws, drawn=effects.drawn, flops=effects.flops + sum(t.numel() for t in given),
        )  # fmt: skip
        self._taken([*tensors, *used])
        self.unnamed.generators.drew(node.index)
        if made.changed():
            what = f"{node} draws random numbers from a generator that the step makes"
            draft.pin(node.index + 1, ANYWHERE, what)
        self._add(node, given, tensors, versions)
        return result

    def _made_generators(self, args: Any, kwargs: Any) -> Objects:
        """Those of random numbers among arguments that do not outlive the step."""
        found = Objects((args, kwargs), opaque="generators")
        chosen = self.unnamed.generators.given(found, "")
        return found.among([id(one) for i, one in enumerate(found.opaque) if i in chosen])

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        begin = self.draft.position()
        yield from generator
        reason = f"it lies in a region of torch.utils.checkpoint at {source_line()}"
        self.draft.pin(begin + 1, self.draft.position() - 1, reason)

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        draft, index, watch = self.draft, self.draft.position(), self.calls.watch
        tensors = tensor_arguments(args, kwargs)
        inputs = draft.values.of(tensors)
        name = function_name(func)
        draft.pinned += self.hidden.find(tensors, f"{name}()", True)
        versions = [version_of(t) for t in tensors]
        self.unnamed.mutations.look()
        self.unnamed.generators.look(index)
        free = not inputs and not any(id(t) in self._owned for t in tensors)
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        random_before = watch.bits()
        result, changed = self._executed_glue(func, args, kwargs, tensors)
        self.uses.by_glue.update(changed)
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, index)
        if free:
            self.unnamed.assignments.held.computed(tensors, result, index)
            return result
        self.unnamed.generators.drew(index)
        self.unnamed.mutations.pass_over()
        states, parameters = self.uses.of_glue(tensors, changed), self.uses.parameters(tensors)
        draws = random_before != watch.bits()
        self._pin_glue(name, tensors, result)
        self._taken(tensors)
        plain = all(leaf is None or isinstance(leaf, Tensor) for leaf in tree.leaves(result))
        entry = described(result) if plain and not draws and not self.batch.knows(tensors) else None
        self._add(
            Node(index, "glue", name, source_line(), inputs, parameters=parameters, states=states,
                 changes=tuple(changed), entry=entry, draws=draws, asks=draft.questions.asked(name, inputs, result),
                 flops=_elements(result)),
            tree.tensors(result), tensors, versions,
        )  # fmt: skip
        masks = draft.values.of([t for t in tensor_arguments(*args[1:]) if t.dtype is torch.bool])
        draft.questions.note(name, args, inputs, masks, draft.nodes[-1].outputs)
        return result

    def _executed_glue(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[str]]:
        """The result of a function, and what it changes of the state."""
        with self.state.visiting([t for t in tensors if id(t) in self._in_units]):
            before = self.state.of_tensors(self.uses.seen(tensors))
            self.state.changes.begin()
            result = func(*args, **kwargs)
            if self.state.changes.strange:
                self._refuse_strange(function_name(func))
            return result, self.state.changed(before)

    def _pin_foreign(self, module: nn.Module, path: str) -> None:
        if self.state.foreign(module):
            self.draft.pin(0, ANYWHERE, f"at {source_line()} unit '{path}' has tensors of the step as its weights")

    def _pin_glue(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        """A function that is a node may be one around which no cut can lie."""
        if any(map(is_transformed, [*tensors, *tree.tensors(result)])):
            reason = f"what is computed by torch.vmap or torch.func at {source_line()} cannot be followed out of it"
            self.draft.pin(self.draft.position() + 1, ANYWHERE, reason)
        if name in ("backward", "grad"):
            self.draft.pin(0, ANYWHERE, f"the step calls {name}() itself at {source_line()}")
        if name.endswith(".apply"):  # its backward may ask which of its inputs are the parameters that it uses
            self._pin_handed_out(tensors, f"{name}()")

    def _pin_handed_out(self, tensors: Sequence[Tensor], what: str) -> None:
        """What comes next takes these tensors, and those that are parameters themselves must come as such: no cut may
        lie between it and a unit that has returned them, since after a cut they would be tensors with their contents.
        """
        for tensor in tensors:
            value, name = self.known.own_value_of(tensor), self._owned.get(id(tensor))
            if value is not None and name is not None:
                giver = next(node for node in self.draft.nodes if value in node.outputs)
                reason = f"{what} at {source_line()} takes the parameter '{name}', which {giver} has returned"
                self.draft.pin(giver.index + 1, self.draft.position(), reason)

    def _refuse_strange(self, name: str) -> None:
        """State must have a name, by which each stage finds it and a checkpoint keeps it."""
        self.draft.pin(
            0, ANYWHERE, f"{name}() at {source_line()} changes a tensor in place that lives on after the step and is "
                         "no parameter or buffer; make it one with register_buffer",
        )  # fmt: skip

    def _taken(self, tensors: Sequence[Tensor]) -> None:
        """The node that comes next takes these tensors."""
        index = self.draft.position()
        self.batch.taken(tensors, index)
        self.unnamed.assignments.held.taken([t for t in tensors if self.known.value_of(t) is None], index)

    def _add(self, node: Node, given: Sequence[Tensor], taken: Sequence[Tensor], versions: Sequence[int]) -> None:
        self.unnamed.assignments.settle()
        self.draft.add(node, given, taken, versions, self._owned)

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self._keep(tree.tensors((args, kwargs)))
        self.unnamed.generators.look(self.draft.position())
        with self.unnamed.mutations.elsewhere():
            result = run(*args, **kwargs)
        self.unnamed.generators.pass_over()
        return result

    def unit(self, module: nn.Module) -> str | None:
        return self.units.path(module)

    def _keep(self, tensors: list[Tensor]) -> None:
        """These tensors are needed at the end of the step."""
        self.draft.kept.update(self.draft.values.of(tensors))
        self.batch.kept(tensors)

    # -- the whole step ------------------------------------------------------------------------------------------------

    def visiting(self, module: nn.Module) -> AbstractContextManager[None]:
        """What of it lies outside of units is on the device while the step is captured."""
        return visiting([t for t in tensors_of(module) if id(t) not in self._in_units], self._place)

    def finish(self, result: Any) -> None:
        """The step has returned."""
        self.unnamed.finish()
        self.calls.watch.look()
        self._keep(tree.tensors(result))
        self.draft.pinned += self.uses.reassigned(self.draft.nodes)
        self.uses.find_shared(self.draft.nodes)
        self.draft.pinned += self.unnamed.assignments.pinned()

    @property
    def foresight(self) -> Foresight:
        """What has been found out."""
        return Foresight(
            frozenset(self.uses.by_glue),
            frozenset(self.hidden.exports),
            frozenset(self.draft.readers),
            frozenset(self.unnamed.mutable),
        )

    def close(self) -> None:
        """Forget everything. It and its parts know each other, and what it has seen, all activations of a step, would
        stay until the garbage collector comes by, which may be many captures later.
        """
        vars(self).clear()


def _elements(result: Any) -> float:
    """Of all tensors."""
    return float(sum(t.numel() for t in tree.tensors(result)))

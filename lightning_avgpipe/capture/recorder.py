"""Record the nodes and values of a step while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.batch_use import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.draft import END_OF_STEP, Draft
from lightning_avgpipe.capture.effects import Effects
from lightning_avgpipe.capture.flop_counter import recurrent_flops
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.hidden import HiddenTensors
from lightning_avgpipe.capture.named_state import NamedState, StateCopies
from lightning_avgpipe.capture.operation import HOOKING
from lightning_avgpipe.capture.tracer import METADATA, STAGE_DEPENDENT_METADATA, StepTracer, function_name
from lightning_avgpipe.capture.units import Units, tensors_of
from lightning_avgpipe.errors import AbsentValueError, CaptureError
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta, described
from lightning_avgpipe.utils.source import is_copying, source_line
from lightning_avgpipe.utils.tensors import KnownTensors, leaves_of, tensor_arguments
from lightning_avgpipe.utils.torch_compat import is_transformed, version_of


@dataclass(frozen=True)
class Preview:
    """Facts about a step that must be known before it is recorded; one recording finds them for the next.

    Attributes:
        glue_states: names of the buffers that glue changes; operations on them are nodes, also before the first change.
        exports: units in whose attributes other code finds tensors.
        readers: units that find values in objects; they are always nodes.
        mutable: ids of objects in attributes that change; they are watched to find out whether units or glue do it.
        unseen: attributes whose assignments are not seen; they are watched to find out whether units or glue do it.
    """

    glue_states: frozenset[str] = frozenset()
    exports: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    mutable: frozenset[int] = frozenset()
    unseen: frozenset[tuple[str, str]] = frozenset()


class _UnitEffects(NamedTuple):
    """The effects of a unit besides its result: changed state and objects, draws, inner calls and operations.

    ``asked`` are the tensors whose gradients it asks for, or looks at by a hook; ``hooked`` are the latter.
    """

    changes: tuple[str, ...]
    draws: bool
    drawn: tuple[str, ...]
    objects_changed: list[Any]
    flops: float
    asked: list[Tensor]
    hooked: list[Tensor]


def owned_tensors(module: nn.Module, glue_states: Collection[str]) -> dict[int, str]:
    """Return ``id -> full name`` of the tensors whose use makes a node: parameters, and buffers in ``glue_states``."""
    owned = {id(p): name for name, p in module.named_parameters()}
    if glue_states:
        owned |= {id(b): name for name, b in module.named_buffers() if name in glue_states}
    return owned


class _Asking(TorchFunctionMode):
    """A context that notes the tensors whose gradients a unit asks for, or looks at by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.hooked: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(func) in HOOKING:
            self.tensors.append(args[0])
            self.hooked.append(args[0])
        elif func is torch.autograd.grad:
            self.tensors += tree.tensors(args[1] if len(args) > 1 else kwargs["inputs"])
        return func(*args, **kwargs)


class StepRecorder(StepTracer):
    """A tracer that runs every part of a step and notes each node.

    Args:
        module: module whose step it is.
        units: paths of the submodules that are never split.
        device: device on which the step computes; None: where its parameters are.
        preview: facts about the step that an earlier recording has found.
        ignore: modules that only observe.
        batch: tensors that the step is given.

    Attributes:
        units: the given units, and modules that are called outside of these.
        draft: call graph under construction.
        effects: record of changed attributes, objects and variables.
        state: parameters and buffers, and what changes them.
        calls: watcher of module calls, draws and seeds.
        batch: record of the uses of the batch's tensors.
        hidden: record of tensors that units leave behind.
    """

    is_dry_run = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        device: torch.device | None,
        preview: Preview,
        ignore: Collection[nn.Module],
        batch: Sequence[Tensor],
    ) -> None:
        in_units = {id(t) for path in units for t in tensors_of(module.get_submodule(path))}
        super().__init__({}, owned_tensors(module, preview.glue_states), device, in_units)
        self.units = Units(module, units, ignore)
        self.draft = Draft(module, self.known, self._owned, preview.readers, [*tensors_of(module), *batch])
        position = self.draft.position
        now = lambda: (position(), self._inside)  # noqa: E731
        self.effects = Effects(module, preview.mutable, preview.unseen, now, ignore)
        # all buffers are tracked, since glue may change those of a unit that is never called
        self.state = NamedState(module, self._owned, preview.glue_states, batch, device)
        self._buffers = {id(buffer): name for name, buffer in self.state.buffers.items()}
        self.buffers_read: dict[str, int] = {}
        self.calls = Calls(module, device, position)
        self.batch = BatchUse(device)
        self.hidden = HiddenTensors(module, self.draft, self.state, self.calls, preview.exports)
        self._first_uses = KnownTensors[int]()  # of free tensors with gradients: the first node that depends on each
        self._hooks = KnownTensors[tuple[int, str]]()  # of such tensors: the node that hooks each, and what it is

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func in METADATA and not self._inside:
            self.draft.note_metadata_read(func, args[:1])
            if func in STAGE_DEPENDENT_METADATA:
                self._pin_answer(func, args, kwargs or {}, result)
        return result

    def _pin_answer(self, func: Any, args: Any, kwargs: Any, answer: Any) -> None:
        """Forbid cuts after the maker of a value if a stand-in for the value would answer this question differently."""
        value = self.known.value_of(args[0])
        if value is None:
            return
        stand_in = Absent(TensorMeta.of(args[0]), args[0].device, "")
        name = function_name(func).removesuffix(".__get__")
        try:
            found = getattr(stand_in, name)
            alike = (found(*args[1:], **kwargs) if callable(found) else found) == answer
        except (AbsentValueError, RuntimeError):  # the stand-in cannot answer
            alike = False
        if not alike:
            maker = self.draft.maker(value)
            self.draft.pin(
                maker.index + 1, END_OF_STEP,
                f"the step asks at {source_line()} for {name} of the result of {maker}, which only its own stage "
                "knows; ask within the unit, and return the answer",
            )  # fmt: skip

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        draft, provenance, index = self.draft, self.hidden.provenance, self.draft.position()
        if any(id(p) not in self._owned for p in module.parameters()):
            what = f"at {source_line()} unit '{path}' has tensors of the step as its weights"
            draft.pin(0, END_OF_STEP, f"{what}; compute and use them in the forward of one submodule")
        self._pin_mode()
        exports, visible = path in self.hidden.exports, tree.tensors((args, kwargs))
        modules = [*module.modules()] if exports else []
        generators = self.effects.generators.given(Snapshot((args, kwargs), modules, opaque="generators"), path)
        objects = Snapshot((args, kwargs), modules, generators=generators)
        tensors = [*visible, *objects.tensors]
        versions = [version_of(t) for t in tensors]
        with self.state.visiting(tensors_of(module)), draft.saving(tensors_of(module)) as saved:
            result, own = self._executed(self.state.of(path), run, args, kwargs, path)
        used = provenance.used
        states = self.state.states([*module.parameters(), *module.buffers(), *used], own.changes, in_unit=True)
        result = provenance.followed(result, (args, kwargs), modules)
        self.effects.take()  # replacing the tensors in objects does not count as a change
        used += [t for t in tree.tensors(result) if provenance.birth(t) is not None or t in self.known]
        inputs = draft.values_of([*visible, *used])
        parameters = self.state.parameters([*module.parameters(), *used])
        free = not (inputs or parameters or states or own.draws or path in draft.resident)
        draft.pinned += self.hidden.find(used, f"unit '{path}'", free, path)
        if free:
            return self._ran_freely(module, [*visible, *used], result, own)
        if parameters or states or own.draws:
            draft.resident.add(path)
        elif not draft.values_of(visible):
            draft.readers.add(path)
        self._pin_call(module, path, tensors, result)
        self._pin_asked(own, f"unit '{path}'", module.parameters())
        flops = (own.flops or recurrent_flops(module, result)) + _elements(result)
        node = Node(
            index, "call", path, source_line(), inputs, parameters=parameters, states=states, changes=own.changes,
            draws=own.draws, drawn=own.drawn, flops=flops, generators=generators,
        )  # fmt: skip
        self._taken([*visible, *used])
        changed = {id(t) for t, version in zip(tensors, versions, strict=True) if version_of(t) != version}
        writes = bool(generators) or not changed <= set(map(id, visible))
        node, given = draft.with_objects(node, result, objects, self.effects.objects, exports, writes)
        self.effects.ran(path, own.objects_changed, set(map(id, objects.owners)))
        self.hidden.wrote(node, [self.state.buffer(name) for name in own.changes], changed)
        draft.add(node, given, tensors if node.writes_objects else visible, versions, saved)
        return result

    def _ran_freely(self, module: nn.Module, taken: Sequence[Tensor], result: Any, own: _UnitEffects) -> Any:
        """Note a unit that depends on the batch alone, so that every stage runs it; return its result."""
        index = self.draft.position()
        self.batch.computed(taken, index)
        self.effects.attributes.held.computed(taken, result, index)
        self.hidden.provenance.forget()
        self.effects.ran_freely(module, own.objects_changed)
        return result

    def _executed(
        self, before: StateCopies, run: Callable[..., Any], args: Any, kwargs: Any, unit: str | None = None
    ) -> tuple[Any, _UnitEffects]:
        """Run a unit or a region; return its result and effects. A region may add to ``before`` while it runs."""
        watch = self.calls
        watch.check_seeds()
        self.effects.look()
        random_before, calls = watch.generator_states(), len(watch.calls)
        self.state.begin()
        provenance = self.hidden.provenance.at(self.draft.position(), args, kwargs)
        seeding = nullcontext() if unit is None else watch.within(unit)
        watching = self.effects.watching_unit()
        with watching as objects_changed, provenance, seeding, watch.flops, _Asking() as asking:
            result = run(*args, **kwargs)
        changes, draws = tuple(self.state.changed(before)), random_before != watch.generator_states()
        draws |= unit is not None and any(is_within(path, unit) for path in watch.seeding)
        inner, flops = tuple(watch.calls[calls:]), watch.flops.total
        return result, _UnitEffects(changes, draws, inner, objects_changed, flops, asking.tensors, asking.hooked)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        draft = self.draft
        self._pin_mode()
        tensors = tensor_arguments(args, kwargs)
        versions = [version_of(t) for t in tensors]
        made, names, before = self._made_generators(args, kwargs), dict[str, None](), StateCopies()

        @contextmanager
        def visited(module: nn.Module) -> Iterator[None]:
            with self.state.visiting(tensors_of(module)):
                names[path := self.calls.path(module)] = None
                before.extend(self.state.of(path))
                yield

        with self.calls.within_region(visited), draft.saving() as saved:
            result, own = self._executed(before, run, args, kwargs)
        used, given = self.hidden.provenance.used, tree.tensors(result)
        draft.pinned += self.hidden.find(used, "a checkpointed region", False)
        node = Node(
            draft.position(), "region", ", ".join(names) or "a function", source_line(),
            draft.values_of([*tensors, *used]), parameters=self.state.parameters(used),
            states=self.state.states(used, own.changes, in_unit=True), changes=own.changes,
            draws=own.draws, drawn=own.drawn, flops=own.flops + _elements(result),
        )  # fmt: skip
        self._pin_asked(own, "a checkpointed region", ())
        self._taken([*tensors, *used])
        self.effects.ran(node.name, own.objects_changed, ())
        if made.changed():
            what = f"{node} draws random numbers from a generator that the step makes"
            draft.pin(node.index + 1, END_OF_STEP, what)
        draft.add(node, given, tensors, versions, saved)
        return result

    def _made_generators(self, args: Any, kwargs: Any) -> Snapshot:
        """Return the random generators among the arguments that the step has made."""
        found = Snapshot((args, kwargs), opaque="generators")
        chosen = self.effects.generators.given(found, "")
        return found.restricted_to([id(one) for i, one in enumerate(found.opaque) if i in chosen])

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        begin = self.draft.position()
        with self.draft.recomputed():
            yield from generator
        reason = f"it lies in a region of torch.utils.checkpoint at {source_line()}"
        self.draft.pin(begin + 1, self.draft.position() - 1, reason)

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        draft, index, watch = self.draft, self.draft.position(), self.calls
        tensors = tensor_arguments(args, kwargs)
        inputs = draft.values_of(tensors)
        name = function_name(func)
        draft.pinned += self.hidden.find(tensors, f"{name}()", True)
        versions = [version_of(t) for t in tensors]
        watch.check_seeds()
        self.effects.look()
        free = not inputs and not any(id(t) in self._owned for t in tensors)
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        random_before, calls = watch.generator_states(), len(watch.calls)
        result, changed, saved = self._executed_glue(func, args, kwargs, tensors)
        watch.check_calls_in(f"{name}()", calls, tensors)
        self.state.by_glue.update(changed)
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, index)
        if free:
            for path, _, leaf in (self._buffers[id(t)].rpartition(".") for t in tensors if id(t) in self._buffers):
                self.effects.attributes.first_reads.setdefault((path, leaf), index)
            self.effects.attributes.held.computed(tensors, result, index)
            return result
        self.effects.changed_by(f"{name}()", self.effects.take())
        states, parameters = self.state.states(tensors, changed, in_unit=False), self.state.parameters(tensors)
        draws = random_before != watch.generator_states()
        self._pin_glue(name, tensors, result)
        self._pin_mode()
        self._taken(tensors)
        plain = all(leaf is None or isinstance(leaf, Tensor) for leaf in tree.leaves(result))
        entry = described(result) if plain and not draws and not self.batch.knows(tensors) else None
        draft.add(
            Node(index, "glue", name, source_line(), inputs, parameters=parameters, states=states,
                 changes=tuple(changed), entry=entry, draws=draws, flops=_elements(result),
                 reads_numbers=draft.reads_numbers(name, inputs, result)),
            tree.tensors(result), tensors, versions, saved,
        )  # fmt: skip
        draft.note_length(name, args, inputs)
        return result

    def _executed_glue(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> tuple[Any, list[str], dict[int, int]]:
        """Run a glue function; return its result, the names of the state that it changes, and what it saves."""
        away = [t for t in tensors if id(t) in self._offloaded]
        with self.state.visiting(away), self.draft.saving(away) as saved:
            if function_name(func) in HOOKING:
                self._pin_hook(function_name(func), args[0])
            before = self.state.of_tensors(self.state.seen(tensors))
            self.state.begin()
            result = func(*args, **kwargs)
            if self.state.wrote_unknown or self.effects.written(self.state.unnamed_views):
                self._pin_strange(function_name(func))
            return result, self.state.changed(before), saved

    def _pin_mode(self) -> None:
        """Forbid cuts after a node that runs in a mode of the user, which would not see it on stages that skip it."""
        if (mode := self.mode()) is not None:
            self.draft.pin(
                self.draft.position() + 1, END_OF_STEP,
                f"at {source_line()} the step is in a {mode}, which would see only what runs on its own stage; enter "
                "it in the forward of a submodule",
            )  # fmt: skip

    def _pin_glue(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        """Forbid cuts that would separate certain functions from other nodes."""
        if any(map(is_transformed, [*tensors, *tree.tensors(result)])):
            reason = f"what is computed by torch.vmap or torch.func at {source_line()} cannot be followed out of it"
            self.draft.pin(self.draft.position() + 1, END_OF_STEP, reason)
        if name == "data.__get__" and id(tensors[0]) in self._owned and is_copying():
            self.draft.pin(
                0, END_OF_STEP,
                f"the step copies '{self._owned[id(tensors[0])]}' with copy.deepcopy at {source_line()}, which its own "
                "stage alone can do; copy it in __init__, or in a hook such as on_train_batch_start",
            )  # fmt: skip
        if name in ("backward", "grad"):
            instead = "; call it in the forward of a submodule that computes what it differentiates"
            what = f"the step calls {name}() itself at {source_line()}"
            self.draft.pin(0, END_OF_STEP, what + (instead if name == "grad" else ""))
        if name.endswith(".apply"):  # its backward may compare its inputs with parameters
            self._pin_handed_out(tensors, f"{name}()")

    def _pin_hook(self, name: str, tensor: Tensor) -> None:
        """Forbid cuts after the maker of a tensor whose gradient the step uses: only its stage gets this gradient."""
        value, parameter = self.known.value_of(tensor), self._owned.get(id(tensor))
        if value is None and parameter is None:
            self.draft.pin(
                0, END_OF_STEP,
                f"{name}() at {source_line()} asks for the gradient of a tensor of the batch, to which every stage "
                "would add a part; let one submodule do all that uses this tensor, and ask there",
            )  # fmt: skip
            return
        if value is None:
            raise CaptureError(
                f"{name}() at {source_line()} puts a hook on the parameter '{parameter}' in every step; "
                "do so once, in __init__ or configure_model"
            )
        maker = self.draft.maker(value)
        self.draft.pin(
            maker.index + 1, END_OF_STEP,
            f"{name}() at {source_line()} asks for the gradient of the result of {maker}, which only its own stage "
            "gets; ask within the unit, or change the gradient by a torch.autograd.Function",
        )  # fmt: skip

    def _pin_asked(self, effects: _UnitEffects, what: str, own: Iterable[Tensor]) -> None:
        """Forbid cuts between the nodes that use a tensor and a later one that asks for the gradient of it.

        Args:
            effects: those of the next node, with the tensors whose gradients it asks for, or looks at by a hook.
            what: description of that node.
            own: its own parameters.
        """
        position, mine, what = self.draft.position(), set(map(id, own)), f"{what} at {source_line()}"
        for tensor in effects.asked:
            value, name = self.known.own_value_of(tensor), self._owned.get(id(tensor))
            if value is None and name is None:
                first, of = self._first_uses.own_value_of(tensor), "a tensor of the batch"
            else:
                users = (node.index for node in self.draft.nodes if value in node.inputs or name in node.parameters)
                of = f"'{name}'" if value is None else f"the result of {self.draft.maker(value)}"
                first = next(users, None)
            if id(tensor) not in mine and first is not None:
                self._pin_divided(first + 1, what, of, str(self.draft.nodes[first]))
        for tensor in effects.hooked:
            if tensor not in self.known and id(tensor) not in self._owned:
                self._hooks.learn(tensor, (position, what))

    def _pin_divided(self, begin: int, what: str, of: str, user: str) -> None:
        """Forbid cuts from ``begin`` to here, which would divide a gradient that is asked for."""
        self.draft.pin(
            begin, self.draft.position(),
            f"{what} asks for the gradient of {of}, which {user} uses too: its stage would miss that part. Let one "
            "submodule compute all of it, or change the gradient by a torch.autograd.Function",
        )  # fmt: skip

    def _note_free(self, tensors: Sequence[Tensor]) -> None:
        """Note that the next node takes these free tensors; forbid cuts between it and one that hooks any of them.

        Each stage has free tensors of its own, and gets only the part of their gradients that its nodes add.
        """
        for tensor in (*tensors, *leaves_of(tensors)):
            if tensor not in self._first_uses:
                self._first_uses.learn(tensor, self.draft.position())
            if (hook := self._hooks.own_value_of(tensor)) is not None:
                self._pin_divided(hook[0] + 1, hook[1], "a tensor of the batch", f"the step at {source_line()}")

    def _pin_handed_out(self, tensors: Sequence[Tensor], what: str) -> None:
        """Forbid cuts between a unit that returns parameters and an operation that takes them.

        After a cut the operation would get tensors with the same contents instead of the parameters.
        """
        for tensor in tensors:
            value, name = self.known.own_value_of(tensor), self._owned.get(id(tensor))
            if value is not None and name is not None:
                giver = next(node for node in self.draft.nodes if value in node.outputs)
                reason = f"{what} at {source_line()} takes the parameter '{name}', which {giver} has returned"
                self.draft.pin(giver.index + 1, self.draft.position(), reason)

    def _pin_call(self, module: nn.Module, path: str, taken: Sequence[Tensor], result: Any) -> None:
        """Forbid cuts around a unit that takes its own parameters, or that sets attributes on tensors it returns.

        Parameters must arrive as the same objects, and an attribute (``x.scale = 2``) is not sent along with the
        tensor.
        """
        own = set(map(id, module.parameters()))
        self._pin_handed_out([t for t in taken if id(t) in own], f"unit '{path}'")
        names = {name for tensor in tree.tensors(result) for name in vars(tensor) if not name.startswith("_")}
        if names:
            self.draft.pin(
                self.draft.position() + 1, END_OF_STEP,
                f"unit '{path}', called at {source_line()}, returns a tensor with an attribute '{min(names)}', which "
                "does not travel to another stage with its numbers; return it beside the tensor",
            )  # fmt: skip

    def _pin_strange(self, name: str) -> None:
        """Forbid all cuts because of a lasting tensor without a name, which stages and checkpoints cannot find."""
        self.draft.pin(
            0, END_OF_STEP,
            f"{name}() at {source_line()} changes a tensor in place that lives on after the step and is no parameter "
            "or buffer; make it one with register_buffer",
        )  # fmt: skip

    def _taken(self, tensors: Sequence[Tensor]) -> None:
        """Note that the next node takes these tensors, which may be buffers, of the batch, or held by attributes."""
        index = self.draft.position()
        for name in (self._buffers[id(t)] for t in tensors if id(t) in self._buffers):
            self.buffers_read.setdefault(name, index)
        self.batch.taken(tensors, index)
        free = [t for t in tensors if self.known.value_of(t) is None]
        self.effects.attributes.held.taken(free, index)
        self._note_free([t for t in free if t.requires_grad and id(t) not in self._owned])

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self._keep(tree.tensors((args, kwargs)))
        with self.effects.watching_unit():  # changes by self.log and metrics do not count
            result = run(*args, **kwargs)
        self.effects.attributes.ignore_unseen()
        return result

    def unit(self, module: nn.Module) -> str | None:
        return self.units.path(module)

    def _keep(self, tensors: list[Tensor]) -> None:
        """Note that these tensors are needed at the end of the step."""
        self.draft.observed.update(self.draft.values_of(tensors))
        self.batch.needed_by_result(tensors)

    def is_lasting(self, tensor: Tensor) -> bool:
        return self.state.is_lasting(tensor)  # any buffer, since the step may still change it

    # -- the whole step ------------------------------------------------------------------------------------------------

    def finish(self, result: Any) -> None:
        """Note the result of the step, and what is known only when the step has ended."""
        self.effects.finish()
        self.calls.look()
        self.calls.check_seeds()
        self._keep(tree.tensors(result))
        self.draft.pinned += self.state.reassigned(self.draft.nodes)
        self.state.find_shared(self.draft.nodes)
        self.draft.pinned += self.effects.attributes.pinned()

    @property
    def preview(self) -> Preview:
        """The facts that this recording has found."""
        return Preview(
            frozenset(self.state.by_glue),
            frozenset(self.hidden.exports | self.effects.attributes.exports()),
            frozenset(self.draft.readers),
            frozenset(self.effects.mutable),
            self.effects.unseen,
        )

    def close(self) -> None:
        """Drop all references. The recorder's parts refer to each other and hold all activations of a step.

        Without this they would live until the garbage collector runs, which may be many captures later.
        """
        vars(self.effects).clear()
        vars(self).clear()


def _elements(result: Any) -> float:
    """Return the number of elements of all tensors."""
    return float(sum(t.numel() for t in tree.tensors(result)))

"""Detect effects on attributes and objects, of which stages have copies, that a step begins to have after capture.

Capture shows what a step assigns and changes on the first micro-batch, and the cuts allow for that. A change that it
begins to make later (``if self.global_step >= 1000: self.drop.p = 0.5``) is harmless if all stages that read it make
it. Otherwise it is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_avgpipe.capture.effects import Iterators
from lightning_avgpipe.capture.events import attributes_of
from lightning_avgpipe.capture.operation import writes
from lightning_avgpipe.engine.attestation import Attestation
from lightning_avgpipe.engine.tensor_use import Registers, held_in, registers_of
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import ATOMS, CALLED_HOOKS, ObjectState, is_constant, is_generator
from lightning_avgpipe.state.outside import KINDS, outside_variables, variable, variables
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.utils.lightning import OF_EVERY_LIGHTNING_MODULE
from lightning_avgpipe.utils.names import is_within, joined, nearest
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import REGISTRIES, version_of

_MISSING = object()
_OF_LIGHTNING = OF_EVERY_LIGHTNING_MODULE - {"_hparams"}
_ADVICE = "Do so in a hook such as on_train_batch_start, or from the first step on (by nothing, if need be)"


class LateEffects:
    """A check for one kind of late effects, made at three moments of a stage's forward.

    ::

        training_step    if late: self.seen.append(x)  | units ... | if late: self.bank[0] = y
        stage 0          begin, appends                |
        stage 1          begin, appends again           begin_part      end: stage 0 in another process sees no change

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process also runs the code before this stage's part.

    Attributes:
        grace_period: period after the capture in which effects are not reported yet, since they are not late:
            ``"nothing"``, the first ``"forward"``, or the whole first ``"iteration"``.
    """

    grace_period: ClassVar[Literal["nothing", "forward", "iteration"]] = "forward"

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        self._program, self._module, self._repeats = program, module, repeats
        self._earlier = program.called_before - program.own  # units of earlier stages alone

    def begin_iteration(self) -> None:
        """Begin an iteration."""

    def begin(self) -> None:
        """Begin a forward."""

    def begin_part(self) -> str | None:
        """Begin this stage's part of the forward; return a description of an effect before it, or None."""
        return None

    def end(self) -> str | None:
        """End the forward; return a description of an effect in it, or None."""
        return None

    def check(self, late: str | None) -> None:
        """Raise an error if there is a description of a late effect.

        Raises:
            StepChangedError: ``late`` is not None.
        """
        if late is not None:
            raise StepChangedError(f"{self._program.graph.step} {late}")

    def _again(self, what: str) -> str:
        return self._late(what, "each stage in this process would do again")

    def _unseen(self, what: str) -> str:
        return self._late(what, "an earlier stage would not see")

    def _late(self, what: str, why: str) -> str:
        stage = self._program.stage
        return f"{what}, which it did not do when it was captured, and which {why} (stage {stage}). {_ADVICE}"


class LateAssignments(LateEffects):
    """A check for assignments of attributes by code between units that the captured step did not make.

    Modules that are no submodules are included, such as those in a list, but each of their attributes is reported only
    once, and only if it existed before: a module that the step makes (a loss, a parametrization) is the stage's own.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        graph = program.graph
        self._known = {*graph.assigned_between, *graph.set_back, *graph.changed_by_units}
        self._read = {key for key, position in graph.reads.items() if position < program.start}
        self._paths: dict[int, str] = {}
        self._has_walked = False  # whether paths were looked up in this forward
        self._noted: dict[tuple[int, str, bool], tuple[nn.Module, str, Any, str]] = {}
        self._asked: Attestation | None = None
        self._described: set[tuple[int, str]] = set()  # reported attributes of modules that are no submodules

    def begin(self) -> None:
        self._noted, self._asked, self._has_walked = {}, None, False

    def note(self, module: nn.Module, name: str, before: bool, asked: Attestation) -> None:
        """Note that an attribute is about to be assigned.

        Args:
            module: the module.
            name: name of the attribute.
            before: whether this is before the stage's part of the step.
            asked: record of how the tensors of this forward were made.
        """
        own, place = vars(module), (id(module), name, before)
        if not self._program.start or place in self._noted or (before and not self._repeats):
            return
        if any(name in own.get(register, ()) for register in REGISTRIES):
            return
        if id(module) not in self._paths and not self._has_walked:  # a step may make modules, such as losses
            self._paths, self._has_walked = {id(m): path for path, m in self._module.named_modules()}, True
        path, full = self._paths.get(id(module)), f"{type(module).__name__}.{name}"
        if path is not None:
            full = joined(path, name)
        elif name not in own or (id(module), name) in self._described:
            return
        if (path, name) in self._known:
            return
        if before or (path, name) in self._read or (path is not None and nearest(path, self._earlier)):
            self._noted[place] = module, full, own.get(name, _MISSING), source_line()
            self._asked = asked

    def end(self) -> str | None:
        for (_, name, before), (module, full, old, line) in self._noted.items():
            now = vars(module).get(name, _MISSING)
            if _is_equal(old, now):
                continue
            if isinstance(old, Tensor) and isinstance(now, Tensor) and self._is_made_again(old, now, before):
                continue
            self._described.add((id(module), name))
            return (self._again if before else self._unseen)(f"assigns '{full}' at {line}")
        return None

    def _is_made_again(self, old: Tensor, now: Tensor, before: bool) -> bool:
        """Return whether a tensor is of another size than before, or is made by each stage alike, such as a mask."""
        if old.shape != now.shape:
            return True
        is_from_last = self._asked is not None and self._asked.is_of_held(now)
        return before and (not is_from_last or same_contents(old, now))


class SharedObjects(LateEffects):
    """A check for changes, other than new items of a dict, of objects that units of this and other stages both use."""

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        graph = program.graph
        here = program.called
        own, others = (Snapshot(_held_by(module, units)) for units in (here, graph.called - here))
        captured = (*graph.changed_between, *graph.changed_by_units, *graph.set_back)
        known = Snapshot(variables(module, captured).values())
        shared = own.indices.keys() & others.indices.keys() - known.indices.keys()
        self._objects = own.restricted_to(shared)

    def begin(self) -> None:
        self._objects.update([obj for obj, *_ in self._objects.modified()])

    def begin_part(self) -> str | None:
        if not self._repeats:
            self.begin()  # every process runs the code before, and has its changes
        return None

    def end(self) -> str | None:
        for obj, before, now in self._objects.modified():
            if not _only_grew(before, now):
                return (
                    f"changes {self._name(obj)}, which submodules of other stages hold too, and did not when it was "
                    f"captured (stage {self._program.stage}). {_ADVICE}, or keep what holds it on one stage with "
                    "split_points"
                )
        return None

    def _name(self, obj: Any) -> str:
        held = {joined(*key): value for key, value in attributes_of(dict(self._module.named_modules())).items()}
        held |= outside_variables(self._module)
        found = (name for name, value in held.items() if id(obj) in Snapshot([value]).reached())
        return f"an object in '{next(found, 'an attribute')}'"


class LateChanges(LateEffects):
    """A check for changes by code between units of what the captured step did not change: objects, tensors, variables.

    For each attribute or variable, a change is reported once.
    """

    grace_period = "iteration"  # what one micro-batch changes, another may change back

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        graph = program.graph
        changed = {*graph.changed_between, *graph.changed_by_units, *graph.written_tensors, *graph.set_back}
        self._known = list(variables(module, changed).values())
        between = {path: m for path, m in module.named_modules() if not nearest(path, set(graph.units))}
        metrics = {path for path, m in between.items() if _is_metric(m)}  # only the last stage updates them
        if repeats:
            keys = {*attributes_of(between), *(("", name) for name in outside_variables(module))}
        else:
            keys = {key for key, position in graph.reads.items() if position < program.start}
        keys = {key for key in keys if not nearest(key[0], metrics) and (key[0] or key[1] not in _OF_LIGHTNING)}
        self._roots = variables(module, sorted(keys - changed) if program.start else ())
        self._attributes = {
            (id(module.get_submodule(path)), name) for path, name in self._roots if path or not name.startswith(KINDS)
        }
        self._held: list[Any] | None = None  # their objects that may change; None: to be looked up
        self._before: Snapshot | None = None

    def begin_iteration(self) -> None:
        self._held = None  # hooks may have assigned attributes

    def note(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is about to be assigned."""
        if (id(module), name) in self._attributes:
            self._held = None

    def begin(self) -> None:
        if self._held is None:
            self._held = self._now()
        self._before = Snapshot(self._held, opaque=True) if self._held else None

    def _now(self) -> list[Any]:
        """Return the objects that the attributes hold now and that may change, and the variables outside of modules."""
        held: list[Any] = []
        for (path, name), root in self._roots.items():
            if not path and name.startswith(KINDS):  # assignments of attributes are noted as they happen
                held.append(root)
            held += (one for one in root.state().values() if not is_constant(one))
        return held

    def begin_part(self) -> str | None:
        if self._repeats:
            found = self._changed()
            return found and self._again(found)
        self.begin()  # every process runs the code before, and has its changes
        return None

    def end(self) -> str | None:
        found = None if self._repeats else self._changed()
        return found and self._unseen(found)

    def _changed(self) -> str | None:
        before, self._before = self._before, None
        if before is None:
            return None
        kept = [obj for obj, old, now in before.modified() if not (is_generator(obj) or _only_grew(old, now))]
        found = {id(obj) for obj in (*kept, *before.written())}
        found -= Snapshot(self._known, opaque=True).reached() if found else set()
        late = keys_leading_to(self._roots, found)
        for key in late:
            self._held = None
            del self._roots[key]
        return f"changes what '{joined(*late[0])}' holds" if late else None


class LateHooks(LateEffects):
    """A check for hooks of modules that code between units registers, and that the captured step did not register.

    A stage that leaves the step before ``handle.remove()`` keeps the hook, and the next stage of the process registers
    another one. Without such a next stage each process has the hook once, which is an error only on units of earlier
    stages. Only one hook is reported.
    """

    grace_period = "iteration"

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        self._modules = dict(module.named_modules()) if program.start else {}
        self._next = 0  # number of the next hook

    def begin(self) -> None:
        self._next = RemovableHandle.next_id

    def begin_part(self) -> str | None:
        found = self._registered(self._modules) if self._repeats else None
        self.begin()
        return found and self._again(found)

    def end(self) -> str | None:
        found = self._registered(path for path in self._modules if nearest(path, self._earlier))
        return found and self._unseen(found)

    def _registered(self, paths: Iterable[str]) -> str | None:
        if RemovableHandle.next_id == self._next:
            return None
        registries = ((path, vars(self._modules[path])[name]) for path in paths for name in CALLED_HOOKS)
        path = next((path for path, registry in registries if any(key >= self._next for key in registry)), None)
        if path is None:
            return None
        self._modules = {}
        return f"registers a hook of '{path or 'the LightningModule'}'"


class LateItems(LateEffects):
    """A check for items that a step takes from iterators that outlive it; these cannot be put back."""

    grace_period = "nothing"

    def begin(self) -> None:
        held = {}
        for key in self._program.graph.iterators:
            with contextlib.suppress(KeyError, AttributeError):  # the objects that lead there may exist on rank 0 only
                held[key] = variable(self._module, *key)
        self._iterators = Iterators(held) if held else None

    def end(self) -> str | None:
        if self._iterators is None or not (taken := self._iterators.advanced()):
            return None
        return (
            f"takes items from the iterator '{taken}', and did not when it was captured; each stage would take "
            f"different ones (stage {self._program.stage}). Make it a part of the batch (CombinedLoader), or "
            "count in an attribute"
        )


class LateBuffers(LateEffects):
    """A check for changes of buffers of which other stages have copies; a buffer of another size may replace one.

    Except on the last stage, code between units must not change any buffer. Nor must units that several stages call, or
    units that depend on the batch alone if several stages of this process run them.
    """

    grace_period = "nothing"

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        graph = program.graph
        self._called = program.called & program.called_elsewhere
        read = {**graph.buffers_read, **{joined(*key): position for key, position in graph.reads.items()}}
        # in one process all stages have the same buffers
        self._read_before = {name for name, position in read.items() if position < program.start and not repeats}
        names = [name for name, _ in module.named_buffers()]
        self._constants = registers_of(module, filter(self._is_constant, names))
        free = set(graph.units) - graph.resident - graph.called if repeats else set()
        self._of_free = registers_of(module, (name for name in names if nearest(name, free)))
        self._elsewhere = registers_of(module, filter(program.buffers_elsewhere.__contains__, names))
        self._absent: dict[int, str] = {}  # id of a buffer of another stage -> its name, while a forward runs
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._before_part: dict[str, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        self._before, self._before_part = _states(self._constants), _states(self._of_free)
        self._absent = {id(buffer): name for name, buffer in held_in(self._elsewhere).items()}

    def begin_part(self) -> str | None:
        name = _changed(self._before_part, self._of_free)
        return name and self._again(f"changes the buffer '{name}'")

    def end(self) -> str | None:
        name = _changed(self._before, self._constants)
        return name and self._changes(name)

    def check_call(self, function: str, tensors: Sequence[Tensor]) -> None:
        """Check that code between units may call a function with these tensors, which may be buffers.

        Raises:
            StepChangedError: it writes into the first one, or takes one that a unit of another stage changes.
        """
        if not self._program.is_last and writes(function):
            for written, buffer in self._module.named_buffers():
                if buffer is tensors[0]:
                    self.check(self._changes(written))
        for tensor in tensors if self._absent else ():
            if (name := self._absent.get(id(tensor))) is not None:
                self.check(
                    f"reads the buffer '{name}' in {function}() at {source_line()}, which it did not do when it was "
                    f"captured, and which a submodule of another stage changes (stage {self._program.stage}). Read it "
                    "in every step, return it from the submodule, or keep both on one stage with split_points"
                )

    def _is_constant(self, name: str) -> bool:
        """Return whether no forward of this stage may change a buffer."""
        program = self._program
        if name in program.graph.changed:
            return False
        own = program.is_last or any(is_within(name, unit) for unit in program.graph.units)
        return self._is_shared(name) or name in self._read_before or not own

    def _is_shared(self, name: str) -> bool:
        return any(is_within(name, unit) for unit in self._called)

    def _changes(self, name: str) -> str:
        if self._is_shared(name):
            return (
                f"changes the buffer '{name}', which it did not do when it was captured, in a unit that other stages "
                f"call too (stage {self._program.stage}). Let the first batch change it too, so that no cut lies "
                "between these calls, or keep them on one stage with split_points"
            )
        why = "an earlier stage would not see it" if name in self._read_before else "each stage would do it"
        return (
            f"changes the buffer '{name}', which it did not do when it was captured, and {why} (stage "
            f"{self._program.stage}). Change it in a hook such as on_train_batch_end, within a submodule, or with "
            "every micro-batch (by nothing, if need be)"
        )


class ReadState:
    """The attributes of modules that code between units reads, and the objects in them that units can change.

    A program that was written for one micro-batch may run for another one only if it would read the same.

    Args:
        program: program of the stage.
        module: the whole module.
        in_part: whether only reads after the first node of the stage count.
    """

    def __init__(self, program: StageProgram, module: nn.Module, in_part: bool = False) -> None:
        first, last = (program.start + 1, program.end) if in_part else (0, len(program.graph.nodes))
        keys = [key for key, position in program.graph.read_between.items() if first <= position <= last]
        self._read = {joined(*key): (vars(module.get_submodule(key[0])), key[1]) for key in keys}
        self._values = self._now()
        of_units = Snapshot(_held_by(module, program.graph.units)).indices.keys()
        self._objects = Snapshot(self._values.values()).restricted_to(of_units)

    def _now(self) -> dict[str, Any]:
        held = {name: own.get(key) for name, (own, key) in self._read.items()}
        shapes = {f"{name}.shape": str(value.shape) for name, value in held.items() if isinstance(value, Tensor)}
        # a program holds tensors as constants; they may be activations, so they are not kept alive here
        held |= {name: weakref.ref(value) for name, value in held.items() if isinstance(value, Tensor)}
        return held | shapes

    def note(self) -> None:
        """Note the present state."""
        self._values = self._now()
        self._objects.update([obj for obj, *_ in self._objects.modified()])

    def changed(self) -> str | None:
        """Return a description of something that has changed since the state was noted, or None."""
        for name, value in self._now().items():
            if not _is_equal(self._values.get(name), value):
                return f"'{name}'"
        return next((f"an object of {type(obj).__qualname__}" for obj, *_ in self._objects.modified()), None)


def _states(registers: Registers) -> dict[str, tuple[Tensor, int]]:
    """Return the tensors in registers and their versions, by name."""
    return {name: (tensor, version_of(tensor)) for name, tensor in held_in(registers).items()}


def _changed(before: Mapping[str, tuple[Tensor, int]], registers: Registers) -> str | None:
    """Return the name of a tensor that was changed, or replaced by one of the same shape; None: there is none."""
    for name, now in held_in(registers).items():
        tensor, version = before.get(name, (None, 0))
        replaced = tensor is not now and tensor is not None and tensor.shape == now.shape
        if replaced or (tensor is now and version_of(now) != version):
            return name
    return None


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(module).__mro__)


def _held_by(module: nn.Module, units: Iterable[str]) -> Iterator[Any]:
    """Yield the objects in attributes of units, and the variables that the units' code refers to."""
    together = nn.ModuleList(map(module.get_submodule, units))
    yield from attributes_of(dict(together.named_modules())).values()
    if named := outside_variables(module):
        yield from (named[name] for name in outside_variables(together) if name in named)


def _only_grew(before: ObjectState, now: ObjectState) -> bool:
    """Return whether the only changes of an object are new attributes, new dict items, and values equal to the old."""
    old, new = _named(before), _named(now)
    names = now.changed_names(before)
    return names is not None and not any(name in old and not _is_equal(old[name], new.get(name)) for name in names)


def _named(state: ObjectState) -> dict[Any, Any]:
    return {**state.attributes, **(state.items if isinstance(state.items, dict) else {})}


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) in ATOMS and type(one) is type(other) and one == other)

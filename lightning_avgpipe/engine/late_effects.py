"""Effects that a step begins to have after it was captured, on attributes and objects of which stages have copies.

The first micro-batch shows what a step assigns and changes, and the cuts allow for that. What it begins to do later
(``if self.global_step >= 1000: self.drop.p = 0.5``) is harmless where all stages do it that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_avgpipe.capture.events import attributes_of
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import ATOMS, CALLED_HOOKS, ObjectState, is_generator
from lightning_avgpipe.state.outside import KINDS, outside, variable
from lightning_avgpipe.state.snapshot import Snapshot, leading
from lightning_avgpipe.utils.lightning import OF_EVERY_LIGHTNING_MODULE
from lightning_avgpipe.utils.names import joined, nearest
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import REGISTRIES

_MISSING = object()
_OF_LIGHTNING = OF_EVERY_LIGHTNING_MODULE - {"_hparams"}
_AGAIN, _UNSEEN = "each stage in this process would do again", "an earlier stage would not see"
_ADVICE = "Do so in a hook such as on_train_batch_start, or from the first step on (by nothing, if need be)"


class LateAssignments:
    """The assignments of attributes, by code between units in one forward, that the captured step did not make.

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process has run the code before this stage's part.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        graph = program.graph
        self._program, self._module, self._repeats = program, module, repeats
        self._known = {*graph.attributes, *graph.passing, *graph.of_units}
        self._read = {key for key, position in graph.reads if position < program.start}
        self._units = {node.name for node in graph.nodes[: program.start] if node.kind == "call"} - program.own
        self._paths: dict[int, str] = {}
        self._noted: dict[tuple[int, str, bool], tuple[nn.Module, str, Any, str]] = {}

    def begin(self) -> None:
        """Forget the assignments of the last forward."""
        self._noted = {}

    def note(self, module: nn.Module, name: str, before: bool) -> None:
        """Note that an attribute is about to be assigned, before the stage's part of the step or in it."""
        own, place = vars(module), (id(module), name, before)
        if not self._program.start or place in self._noted or (before and not self._repeats):
            return
        if any(name in own.get(register, ()) for register in REGISTRIES):
            return
        if before and isinstance(own.get(name), Tensor):  # made again from what all stages have, such as a mask
            return
        if id(module) not in self._paths:
            self._paths = {id(m): path for path, m in self._module.named_modules()}
        path = self._paths.get(id(module))
        if path is None or (path, name) in self._known:
            return
        if before or (path, name) in self._read or nearest(path, self._units):
            self._noted[place] = module, joined(path, name), own.get(name, _MISSING), source_line()

    def found(self) -> str | None:
        """Return a description of an assignment that has left another value; None: there is none."""
        for (_, name, before), (module, full, old, line) in self._noted.items():
            now = vars(module).get(name, _MISSING)
            if _is_equal(old, now):
                continue
            if isinstance(old, Tensor) and isinstance(now, Tensor) and old.shape != now.shape:  # a larger table
                continue
            why = _AGAIN if before else _UNSEEN
            return (
                f"assigns '{full}' at {line}, which it did not do when it was captured, and which {why} (stage "
                f"{self._program.stage}). {_ADVICE}"
            )
        return None


class SharedObjects:
    """The objects that units of this stage and of others hold or name, and that the captured step did not change.

    Args:
        program: program of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        graph = program.graph
        calls = {node.name for node in graph.nodes if node.kind == "call"} if program.num_stages > 1 else set()
        here = {node.name for node in program.nodes if node.kind == "call"}
        own, others = (Snapshot(_held_by(module, units)) for units in (calls & here, calls - here))
        known = Snapshot(variable(module, *key) for key in (*graph.attributes, *graph.of_units, *_leads(program)))
        shared = own.indices.keys() & others.indices.keys() - known.indices.keys()
        self._objects = own.among(shared)
        self._module, self._program, self._shares = module, program, bool(shared)

    def begin(self) -> None:
        """Note the present contents of the objects, with which :meth:`changed` compares."""
        if self._shares:
            self._objects.follow([obj for obj, *_ in self._objects.modified()])

    def changed(self) -> str | None:
        """Return a description of an object that has changed since; None: there is none."""
        for obj, before, now in self._objects.modified() if self._shares else ():
            if not _only_grew(before, now):
                return (
                    f"changes {self._name(obj)}, which submodules of other stages hold too, and did not when it was "
                    f"captured (stage {self._program.stage}). {_ADVICE}, or keep what holds it on one stage with "
                    "split_points"
                )
        return None

    def _name(self, obj: Any) -> str:
        held = {joined(*key): value for key, value in attributes_of(dict(self._module.named_modules())).items()}
        found = (
            name for name, value in {**held, **outside(self._module)}.items() if Snapshot([value]).reach({id(obj)})
        )
        return f"an object in '{next(found, 'an attribute')}'"


class LateChanges:
    """The objects of code between units that the captured step did not change, and that this stage must not change.

    ::

        training_step    if late: self.seen.append(x)  | units ... | if late: self.bank[0] = y
        stage 0          reads self.bank, appends      |
        stage 1          appends once more in the same process     | stage 0 in another process does not see it

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process has run the code before this stage's part.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        graph = program.graph
        changed = {*graph.attributes, *graph.of_units, *graph.written, *_leads(program)}
        self._program, self._module, self._repeats = program, module, repeats
        self._known = [variable(module, *key) for key in changed]
        between = {path: m for path, m in module.named_modules() if not nearest(path, set(graph.units))}
        metrics = {path for path, m in between.items() if _is_metric(m)}  # they hear of each value once
        if repeats:
            keys = {*attributes_of(between), *(("", name) for name in outside(module))}
        else:
            keys = {key for key, position in graph.reads if position < program.start}
        keys = {key for key in keys if not nearest(key[0], metrics) and (key[0] or key[1] not in _OF_LIGHTNING)}
        self._roots = {key: variable(module, *key) for key in sorted(keys - changed) if program.start}
        self._before: Snapshot | None = None
        self._iterations = 0

    def begin_iteration(self) -> None:
        """Begin an iteration. What changes in the first one, and was put back in the captured step, is not late."""
        self._iterations += 1

    def begin(self) -> None:
        """Note the present contents of the objects."""
        held: list[Any] = []
        for (path, name), root in self._roots.items():
            if not path and name.startswith(KINDS):  # an assignment of an attribute is seen when it happens
                held.append(root)
            held += (one for one in root.state().values() if type(one) not in ATOMS)
        self._before = Snapshot(held, opaque=True) if held else None

    def begin_part(self) -> str | None:
        """Begin this stage's part; return a description of what was changed once more before it; None: nothing was."""
        if self._repeats:
            return self._changed(_AGAIN)
        self.begin()  # what code before has changed, every process has
        return None

    def changed(self) -> str | None:
        """Return a description of a change in this stage's part that an earlier stage would not see; None: none."""
        return None if self._repeats else self._changed(_UNSEEN)

    def _changed(self, why: str) -> str | None:
        before, self._before = self._before, None
        if before is None:
            return None
        kept = [obj for obj, old, now in before.modified() if not (is_generator(obj) or _only_grew(old, now))]
        found = {id(obj) for obj in (*kept, *before.written())}
        found -= Snapshot(self._known, opaque=True).reached() if found else set()
        late = leading(self._roots, found)
        if self._iterations > 1 and late:
            return (
                f"changes what '{joined(*late[0])}' holds, which it did not do when it was captured, and which {why} "
                f"(stage {self._program.stage}). {_ADVICE}"
            )
        for key in late:
            del self._roots[key]
        return None


class LateHooks:
    """The hooks of modules that code between units registers, and that the captured step did not register.

    A stage that leaves the step before ``handle.remove()`` keeps the hook, and the next one registers another.

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process has run the code before this stage's part.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        self._program, self._repeats = program, repeats
        earlier = {node.name for node in program.graph.nodes[: program.start] if node.kind == "call"} - program.own
        modules = dict(module.named_modules()) if program.start else {}
        self._modules = list(modules.items())
        self._earlier = [(path, inner) for path, inner in modules.items() if nearest(path, earlier)]
        self._next = 0  # number of the next hook
        self._iterations = 0

    def begin_iteration(self) -> None:
        """Begin an iteration. Hooks that are registered in the first one are not late."""
        self._iterations += 1

    def begin(self) -> None:
        """Note which hooks there are."""
        self._next = RemovableHandle.next_id

    def begin_part(self) -> str | None:
        """Begin this stage's part; return a description of a hook that was registered before it; None: there is none.

        Where the stage does not repeat what an earlier one of its process has done, each process has the hook once.
        """
        found = self._registered(self._modules, _AGAIN) if self._repeats else None
        self.begin()
        return found

    def changed(self) -> str | None:
        """Return a description of a hook, registered in this stage's part, of a submodule of an earlier stage."""
        return self._registered(self._earlier, _UNSEEN)

    def _registered(self, modules: Sequence[tuple[str, nn.Module]], why: str) -> str | None:
        if RemovableHandle.next_id == self._next or not modules:
            return None
        new = (
            path
            for path, inner in modules
            for name in CALLED_HOOKS
            if any(key >= self._next for key in vars(inner)[name])
        )
        path = next(new, None)
        if path is not None and self._iterations == 1:
            self._modules, self._earlier = [], []
        if path is None or not self._modules:
            return None
        return (
            f"registers a hook of '{path or 'the LightningModule'}', which it did not do when it was captured, and "
            f"which {why} (stage {self._program.stage}). {_ADVICE}"
        )


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(module).__mro__)


def _leads(program: StageProgram) -> Iterator[tuple[str, str]]:
    """Yield the attributes that lead to objects which the captured step changes, or sets for a while."""
    yield from (key for key, _ in program.graph.holders)
    yield from program.graph.passing


def _held_by(module: nn.Module, units: Iterable[str]) -> Iterator[Any]:
    """Yield what the attributes of units hold, and the variables that their code names."""
    named = outside(module) if units else {}
    for unit in units:
        inner = module.get_submodule(unit)
        yield from attributes_of(dict(inner.named_modules())).values()
        yield from (named[name] for name in outside(inner) if name in named)


def _only_grew(before: ObjectState, now: ObjectState) -> bool:
    """Return whether an object differs only by further attributes, further items of a dict, and equal numbers."""
    old, new = _named(before), _named(now)
    names = now.changed_names(before)
    return names is not None and not any(name in old and not _is_equal(old[name], new.get(name)) for name in names)


def _named(state: ObjectState) -> dict[Any, Any]:
    return {**state.attributes, **(state.items if isinstance(state.items, dict) else {})}


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) in ATOMS and type(one) is type(other) and one == other)

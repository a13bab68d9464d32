"""Attributes of modules that the code between units assigns, or whose objects it changes: counters, hidden states."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.expressions import ALL, Use, uses
from lightning_avgpipe.capture.held_tensors import HeldTensors, Key
from lightning_avgpipe.capture.outside import outside, places
from lightning_avgpipe.capture.shared_objects import Names
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.object_state import Variable
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import REGISTRIES, address

_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}


class _Write(NamedTuple):
    """An assignment: how many nodes came before it, its line, and how tensors lie in what was assigned."""

    position: int
    source: str
    layout: Any


class Look(NamedTuple):
    """Something that depends on what an attribute holds.

    Attributes:
        position: how many nodes came before.
        source: its line.
        use: of the object that it holds, or of one that this holds in turn.
        carried: whether the step before may have assigned it.
    """

    position: int
    source: str
    use: Use
    carried: bool


@dataclass
class _Loaded:
    """An attribute that a line of code has loaded, and what it has not yet done with it."""

    key: Key
    frame: types.FrameType
    offset: int
    source: str
    uses: list[Use]
    carried: bool

    def done(self, again: bool) -> list[Use]:
        """What it has done since it was last asked, or before it runs once more."""
        now, last = self.frame.f_lasti, self.uses[-1].offset if self.uses else 0
        runs = self.offset <= now < last and not again
        done = [use for use in self.uses if not runs or use.offset <= now]
        self.uses = self.uses[len(done) :]
        return done


class Assignments:
    """Watches which attributes are read and assigned, and when.

    Args:
        module: whose submodules are watched.
        position: how many nodes there are; None: a unit runs, whose attributes are its own.
        ignore: modules that only observe.
        was_read: told of every read.

    Attributes:
        held: tensors in attributes, and what comes of them.
        reads: attributes that were read, and how many nodes came before the first time.
    """

    def __init__(
        self,
        module: nn.Module,
        position: Callable[[], int | None],
        ignore: Collection[nn.Module] = (),
        was_read: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._modules = {id(m): (path, m) for path, m in _watched(module, ignore).items()}
        self._position = position
        self._told = was_read
        self._loaded: list[_Loaded] = []
        self._looks: dict[Key, list[Look]] = {}  # at what the step before has assigned or changed
        self._writes: dict[Key, list[_Write]] = defaultdict(list)
        self._before: dict[Key, Any] = {}
        self._last = 0  # position
        self.held = HeldTensors()
        self.reads: dict[Key, int] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context attributes are watched."""
        if any(is_compiled(m) for _, m in self._modules.values()):  # which would be compiled anew
            yield
            return
        assign = nn.Module.__setattr__
        read = nn.Module.__getattribute__

        def watched_assign(module: nn.Module, name: str, value: Any) -> None:
            self._assigned(module, name, value)
            assign(module, name, value)

        def watched_read(module: nn.Module, name: str) -> Any:
            if name not in _OF_EVERY_MODULE:
                self._was_read(module, name)
            return read(module, name)

        nn.Module.__setattr__ = watched_assign  # type: ignore[method-assign, assignment]
        nn.Module.__getattribute__ = watched_read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            del nn.Module.__getattribute__

    def _key(self, module: nn.Module, name: str) -> Key | None:
        known = self._modules.get(id(module))
        return None if known is None or known[1] is not module else (known[0], name)

    def _assigned(self, module: nn.Module, name: str, value: Any) -> None:
        self.settle()
        position, key = self._position(), self._key(module, name)
        if position is None or key is None or any(name in vars(module)[register] for register in REGISTRIES):
            return
        self._before.setdefault(key, vars(module).get(name, _MISSING))
        self._writes[key].append(_Write(position, source_line(), _layout(value)))
        self.held.add(Objects((value,)).tensors, key)

    def _was_read(self, module: nn.Module, name: str) -> None:
        if name not in vars(module):
            return
        position, key = self._position(), self._key(module, name)
        if key is not None:
            self._told(key)
            self.reads.setdefault(key, self._here())
            self._load(key, vars(module)[name], sys._getframe(2), position is None)

    def _load(self, key: Key, held: Any, frame: types.FrameType, in_unit: bool) -> None:
        """A line of code, whose frame this is, has loaded what an attribute holds."""
        code, offset = frame.f_code, frame.f_lasti
        self.settle((frame, offset))
        looks, carried = self._looks.setdefault(key, []), key not in self._writes and not in_unit
        if any(look.use.held is held and look.use.key is ALL and look.carried >= carried for look in looks):
            return
        if carried:
            self.held.add(Objects((held,)).tensors, key)
        if in_unit:
            looks.append(Look(self._last, source_line(), Use(offset, held, ALL), carried))
        else:
            self._loaded.append(_Loaded(key, frame, offset, source_line(), uses(code, offset, held), carried))

    def settle(self, again: tuple[types.FrameType, int] | None = None) -> None:
        """A node comes next, or something that is watched: what loaded attributes were used for until now.

        Args:
            again: the frame and the offset of an instruction that loads, once more if the line lies in a loop.
        """
        for loaded in self._loaded:
            done = loaded.done((loaded.frame, loaded.offset) == again)
            self._looks[loaded.key] += (Look(self._here(), loaded.source, use, loaded.carried) for use in done)
        self._loaded = [loaded for loaded in self._loaded if loaded.uses]

    def _here(self) -> int:
        position = self._position()
        self._last = self._last if position is None else position
        return self._last

    def changed(self) -> list[Key]:
        """Attributes that are something else than before."""
        modules = dict(self._modules.values())
        return [key for key, before in self._before.items() if vars(modules[key[0]]).get(key[1]) is not before]

    def created(self) -> set[Key]:
        """Attributes that were not there before."""
        return {key for key in self.changed() if self._before[key] is _MISSING}

    def assigned(self) -> set[Key]:
        """All attributes that were assigned, changed or not."""
        return set(self._writes)

    def looks(self, key: Key) -> list[Look] | None:
        """What depended on what an attribute holds; None if nobody has seen it loaded."""
        return self._looks.get(key)

    def _first(self, key: Key) -> Look | None:
        """What depended first on what the step before has assigned."""
        return min((look for look in self._looks.get(key, ()) if look.carried), key=lambda k: k.position, default=None)

    def carried(self) -> Iterator[str]:
        """Attributes that hold more than numbers for the next micro-batch, by full name."""
        modules = dict(self._modules.values())
        for key in self.changed():
            held = Objects((vars(modules[key[0]]).get(key[1]),)).tensors
            if self._first(key) and key in self.held.uses and any(tensor.ndim > 1 for tensor in held):
                yield joined(*key)

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie: a stage that reads what a step before assigned must come to the assignment.

        ::

            training_step    if h is None: h = zeros | embed | rnn(x, h) | decoder | h = ... of rnn
            stage 0          reads h, which stays zeros here; no node of this stage takes it
            stage 1                                    takes h, and comes to the last assignment
        """
        for key in self.changed():
            first, writes = self._first(key), self._writes[key]
            if first is None:
                continue
            last = writes[-1]
            name = joined(*key)
            reason = (
                f"the attribute '{name}' is read at {first.source} and assigned at {last.source}, for the next "
                "micro-batch; assign it before the first submodule is called, or in on_train_batch_start"
            )
            for end in range(first.position, last.position):
                held = [write.layout for write in writes if write.position <= end]
                alike = bool(held) and held[-1] is not None and held[-1] == last.layout
                if not alike or self.held.uses.get(key, last.position) < end:
                    yield end, end, reason


def _layout(value: Any) -> Any:
    """How tensors lie in what an attribute holds; None if there is anything else in it."""
    try:
        leaves, spec = tree.flatten(value)
    except RecursionError:  # it leads back into itself, so it is no tree
        return None
    return spec if leaves and all(isinstance(leaf, Tensor) for leaf in leaves) else None


class Mutations:
    """Which objects in attributes the code between units changes in place, and which variables, and when.

    Args:
        module: whose submodules' attributes lead to the objects, and whose code names the variables.
        chosen: the ids of those that change while the step runs; only these are watched.
        position: how many nodes there are.
        ignore: modules that only observe.

    Attributes:
        attributes: of modules, by path and name, and variables outside.
        objects: all that they lead to.
        chosen: those that are watched.
        once: ids of objects that the code between units changes once and for all, where, and which attributes.
    """

    def __init__(
        self,
        module: nn.Module,
        chosen: Collection[int],
        position: Callable[[], int],
        ignore: Collection[nn.Module] = (),
    ) -> None:
        self._modules = _watched(module, ignore)
        self.attributes = _held(self._modules)
        self.attributes |= {("", name): variable for name, variable in outside(module).items()}
        self._module = module
        self.objects = Objects(self.attributes.values(), opaque=True)
        self.chosen = self.objects.among(chosen)
        self.once: dict[int, tuple[int, Names]] = {}
        self._position = position
        self._first: dict[int, tuple[Any, int]] = {}  # by id: an object, and where it first changed
        self._last: dict[int, dict[Any, int]] = {}  # and where it last did, by key; None: nobody knows which; ALL: any
        self._names: dict[int, Names] = {}  # of attributes that differed then

    def look(self) -> None:
        """Code between units has run."""
        differences = self.chosen.differences()
        self.between(differences)
        if differences:
            self.chosen.follow(obj for obj, _ in differences)
            self.chosen.adopt(Objects([obj for obj, _ in differences], opaque=True), self.objects)

    def between(self, differences: Iterable[tuple[Any, Names]]) -> None:
        """Code that every stage runs has changed these objects."""
        for obj, names in differences:
            self._first.setdefault(id(obj), (obj, self._position()))
            last = self._last.setdefault(id(obj), {})
            last |= dict.fromkeys((ALL, *((None,) if names is None else names)), self._position())
            known = self._names.get(id(obj), frozenset())
            self._names[id(obj)] = None if names is None or known is None else known | names

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[list[tuple[Any, Names]]]:
        """Within this context a unit runs; after it the list has what it has changed, on its stage only."""
        self.look()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self.chosen.differences()
        self.chosen.follow(obj for obj, _ in changed)

    def assigned_in(self, module: nn.Module) -> set[Key]:
        """Attributes of a unit that are something else than when the step began."""
        inner = {id(m) for m in module.modules()}
        now = _held({path: m for path, m in self._modules.items() if id(m) in inner})
        return {key for key, held in now.items() if self.attributes.get(key) is not held}

    def pass_over(self) -> None:
        """What has changed until now was not changed by the code between units."""
        self.chosen.follow(obj for obj, _ in self.chosen.differences())

    def found(self) -> frozenset[int]:
        """Ids of the objects that have changed since the step began, whoever changed them."""
        return frozenset(id(obj) for obj in self.objects.changed() if not isinstance(obj, Tensor))

    def keep(self, lasting: Collection[int]) -> None:
        """Forget what does not change again when the step runs once more: a name that is set when it is first needed.

        That is the same for all stages of a process. A stage of its own mind would make once more what goes with it.

        Args:
            lasting: ids of the objects that do; a list that the step has made is one, and leads to what holds it.
        """
        changing = {key for key, (obj, _) in self._first.items() if Objects([obj], opaque=True).reach(lasting)}
        self.once = {key: (first[1], self._names[key]) for key, first in self._first.items() if key not in changing}
        self._first = {key: first for key, first in self._first.items() if key in changing}

    def holders(self) -> dict[Key, int]:
        """Attributes that lead to what code between units has changed, and where it first did."""
        found = {}
        for key, held in self.attributes.items() if self._first else ():
            reached = Objects([held], opaque=True)
            first = [position for key, (_, position) in self._first.items() if reached.reach({key})]
            if first:
                found[key] = min(first)
        return found

    def of_units(self) -> tuple[Key, ...]:
        """Attributes that units have assigned, or whose objects they have changed; also those that glue assigned."""
        before, changed = self.attributes, self.found() - self._first.keys()
        leading = {key for key, held in before.items() if changed and Objects([held], opaque=True).reach(changed)}
        now = _held(self._modules) | {key: held for key, held in before.items() if isinstance(held, Variable)}
        assigned = {key for key in now if before.get(key) is not now[key]}
        return tuple(sorted(leading & now.keys() | assigned))

    def written(self, memory: Collection[int]) -> tuple[Key, ...]:
        """Attributes and variables that lead to tensors with memory at these addresses."""
        leading = {k: Objects([held]).tensors for k, held in self.attributes.items()} if memory else {}
        return tuple(k for k, tensors in leading.items() if any(address(t) in memory for t in tensors))

    def pinned(self, assignments: Assignments) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie: a stage that reads what a step before has changed must come to the change."""
        variables = {("", name) for name in outside(self._module)}
        for key in self.holders():
            if key in variables and places(self._module, key[1]) == 1:
                continue  # which reads it, if at all, where it changes it
            looks = assignments.looks(key)
            if looks is None:
                looks = [Look(0, "an unknown line", Use(0, self.attributes[key], ALL), True)]
            name = joined(*key)
            for look in looks:
                change = self._last_change(look.use)
                if look.position < change:
                    reason = f"'{name}' is read at {look.source}, and its contents are changed later"
                    where = "for the next micro-batch; change them before the first submodule is called"
                    yield (look.position, change - 1, f"{reason}, {where}")

    def _last_change(self, use: Use) -> int:
        """Where the code between units has last changed what a use depends on; -1 if nowhere."""
        if use.key is not ALL:
            last = self._last[id(use.held)] if id(use.held) in self._first else {}
            return max(last.get(use.key, -1), last.get(None, -1))
        reached = Objects([use.held], opaque=True)
        return max((self._last[key][ALL] for key in self._first if reached.reach({key})), default=-1)


def _held(modules: dict[str, nn.Module]) -> dict[Key, Any]:
    return {
        (path, name): held
        for path, m in modules.items()
        for name, held in vars(m).items()
        if name not in _OF_EVERY_MODULE
    }


def _watched(module: nn.Module, ignore: Collection[nn.Module]) -> dict[str, nn.Module]:
    ignored = {id(m) for observer in ignore for m in observer.modules()}
    return {path: m for path, m in module.named_modules() if id(m) not in ignored}


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")

"""Watch attributes of modules that code between units assigns, or whose objects it changes in place."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.held_tensors import HeldTensors, Key
from lightning_avgpipe.capture.outside import outside, places
from lightning_avgpipe.capture.shared_objects import Names
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.object_state import Variable
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import REGISTRIES, address, untraced

_MISSING = object()
# Methods of collections that change them and return nothing.
_WRITING = ("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "update")
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) | {"__dict__", "__class__"}) - {"training"}


class _Write(NamedTuple):
    """An assignment of an attribute by code between units.

    The fields are: how many nodes came before, the line, the layout of the tensors in the assigned value, whether any
    of them has a gradient history, and whether the value differs from the one before the step.
    """

    position: int
    source: str
    layout: Any
    has_history: bool
    is_other: bool


class Look(NamedTuple):
    """A load of an attribute by a line of code; all that the attribute leads to counts as read.

    Attributes:
        position: number of nodes before the load.
        source: the line that loads the attribute.
        held: the object that the attribute holds.
        carried: whether the object may come from the previous step.
    """

    position: int
    source: str
    held: Any
    carried: bool


class Assignments:
    """A watch for reads and assignments of attributes while a step runs.

    Args:
        module: module whose submodules are watched.
        position: return the number of nodes so far; None while a unit runs, whose attributes are its own.
        ignore: modules that only observe; they are not watched.
        readers: functions that are called with the key of every attribute that is read.

    Attributes:
        held: the tensors that attributes hold, and the tensors that are computed from them.
        reads: attribute -> number of nodes before its first read.
        of_units: attributes that units have assigned, to another value or the same.
    """

    def __init__(
        self,
        module: nn.Module,
        position: Callable[[], int | None],
        ignore: Collection[nn.Module] = (),
        readers: Sequence[Callable[[Key], None]] = (),
    ) -> None:
        self._modules = {id(m): (path, m) for path, m in _watched(module, ignore).items()}
        self._position = position
        self._readers = readers
        self._looks: dict[Key, list[Look]] = {}  # reads that may see values of the previous step
        self._writes: dict[Key, list[_Write]] = defaultdict(list)
        self._before: dict[Key, Any] = {}
        self._last = 0  # position
        self.held = HeldTensors()
        self.reads: dict[Key, int] = {}
        self.of_units: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads and assignments of attributes within this context."""
        assign = nn.Module.__setattr__
        read = nn.Module.__getattribute__
        outer = vars(nn.Module).get("__getattribute__")  # not None while an outer step is watched

        def watched_assign(module: nn.Module, name: str, value: Any) -> None:
            with untraced():
                self._assigned(module, name, value)
            assign(module, name, value)

        def watched_read(module: nn.Module, name: str) -> Any:
            if name not in _OF_EVERY_MODULE:
                with untraced():
                    self._was_read(module, name)
            return read(module, name)

        nn.Module.__setattr__ = watched_assign  # type: ignore[method-assign, assignment]
        nn.Module.__getattribute__ = watched_read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            if outer is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = outer  # type: ignore[method-assign]

    def _key(self, module: nn.Module, name: str) -> Key | None:
        known = self._modules.get(id(module))
        return None if known is None or known[1] is not module else (known[0], name)

    def _assigned(self, module: nn.Module, name: str, value: Any) -> None:
        position, key = self._position(), self._key(module, name)
        if key is None or any(name in vars(module)[register] for register in REGISTRIES):
            return
        if position is None:
            self.of_units.add(key)
            return
        is_other = value is not self._before.setdefault(key, vars(module).get(name, _MISSING))
        self._note(key, position, source_line(), value, is_other)

    def was_assigned(self, key: Key, before: Any, position: int) -> None:
        """Note an assignment that bypassed ``nn.Module.__setattr__``, so that its line is unknown."""
        if any(write.position == position for write in self._writes[key]):
            return
        self._before.setdefault(key, before)
        module = dict(self._modules.values())[key[0]]
        self._note(key, position, "a line that goes past nn.Module.__setattr__", vars(module).get(key[1]), True)

    def _note(self, key: Key, position: int, source: str, value: Any, is_other: bool) -> None:
        tensors = Objects((value,)).tensors
        has_history = any(tensor.grad_fn is not None for tensor in tensors)
        self._writes[key].append(_Write(position, source, _layout(value), has_history, is_other))
        self.held.add(tensors, key)

    def _was_read(self, module: nn.Module, name: str) -> None:
        position, key = self._position(), self._key(module, name)
        if key is None:
            return
        if name in vars(module):
            held = vars(module)[name]
            self.reads.setdefault(key, self._here())
        else:  # a class attribute, until an instance assigns its own
            held = getattr(type(module), name, _MISSING)
            if held is _MISSING or hasattr(held, "__get__"):
                return
        for tell in self._readers:
            tell(key)
        self._load(key, held, position is None, _only_writes(sys._getframe(2), held))

    def _load(self, key: Key, held: Any, in_unit: bool, only_writes: bool) -> None:
        looks, carried = self._looks.setdefault(key, []), key not in self._writes
        if only_writes or any(look.held is held and look.carried >= carried for look in looks):
            return
        if carried:
            self.held.add(Objects((held,)).tensors, key)
        position = self._last + 1 if in_unit else self._here()  # after the unit
        looks.append(Look(position, source_line(), held, carried))

    def was_free(self) -> None:
        """Count the reads of the last unit as reads between units: every stage that gets that far runs it."""
        for key, looks in self._looks.items():
            self._looks[key] = [look._replace(position=min(look.position, self._last)) for look in looks]

    def _here(self) -> int:
        position = self._position()
        self._last = self._last if position is None else position
        return self._last

    def changed(self) -> list[Key]:
        """Return the attributes whose value is another object than before the step."""
        modules = dict(self._modules.values())
        return [key for key, before in self._before.items() if vars(modules[key[0]]).get(key[1]) is not before]

    def passing(self) -> set[Key]:
        """Return attributes that changed during the step and were set back, such as a mode or a flag."""
        return self._others().difference(self.changed())

    def _others(self) -> set[Key]:
        return {key for key, writes in self._writes.items() if any(write.is_other for write in writes)}

    def created(self) -> set[Key]:
        """Return the attributes that did not exist before the step."""
        return {key for key in self.changed() if self._before[key] is _MISSING}

    def assigned(self) -> set[Key]:
        """Return all attributes that were assigned, to another value or the same."""
        return set(self._writes)

    def looks(self, key: Key) -> list[Look] | None:
        """Return the loads of an attribute; None if no load was seen."""
        return self._looks.get(key)

    def _first(self, key: Key) -> Look | None:
        """Return the first load that may see a value of the previous step; None if there is none."""
        return min((look for look in self._looks.get(key, ()) if look.carried), key=lambda k: k.position, default=None)

    def carried(self) -> Iterator[str]:
        """Yield the full names of attributes that carry tensors with two or more dimensions to the next micro-batch."""
        modules = dict(self._modules.values())
        for key in self.changed():
            held = Objects((vars(modules[key[0]]).get(key[1]),)).tensors
            if self._first(key) and key in self.held.uses and any(tensor.ndim > 1 for tensor in held):
                yield joined(*key)

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie because of attributes that the next micro-batch reads.

        A stage that reads an attribute which the previous step assigned must also execute the assignment.

        ::

            training_step    if h is None: h = zeros | embed | rnn(x, h) | decoder | h = ... of rnn
            stage 0          reads h, which stays zeros here; no node of this stage takes it
            stage 1                                    takes h, and comes to the last assignment
        """
        # an attribute that was assigned the same object may get another one for another micro-batch
        for key in (*self.changed(), *(self._writes.keys() - self._others())):
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
                held = next((write for write in reversed(writes) if write.position <= end), None)
                alike = held is not None and held.layout is not None and held.layout == last.layout
                if held is not None and held.has_history > last.has_history:
                    alike = False  # a later micro-batch would extend a graph that this one's backward has freed
                if not alike or self.held.uses.get(key, last.position) < end:
                    yield end, end, reason


def _only_writes(frame: types.FrameType, held: Any) -> bool:
    """Return whether the next operation on a loaded collection only adds to it, so that its contents are not read.

    ``self.outputs.append(self.loss(batch))`` loads the list first. Counted as a read, this would keep the whole step on
    one stage.
    """
    if type(held) not in (list, dict, set, deque):
        return False
    following = next((i for i in _instructions(frame.f_code) if i.offset > frame.f_lasti), None)
    return following is not None and following.argval in _WRITING and following.opname in ("LOAD_ATTR", "LOAD_METHOD")


@functools.lru_cache(maxsize=256)
def _instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _layout(value: Any) -> Any:
    """Return the tree structure of a value that holds tensors only; None if it holds anything else."""
    try:
        leaves, spec = tree.flatten(value)
    except RecursionError:  # a value that contains itself is no tree
        return None
    return spec if leaves and all(isinstance(leaf, Tensor) for leaf in leaves) else None


class Mutations:
    """A watch for objects in attributes and variables that code between units changes in place.

    Args:
        module: module whose attributes lead to the objects, and whose code names the variables.
        chosen: ids of the objects that are known to change while the step runs; only these are watched.
        position: return the number of nodes so far.
        ignore: modules that only observe; they are not watched.

    Attributes:
        attributes: attributes by path and name, and variables outside of modules by full name.
        objects: all objects that attributes and variables lead to.
        chosen: the objects that are watched.
        once: id of an object that code between units changes in the first step only -> the position, and the names of
            the changed attributes.
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
        self._first: dict[int, tuple[Any, int]] = {}  # by id: an object, and the position of its first change
        self._last: dict[int, int] = {}  # by id: the position of the last change
        self._names: dict[int, Names] = {}  # by id: names of the changed attributes

    def look(self) -> None:
        """Note the changes of code between units that has just run."""
        differences = self.chosen.differences()
        self.between(differences)
        if differences:
            self.chosen.follow(obj for obj, _ in differences)
            self.chosen.adopt(Objects([obj for obj, _ in differences], opaque=True), self.objects)

    def between(self, differences: Iterable[tuple[Any, Names]]) -> None:
        """Note that code which every stage runs has changed these objects."""
        for obj, names in differences:
            self._first.setdefault(id(obj), (obj, self._position()))
            self._last[id(obj)] = self._position()
            known = self._names.get(id(obj), frozenset())
            self._names[id(obj)] = None if names is None or known is None else known | names

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[list[tuple[Any, Names]]]:
        """Run a unit within this context; the list then holds the objects that the unit has changed."""
        self.look()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self.chosen.differences()
        self.chosen.follow(obj for obj, _ in changed)

    def assigned_in(self, module: nn.Module) -> set[Key]:
        """Return the attributes of a unit that hold another object than when the step began."""
        inner = {id(m) for m in module.modules()}
        now = _held({path: m for path, m in self._modules.items() if id(m) in inner})
        return {key for key, held in now.items() if self.attributes.get(key) is not held}

    def pass_over(self) -> None:
        """Ignore all changes so far: code between units did not make them."""
        self.chosen.follow(obj for obj, _ in self.chosen.differences())

    def found(self) -> frozenset[int]:
        """Return the ids of the objects that have changed since the step began, by any code."""
        return frozenset(id(obj) for obj in self.objects.changed() if not isinstance(obj, Tensor))

    def keep(self, lasting: Collection[int]) -> None:
        """Forget objects that do not change again when the step runs once more, such as a cache that is filled once.

        Such objects are shared by all stages of a process. A copy per stage would also repeat all that was made along
        with them.

        Args:
            lasting: ids of the objects that changed again, including containers that the step makes anew.
        """
        changing = {key for key, (obj, _) in self._first.items() if Objects([obj], opaque=True).reach(lasting)}
        self.once = {key: (first[1], self._names[key]) for key, first in self._first.items() if key not in changing}
        self._first = {key: first for key, first in self._first.items() if key in changing}

    def holders(self) -> dict[Key, int]:
        """Return the attributes that lead to objects changed between units, with the position of the first change."""
        found = {}
        for key, held in self.attributes.items() if self._first else ():
            reached = Objects([held], opaque=True)
            first = [position for key, (_, position) in self._first.items() if reached.reach({key})]
            if first:
                found[key] = min(first)
        return found

    def of_units(self) -> tuple[Key, ...]:
        """Return the attributes that units or glue assign, and those whose objects units change."""
        before, changed = self.attributes, self.found() - self._first.keys()
        leading = {key for key, held in before.items() if changed and Objects([held], opaque=True).reach(changed)}
        now = _held(self._modules).keys() | {key for key, held in before.items() if isinstance(held, Variable)}
        return tuple(sorted(leading & now | self.reassigned()))

    def reassigned(self) -> set[Key]:
        """Return the attributes that hold another object than when the step began, whoever assigned them."""
        return {key for key, held in _held(self._modules).items() if self.attributes.get(key) is not held}

    def written(self, memory: Collection[int]) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to tensors with memory at these addresses."""
        leading = {k: Objects([held]).tensors for k, held in self.attributes.items()} if memory else {}
        return tuple(k for k, tensors in leading.items() if any(address(t) in memory for t in tensors))

    def pinned(self, assignments: Assignments) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie because of objects that the next micro-batch reads.

        A stage that reads an object which the previous step changed must also execute the change.
        """
        variables = {("", name) for name in outside(self._module)}
        for key in self.holders():
            lines = places(self._module, key[1]) if key in variables else []
            if len(lines) == 1:
                continue  # a single line: it reads the variable, if at all, where it changes it
            looks = assignments.looks(key)
            if looks is None:  # reads of variables, and reads that bypass __getattribute__, are not watched
                where = " or ".join(lines[:2]) or "a line that does not name it"
                looks = [Look(0, where, self.attributes[key], True)]
            name = joined(*key)
            for look in looks:
                change = self._last_change(look.held)
                if look.position < change:
                    reason = f"'{name}' is read at {look.source}, and its contents are changed later"
                    where = "for the next micro-batch; change them before the first submodule is called"
                    yield (look.position, change - 1, f"{reason}, {where}")

    def _last_change(self, held: Any) -> int:
        """Return the position of the last change between units of what an object leads to; -1 if there is none."""
        reached = Objects([held], opaque=True)
        return max((self._last[key] for key in self._first if reached.reach({key})), default=-1)


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
    """Return whether ``torch.compile`` has compiled a module."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")

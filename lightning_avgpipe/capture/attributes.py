"""Attributes of modules that the code between units assigns, or whose objects it changes: counters, hidden states."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.outside import outside, places
from lightning_avgpipe.capture.shared_objects import Names
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects, Variable
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import REGISTRIES, address

__all__ = ["Assignments", "Mutations", "is_compiled"]

_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}

Key = tuple[str, str]  # path of a module, name of the attribute


class _Write(NamedTuple):
    """An assignment: how many nodes came before it, its line, and how tensors lie in what was assigned."""

    position: int
    source: str
    layout: Any


class Assignments:
    """Watches which attributes are read and assigned, and when.

    Args:
        module: whose submodules are watched.
        position: how many nodes there are; None: a unit runs, whose attributes are its own.
        ignore: modules that only observe.
        was_read: told of every read.
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
        self._reads: dict[Key, tuple[int, str]] = {}  # of what the step before has assigned
        self._writes: dict[Key, list[_Write]] = defaultdict(list)
        self._before: dict[Key, Any] = {}
        self._holders: dict[int, tuple[weakref.ref[Tensor], frozenset[Key]]] = {}
        self._uses: dict[Key, int] = {}  # the first node that takes what an attribute held, or what comes from it
        self._last = 0  # position
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
        position, key = self._position(), self._key(module, name)
        if position is None or key is None or any(name in vars(module)[register] for register in REGISTRIES):
            return
        self._before.setdefault(key, vars(module).get(name, _MISSING))
        self._writes[key].append(_Write(position, source_line(), _layout(value)))
        self._hold(Objects((value,)).tensors, frozenset((key,)))

    def _was_read(self, module: nn.Module, name: str) -> None:
        if name not in vars(module):
            return
        position, key = self._position(), self._key(module, name)
        if key is not None:
            self._told(key)
            self._last = self._last if position is None else position
            self.reads.setdefault(key, self._last)
        if position is not None and key is not None and key not in self._writes and key not in self._reads:
            self._reads[key] = (position, source_line())
            self._hold(Objects((vars(module)[name],)).tensors, frozenset((key,)))

    def _hold(self, tensors: Iterable[Tensor], keys: frozenset[Key]) -> None:
        for tensor in tensors:
            self._holders[id(tensor)] = (weakref.ref(tensor), keys | self._keys([tensor]))

    def _keys(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        found: frozenset[Key] = frozenset()
        for tensor in tensors:
            holder = self._holders.get(id(tensor))
            if holder is not None and holder[0]() is tensor:
                found |= holder[1]
        return found

    def taken(self, tensors: Iterable[Tensor], node: int) -> None:
        """A node takes these tensors, which no node of this step has made."""
        for key in self._keys(tensors):
            self._uses.setdefault(key, node)

    def computed(self, tensors: Iterable[Tensor], result: Any, position: int) -> None:
        """Free glue before a node made this result of these tensors."""
        keys = self._keys(tensors)
        if not keys:
            return
        if all(isinstance(leaf, Tensor) for leaf in tree.flatten(result)[0]):
            self._hold(tree.tensors(result), keys)
            return
        for key in keys:  # numbers, on which anything may depend
            self._uses.setdefault(key, position - 1)

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

    def read(self, key: Key) -> tuple[int, str]:
        """Where an attribute was first read, and the line."""
        return self._reads.get(key, (self.reads.get(key, 0), "an unknown line"))

    def carried(self) -> Iterator[str]:
        """Attributes that hold more than numbers for the next micro-batch, by full name."""
        modules = dict(self._modules.values())
        for key in self.changed():
            held = Objects((vars(modules[key[0]]).get(key[1]),)).tensors
            if key in self._reads and key in self._uses and any(tensor.ndim > 1 for tensor in held):
                yield ".".join(part for part in key if part)

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie: a stage that reads what a step before assigned must come to the assignment.

        ::

            training_step    if h is None: h = zeros | embed | rnn(x, h) | decoder | h = ... of rnn
            stage 0          reads h, which stays zeros here; no node of this stage takes it
            stage 1                                    takes h, and comes to the last assignment
        """
        for key in self.changed():
            if key not in self._reads:
                continue
            (first, place), writes = self._reads[key], self._writes[key]
            last = writes[-1]
            name = ".".join(part for part in key if part)
            reason = (
                f"the attribute '{name}' is read at {place} and assigned at {last.source}, for the next micro-batch; "
                "assign it before the first submodule is called, or in on_train_batch_start"
            )
            for end in range(first, last.position):
                held = [write.layout for write in writes if write.position <= end]
                alike = bool(held) and held[-1] is not None and held[-1] == last.layout
                if not alike or self._uses.get(key, last.position) < end:
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
        self._names: dict[int, Names] = {}  # of attributes that differed then

    def look(self) -> None:
        """Code between units has run."""
        differences = self.chosen.differences()
        for obj, names in differences:
            self._first.setdefault(id(obj), (obj, self._position()))
            known = self._names.get(id(obj), frozenset())
            self._names[id(obj)] = None if names is None or known is None else known | names
        if differences:
            self.chosen.follow(obj for obj, _ in differences)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[list[tuple[Any, Names]]]:
        """Within this context a unit runs; after it the list has what it has changed, on its stage only."""
        self.look()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self.chosen.differences()
        self.chosen.follow(obj for obj, _ in changed)

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
        for key, change in self.holders().items():
            if key in variables and places(self._module, key[1]) == 1:
                continue  # which reads it, if at all, where it changes it
            first, place = assignments.read(key)
            if first < change:
                name = ".".join(part for part in key if part)
                reason = f"'{name}' is read at {place}, and its contents are changed later, for the next micro-batch"
                yield (first, change - 1, f"{reason}; change them before the first submodule is called")


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

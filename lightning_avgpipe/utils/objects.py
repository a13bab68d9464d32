"""Collect the Python objects reachable through containers, attributes and closures; compare and restore their state."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count
from typing import Any, Literal

from torch import Tensor, nn

from lightning_avgpipe.utils import opaque as opaque_contents
from lightning_avgpipe.utils.lightning import LIGHTNING
from lightning_avgpipe.utils.object_state import ITEMS, ObjectState, Variable, put_state, same_items, state_of
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.utils.weak_cache import weakly_cached

# Packages whose objects are not entered: they hold no values of a step, and lead to everything else. Of the standard
# library and of Lightning, only the containers in _OPEN are entered.
_CLOSED = (
    *LIGHTNING, "lightning_avgpipe", "torchmetrics", "torch.optim",
    "torch.utils.data", "torch.distributed", "torch.cuda", "torch._C",
)  # fmt: skip
_OPEN = (
    "builtins", "collections", "types.SimpleNamespace", "functools.partial", "abc", "typing",
    "lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict",
)  # fmt: skip


class Objects:
    """The objects that are reached from some roots, with a snapshot of the state of each.

    Neither modules nor objects of a Trainer are entered.

    Args:
        roots: objects to begin with.
        modules: modules that are entered nevertheless.
        contents: whether the values of tensors are kept as well, except those of parameters.
        opaque: whether the contents of arrays and random generators are kept as well; ``"generators"``: only those of
            random generators; ``"iterators"``: only the progress of iterators.
        generators: random generators that are owners, by their numbers among all random generators that are reached.
        like: earlier snapshot, whose copies of arrays and generators are reused where these have not changed.

    Attributes:
        tensors: tensors that are reached, each once, in the order in which they are reached.
        owners: mutable objects that are reached, in an order that is the same for equal structures.
        indices: id of an owner -> its position in ``owners``.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        contents: bool = False,
        opaque: bool | Literal["generators", "iterators"] = False,
        generators: Collection[int] = (),
        like: Objects | None = None,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.owners: list[Any] = []
        self.indices: dict[int, int] = {}
        self._states: list[tuple[Any, ObjectState]] = []
        self._opaque: list[tuple[Any, Any]] = []
        opened = {id(module): module for module in modules}
        kept = {} if like is None else like._kept()
        is_generator, is_opaque = opaque_contents.is_generator, _KINDS.get(str(opaque), opaque_contents.is_opaque)
        seen, numbering = set[int](), count()
        waiting = [*opened.values(), *roots][::-1]
        while waiting:
            obj = waiting.pop()
            cls: Any = type(obj)
            if cls in ATOMS or id(obj) in seen:
                continue
            seen.add(id(obj))
            if isinstance(obj, Tensor):
                self.tensors.append(obj)
            elif opaque and is_opaque(obj):
                known = id(obj) in kept and opaque_contents.is_same(obj, kept[id(obj)])
                self._opaque.append((obj, kept[id(obj)] if known else opaque_contents.contents(obj)))
            elif is_open(cls) or id(obj) in opened or (is_generator(obj) and next(numbering) in generators):
                state = state_of(obj)
                self._states.append((obj, state))
                if cls not in _FIXED:
                    self.indices[id(obj)] = len(self.owners)
                    self.owners.append(obj)
                children = state.children()
                if not ATOMS.issuperset(map(type, children)):  # long lists of numbers are common
                    waiting.extend(children[::-1])
        self._versions = [(tensor, version_of(tensor)) for tensor in self.tensors]
        numbers = [t for t in self.tensors if contents and not isinstance(t, nn.Parameter)]
        self._contents = [(t, t.detach().clone()) for t in numbers]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore every object to its snapshot at the end of this context."""
        try:
            yield
        finally:
            self.restore()

    def modified(self) -> Iterator[tuple[Any, ObjectState, ObjectState]]:
        """Yield each object whose state differs from its snapshot, with the snapshot and the current state."""
        for obj, before in self._states:
            now = state_of(obj)
            if not now.is_same(before):
                yield obj, before, now

    def restore(self, now: Objects | None = None) -> None:
        """Restore every object to its snapshot.

        Args:
            now: snapshot of the current state, made with ``like`` this one, which saves comparisons.
        """
        for obj, before, _ in self.modified():
            put_state(obj, before)
        for tensor, copy in self._contents:
            if not tensor.is_meta and not same_contents(tensor, copy.to(tensor.device)):  # it may have moved meanwhile
                tensor.detach().copy_(copy)
        found = {} if now is None else now._kept()
        for obj, copy in self._opaque:
            is_same = found[id(obj)] is copy if id(obj) in found else opaque_contents.is_same(obj, copy)
            if not is_same:
                opaque_contents.put(obj, copy)

    def _kept(self) -> dict[int, Any]:
        """Return the kept contents of arrays, generators or iterators by id."""
        return {id(obj): copy for obj, copy in self._opaque}

    def changed(self) -> list[Any]:
        """Return the objects and tensors that have been changed since the snapshot."""
        found = [obj for obj, _, _ in self.modified()]
        found += [obj for obj, copy in self._opaque if not opaque_contents.is_same(obj, copy)]
        return found + [tensor for tensor, version in self._versions if version_of(tensor) != version]

    def differences(self) -> list[tuple[Any, frozenset[Any] | None]]:
        """Return the changed objects and their changed attributes and dict items; None where these are not known."""
        found: list[tuple[Any, frozenset[Any] | None]] = []
        for obj, before, now in self.modified():
            names = _differing(now.attributes, before.attributes)
            if not same_items(now.items, before.items):
                keys = _differing(now.items, before.items) if isinstance(now.items, dict) else frozenset()
                found.append((obj, names | keys if keys else None))
            else:
                found.append((obj, names))
        return found + [(obj, None) for obj, copy in self._opaque if not opaque_contents.is_same(obj, copy)]

    def follow(self, changed: Iterable[Any]) -> None:
        """Replace the snapshots of some objects by their current states."""
        ids = set(map(id, changed))
        self._states = [(obj, state_of(obj) if id(obj) in ids else state) for obj, state in self._states]
        self._opaque = [(o, opaque_contents.contents(o) if id(o) in ids else copy) for o, copy in self._opaque]

    def adopt(self, others: Objects, known: Objects) -> None:
        """Add the objects of ``others`` that are neither here nor in ``known``, because they were made since."""
        here = {id(obj) for objects in (self, known) for obj, _ in (*objects._states, *objects._opaque)}
        self._states += [(obj, state) for obj, state in others._states if id(obj) not in here]
        self._opaque += [(obj, copy) for obj, copy in others._opaque if id(obj) not in here]

    def reach(self, others: Collection[int]) -> bool:
        """Return whether an object or tensor with one of these ids is among the reached ones."""
        found = (*(obj for obj, _ in self._states), *(obj for obj, _ in self._opaque), *self.tensors)
        return any(id(obj) in others for obj in found)

    @property
    def opaque(self) -> list[Any]:
        """The arrays, generators or iterators whose contents are kept, in the order in which they are reached."""
        return [obj for obj, _ in self._opaque]

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Return pairs of each object and the items in its snapshot; None for objects without items."""
        return ((obj, state.items) for obj, state in self._states)

    def among(self, chosen: Collection[int]) -> Objects:
        """Return the objects with these ids and their snapshots, without tensors."""
        objects = Objects(())
        objects._states = [(obj, state) for obj, state in self._states if id(obj) in chosen]
        objects._opaque = [(obj, copy) for obj, copy in self._opaque if id(obj) in chosen]
        return objects

    def replace_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor in the objects by ``fn(tensor)``."""
        for obj, state in self._states:
            new = state.mapped(fn)
            if not state.is_same(new):
                put_state(obj, new)


def assign(obj: Any, other: Any) -> bool:
    """Set an object to the state of another one of its type; return whether this is possible."""
    if type(obj) is not type(other) or type(obj) in ATOMS | _FIXED or not is_open(type(obj)):
        return False
    if opaque_contents.is_opaque(obj):
        return False
    put_state(obj, state_of(other))
    return True


def led_to(roots: Iterable[Any], most: int) -> list[Any]:
    """Return all objects that are reached, such as functions and objects with attributes.

    Args:
        roots: objects to begin with.
        most: largest number of items of a container that is entered; a longer one is considered data.
    """
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        obj = waiting.pop()
        cls: Any = type(obj)
        if cls in ATOMS or id(obj) in seen or not is_open(cls):
            continue
        seen[id(obj)] = obj
        if not isinstance(obj, (*ITEMS, tuple, frozenset)) or 0 < len(obj) <= most:
            waiting.extend(state_of(obj).children())
    return list(seen.values())


@weakly_cached
def is_open(cls: type) -> bool:
    """Return whether objects of a type are entered."""
    if issubclass(cls, (Tensor, nn.Module, type, types.ModuleType, *opaque_contents.GENERATORS)):
        return False
    if cls in (types.FunctionType, types.MethodType, types.CellType, Variable):
        return True
    for base in cls.__mro__[:-1]:
        name, root = f"{base.__module__}.{base.__qualname__}", base.__module__.partition(".")[0]
        if any(f"{name}.".startswith(f"{o}.") for o in _OPEN):
            continue
        if root in sys.stdlib_module_names or any(name.startswith(f"{closed}.") for closed in _CLOSED):
            return False
    return True


_KINDS = {"generators": opaque_contents.is_generator, "iterators": opaque_contents.is_iterator}
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
# Types whose references to other objects never change.
_FIXED = frozenset((tuple, frozenset, types.FunctionType, types.MethodType, functools.partial))


def _differing(one: dict[Any, Any], other: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(k for k in {**one, **other} if k not in one or k not in other or one[k] is not other[k])

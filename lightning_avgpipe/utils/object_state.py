"""Read and restore the state of one Python object of any type: its items and attributes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.utils import opaque as opaque_contents
from lightning_avgpipe.utils.tree import dict_type
from lightning_avgpipe.utils.weak_cache import weakly_cached

ITEMS = (list, dict, set, deque)
_OF_GENERATOR: dict[str, Any] = {}  # marks the state of a generator of random numbers, whose items are its contents
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class Variable:
    """A variable that is treated as an object: a global variable, a class attribute, or a variable of a closure.

    Args:
        owner: the dict of a Python module, a class, or the cell of an enclosed variable.
        name: name of the variable.
    """

    def __init__(self, owner: dict[str, Any] | type | types.CellType, name: str) -> None:
        self._owner = owner
        self._name = name if not isinstance(owner, types.CellType) else "cell_contents"

    def state(self) -> dict[str, Any]:
        """Return a dict with the value of the variable, which is empty if it is not assigned."""
        owner, name = self._owner, self._name
        if isinstance(owner, types.CellType):
            with contextlib.suppress(ValueError):  # not assigned yet
                return {"value": owner.cell_contents}
            return {}
        held = owner if isinstance(owner, dict) else vars(owner)
        return {"value": held[name]} if name in held else {}

    def put(self, state: dict[str, Any]) -> None:
        """Set the variable to the value in a state, or delete it if the state is empty."""
        owner, name = self._owner, self._name
        if state and isinstance(owner, dict):
            owner[name] = state["value"]
        elif state:
            setattr(owner, name, state["value"])
        elif isinstance(owner, dict):
            owner.pop(name, None)
        elif self.state():
            delattr(owner, name)


class ObjectState(NamedTuple):
    """The state of an object: its items (None if it has none), and its attributes."""

    items: Any
    attributes: dict[str, Any]

    def children(self) -> list[Any]:
        if self.items is None or self.attributes is _OF_GENERATOR:
            return list(self.attributes.values())
        return [*(self.items.values() if type(self.items) is dict else self.items), *self.attributes.values()]

    def is_same(self, other: ObjectState) -> bool:
        if self.attributes is _OF_GENERATOR:
            return bool(self.items == other.items)
        if self.items is not other.items and not same_items(self.items, other.items):
            return False
        return (not self.attributes and not other.attributes) or same_items(self.attributes, other.attributes)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> ObjectState:
        """Return the state with ``fn(tensor)`` in place of every tensor, also in tuples."""
        return ObjectState(_mapped(fn, self.items), _mapped(fn, self.attributes))


def state_of(obj: Any) -> ObjectState:
    """Return the current state of an object."""
    cls: Any = type(obj)
    return _reader(cls)(obj)


@weakly_cached
def _reader(cls: Any) -> Callable[[Any], ObjectState]:
    """Return the function that reads the states of objects of a type; cached, since each micro-batch uses it."""
    for known, reader in _READERS.items():
        if cls is known:
            return reader
    if issubclass(cls, nn.Module):
        return lambda obj: ObjectState(
            None, {name: held for name, held in vars(obj).items() if name not in OF_EVERY_MODULE}
        )
    if issubclass(cls, functools.partial):
        return lambda obj: ObjectState((obj.func, *obj.args, *obj.keywords.values()), {})
    if issubclass(cls, opaque_contents.GENERATORS):
        return lambda obj: ObjectState(opaque_contents.contents(obj), _OF_GENERATOR)
    items = _items_reader(cls)
    slots = _slots(cls)
    if not slots and cls.__dictoffset__ == 0:  # a list, a dict, ...
        return lambda obj: ObjectState(items(obj), {})

    def read(obj: Any) -> ObjectState:
        held = {}
        for name in slots:
            with contextlib.suppress(AttributeError):  # not set; the class may watch reads
                held[name] = object.__getattribute__(obj, name)
        own = getattr(obj, "__dict__", None)
        return ObjectState(items(obj), held | own if type(own) is dict and own is not obj else held)

    return read


def _items_reader(cls: type) -> Callable[[Any], Any]:
    """Return the function that reads the items of objects of a type; it returns None if they have none."""
    if issubclass(cls, dict):
        read = dict_type(cls).items
        return lambda obj: dict(read(obj))
    for kind, copy in ((set, set), (ITEMS, list), ((tuple, frozenset), tuple)):
        if issubclass(cls, kind):
            return copy
    return lambda obj: None


def _cell_state(obj: types.CellType) -> ObjectState:
    try:
        return ObjectState(None, {"cell_contents": obj.cell_contents})
    except ValueError:  # not assigned yet
        return ObjectState(None, {})


_READERS: dict[type, Callable[[Any], ObjectState]] = {
    Variable: lambda obj: ObjectState(None, obj.state()),
    types.CellType: _cell_state,
    types.MethodType: lambda obj: ObjectState((obj.__self__, obj.__func__), {}),
    types.FunctionType: lambda obj: ObjectState(
        (*(obj.__closure__ or ()), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()), {}
    ),
}


def _put_items(obj: Any, items: Any) -> None:
    """Replace the items of a container."""
    if isinstance(obj, dict):
        kind = dict_type(type(obj))
        kind.clear(obj)
        for key, item in items.items():
            kind.__setitem__(obj, key, item)
    elif isinstance(obj, list):
        list.__setitem__(obj, slice(None), items)
    elif isinstance(obj, deque):
        deque.clear(obj)
        deque.extend(obj, items)
    elif isinstance(obj, set):
        set.clear(obj)
        set.update(obj, items)


def put_state(obj: Any, state: ObjectState) -> None:
    """Set an object to a state."""
    cls: Any = type(obj)
    if opaque_contents.is_generator(obj):
        opaque_contents.put(obj, state.items)
        return
    if cls is Variable:
        obj.put(state.attributes)
        return
    if cls is types.CellType:
        if state.attributes:
            obj.cell_contents = state.attributes["cell_contents"]
        else:
            del obj.cell_contents
        return
    if isinstance(obj, nn.Module):
        for name in vars(obj).keys() - state.attributes.keys() - OF_EVERY_MODULE:
            del vars(obj)[name]
        vars(obj).update(state.attributes)
        return
    _put_items(obj, state.items)
    own, slots = getattr(obj, "__dict__", None), _slots(cls)
    if type(own) is dict and own is not obj:
        own.clear()
        own.update((name, value) for name, value in state.attributes.items() if name not in slots)
    for name in slots:
        if name in state.attributes:
            object.__setattr__(obj, name, state.attributes[name])
        elif hasattr(obj, name):
            object.__delattr__(obj, name)


def _mapped(fn: Callable[[Tensor], Tensor], items: Any) -> Any:
    if items is None:
        return None
    if isinstance(items, dict):
        return {key: _with_mapped(fn, item) for key, item in items.items()}
    return type(items)(_with_mapped(fn, item) for item in items)


def _with_mapped(fn: Callable[[Tensor], Tensor], item: Any) -> Any:
    if isinstance(item, Tensor):
        return fn(item)
    if not isinstance(item, tuple):
        return item
    new = tuple(_with_mapped(fn, part) for part in item)
    if all(a is b for a, b in zip(item, new, strict=True)):
        return item
    return type(item)._make(new) if hasattr(item, "_make") else new


def same_items(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if one is None or other is None:
        return one is other
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    # ``is`` for each pair, without a loop in Python
    if isinstance(one, dict):
        return all(map(operator.is_, one, other)) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))


@weakly_cached
def _slots(cls: type) -> frozenset[str]:
    # Members of a type written in C may be read-only, and give a new object at each access (numpy's dtype).
    bases = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    members = {n for base in bases for n, m in base.items() if isinstance(m, types.MemberDescriptorType)}
    # a subclass may have replaced a member, for instance by a property
    members = {n for n in members if isinstance(inspect.getattr_static(cls, n), types.MemberDescriptorType)}
    return frozenset(members) if cls.__module__.partition(".")[0] not in sys.stdlib_module_names else frozenset()

"""The state of one object: its items and attributes, read and put back whatever kind of object it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.utils import opaque as opaque_contents

ITEMS = (list, dict, set, deque)
_OF_GENERATOR: dict[str, Any] = {}  # the attributes of one, whose items are its contents
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class Variable:
    """A variable outside of objects, as one: a global one, an attribute of a class, or one that functions enclose.

    Args:
        owner: the variables of a Python module, a class, or the cell of an enclosed variable.
        name: of the variable.
    """

    def __init__(self, owner: dict[str, Any] | type | types.CellType, name: str) -> None:
        self._owner = owner
        self._name = name if not isinstance(owner, types.CellType) else "cell_contents"

    def state(self) -> dict[str, Any]:
        """What it stands for, if anything."""
        owner, name = self._owner, self._name
        if isinstance(owner, types.CellType):
            with contextlib.suppress(ValueError):  # not assigned yet
                return {"value": owner.cell_contents}
            return {}
        held = owner if isinstance(owner, dict) else vars(owner)
        return {"value": held[name]} if name in held else {}

    def put(self, state: dict[str, Any]) -> None:
        """Let it stand for that."""
        owner, name = self._owner, self._name
        if state and isinstance(owner, dict):
            owner[name] = state["value"]
        elif state:
            setattr(owner, name, state["value"])
        elif isinstance(owner, dict):
            owner.pop(name, None)
        elif self.state():
            delattr(owner, name)


class State(NamedTuple):
    """What an object holds: its items (None if it has none), and its attributes."""

    items: Any
    attributes: dict[str, Any]

    def children(self) -> list[Any]:
        if self.items is None or self.attributes is _OF_GENERATOR:
            return list(self.attributes.values())
        return [*(self.items.values() if type(self.items) is dict else self.items), *self.attributes.values()]

    def is_same(self, other: State) -> bool:
        if self.attributes is _OF_GENERATOR:
            return bool(self.items == other.items)
        if self.items is not other.items and not same_items(self.items, other.items):
            return False
        return (not self.attributes and not other.attributes) or same_items(self.attributes, other.attributes)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> State:
        """The same with ``fn(tensor)`` in the place of every tensor, also in tuples."""
        return State(_mapped(fn, self.items), _mapped(fn, self.attributes))


def state_of(obj: Any) -> State:
    """What an object holds now."""
    cls: Any = type(obj)
    return _reader(cls)(obj)


@functools.cache
def _reader(cls: Any) -> Callable[[Any], State]:
    """What reads the states of objects of a type: found once, since a step's objects are read with each micro-batch."""
    for known, reader in _READERS.items():
        if cls is known:
            return reader
    if issubclass(cls, nn.Module):
        return lambda obj: State(None, {name: held for name, held in vars(obj).items() if name not in OF_EVERY_MODULE})
    if issubclass(cls, functools.partial):
        return lambda obj: State((obj.func, *obj.args, *obj.keywords.values()), {})
    if issubclass(cls, opaque_contents.GENERATORS):
        return lambda obj: State(opaque_contents.contents(obj), _OF_GENERATOR)
    items = _items_reader(cls)
    slots = _slots(cls)
    if not slots and cls.__dictoffset__ == 0:  # a list, a dict, ...
        return lambda obj: State(items(obj), {})

    def read(obj: Any) -> State:
        held = {}
        for name in slots:
            with contextlib.suppress(AttributeError):  # not set; its class may watch who reads it
                held[name] = object.__getattribute__(obj, name)
        own = getattr(obj, "__dict__", None)
        return State(items(obj), held | own if type(own) is dict and own is not obj else held)

    return read


def _items_reader(cls: type) -> Callable[[Any], Any]:
    """What reads the items of objects of a type; it reads None if they have none."""
    if issubclass(cls, dict):
        read = _dict_type(cls).items
        return lambda obj: dict(read(obj))
    for kind, copy in ((set, set), (ITEMS, list), ((tuple, frozenset), tuple)):
        if issubclass(cls, kind):
            return copy
    return lambda obj: None


def _cell_state(obj: types.CellType) -> State:
    try:
        return State(None, {"cell_contents": obj.cell_contents})
    except ValueError:  # not assigned yet
        return State(None, {})


_READERS: dict[type, Callable[[Any], State]] = {
    Variable: lambda obj: State(None, obj.state()),
    types.CellType: _cell_state,
    types.MethodType: lambda obj: State((obj.__self__, obj.__func__), {}),
    types.FunctionType: lambda obj: State(
        (*(obj.__closure__ or ()), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()), {}
    ),
}


def _put_items(obj: Any, items: Any) -> None:
    """Let a container hold these."""
    if isinstance(obj, dict):
        kind = _dict_type(type(obj))
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


def put_state(obj: Any, state: State) -> None:
    """Let an object hold that."""
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
    """Whether two containers hold the same objects."""
    if one is None or other is None:
        return one is other
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    # ``is`` for each pair, without a step of Python for each
    if isinstance(one, dict):
        return all(map(operator.is_, one, other)) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))


def _dict_type(cls: type) -> type[dict[Any, Any]]:
    # An OrderedDict keeps an order of its own, which dict's methods do not see.
    return OrderedDict if issubclass(cls, OrderedDict) else dict


@functools.cache
def _slots(cls: type) -> frozenset[str]:
    # What a type written in C calls members may be for reading only, and a new object each time (numpy's dtype).
    bases = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    members = {n for base in bases for n, m in base.items() if isinstance(m, types.MemberDescriptorType)}
    # a subclass may have put something else in the place of one, such as a property
    members = {n for n in members if isinstance(inspect.getattr_static(cls, n), types.MemberDescriptorType)}
    return frozenset(members) if cls.__module__.partition(".")[0] not in sys.stdlib_module_names else frozenset()

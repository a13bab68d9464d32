"""Read, compare and restore the state of one Python object of any kind.

=====================  ==============================  ========================================================
kind                   state                           restored by
=====================  ==============================  ========================================================
container, object      items and attributes            replacing items and attributes in place
variable, buffers      its value, or values            assignment in the namespace, class, cell or module
module, class          attributes, no registries       assignment
tuple, partial         the objects that it refers to   nothing: these references never change
function               its closure and attributes      replacing its attributes in place
array, generator       a copy of its contents          copying the contents back; an array has no other state
bytearray, C data      a copy of its contents          copying the contents back
iterator               its position                    nothing: an iterator cannot be put back
=====================  ==============================  ========================================================
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import functools
import inspect
import itertools
import operator
import pickle
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_avgpipe.utils.device import all_generators
from lightning_avgpipe.utils.tree import dict_type
from lightning_avgpipe.utils.weak_cache import weakly_cached

ITEMS = (list, dict, set, deque)
_COPIES: dict[Any, Any] = {list: list, set: set, deque: list, tuple: tuple, frozenset: tuple}  # how items are copied
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
BYTES: tuple[Any, ...] = (bytearray, array.array, ctypes.Array.__mro__[1])  # the last is the base of all ctypes data
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
BASE_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
# The registries of hooks that a module's forward and backward call.
CALLED_HOOKS = sorted(name for name in BASE_MODULE_ATTRIBUTES if "ward_" in name and "hooks" in name)

# Ids of the global generators of Python and NumPy.
_COMMON = frozenset(map(id, (random._inst, np.random.mtrand._rand, np.random.mtrand._rand._bit_generator)))  # type: ignore[attr-defined]
_TUPLES = (tuple, torch.Size)
_LARGEST = 2**26  # bytes; a larger array is taken for data that no step changes
_CONTENTS: dict[str, Any] = {}  # as attributes, marks a state whose items are a copy of the contents


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
            return _read_cell(owner).attributes
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


class Buffers:
    """The registered buffers of a module, treated as an object. Buffers that are registered later are kept."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state(self) -> dict[str, Any]:
        """Return the buffers by name."""
        return dict(self._module._buffers.items())  # TorchScript's are no dict

    def put(self, state: dict[str, Any]) -> None:
        """Register the buffers of a state."""
        for name, buffer in state.items():
            self._module._buffers[name] = buffer


class ObjectState(NamedTuple):
    """The state of an object: its items (None if it has none) and its attributes; or a copy of its contents."""

    items: Any
    attributes: dict[str, Any]

    @classmethod
    def of_contents(cls, obj: Any) -> ObjectState:
        """Return a copy of the contents of an array or a random generator, or the position of an iterator."""
        return cls(_opaque_kind(type(obj)).copy(obj), _CONTENTS)

    @property
    def is_contents(self) -> bool:
        """Whether this is a copy of an object's contents."""
        return self.attributes is _CONTENTS

    def children(self) -> list[Any]:
        """Return the objects that items and attributes refer to."""
        if self.items is None or self.is_contents:
            return list(self.attributes.values())
        return [*(self.items.values() if type(self.items) is dict else self.items), *self.attributes.values()]

    def is_same(self, other: ObjectState) -> bool:
        """Return whether items and attributes are the same objects, or the contents are equal."""
        if self.is_contents:
            return bool(self.items == other.items)
        if self.items is not other.items and not same_items(self.items, other.items):
            return False
        return (not self.attributes and not other.attributes) or same_items(self.attributes, other.attributes)

    def is_of(self, obj: Any) -> bool:
        """Return whether this is the current state of an object; arrays are compared without a copy."""
        if not self.is_contents:
            return state_of(obj).is_same(self)
        if isinstance(obj, np.ndarray):
            return obj.shape == self.items.shape and np.array_equal(_words(obj), _words(self.items))
        if isinstance(obj, BYTES):
            return bytes(obj) == bytes(self.items)  # NaN differs from itself
        return bool(_opaque_kind(type(obj)).copy(obj) == self.items)

    def now(self, obj: Any) -> ObjectState:
        """Return the current state of an object whose earlier state this is."""
        return ObjectState.of_contents(obj) if self.is_contents else state_of(obj)

    def changed_names(self, other: ObjectState) -> frozenset[Any] | None:
        """Return the names of attributes and the dict keys that differ from another state; None if they are unknown."""
        if self.is_contents:
            return None
        names = _differing(self.attributes, other.attributes)
        if same_items(self.items, other.items):
            return names
        keys = _differing(self.items, other.items) if isinstance(self.items, dict) else frozenset()
        return names | keys if keys else None

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> ObjectState:
        """Return the state with ``fn(tensor)`` in place of every tensor, also in tuples."""
        if self.is_contents:
            return self
        return ObjectState(_mapped(fn, self.items), _mapped(fn, self.attributes))


def state_of(obj: Any) -> ObjectState:
    """Return the current state of an object."""
    return _kind(type(obj)).read(obj)


def set_state(obj: Any, state: ObjectState) -> None:
    """Set an object to a state."""
    put = _put_contents if state.is_contents else _kind(type(obj)).put
    put(obj, state)


# -- kinds -----------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Functions that read and put the state of objects of one kind."""

    read: Callable[[Any], ObjectState]
    put: Callable[[Any, ObjectState], None]


def _put_nothing(obj: Any, state: Any) -> None:
    """Do nothing: what the object refers to cannot change, or cannot be restored."""


def _put_contents(obj: Any, state: ObjectState) -> None:
    _opaque_kind(type(obj)).put(obj, state.items)


def _read_cell(obj: types.CellType) -> ObjectState:
    try:
        return ObjectState(None, {"value": obj.cell_contents})
    except ValueError:  # not assigned yet
        return ObjectState(None, {})


def _read_context_variable(obj: contextvars.ContextVar[Any]) -> ObjectState:
    try:
        return ObjectState(None, {"value": obj.get()})
    except LookupError:  # neither set nor given a default
        return ObjectState(None, {})


def _put_context_variable(obj: contextvars.ContextVar[Any], state: ObjectState) -> None:
    if state.attributes:  # a context variable cannot be unset
        obj.set(state.attributes["value"])


def _read_function(obj: types.FunctionType) -> ObjectState:
    items = *(obj.__closure__ or ()), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()
    return ObjectState(items, {name: held for name, held in vars(obj).items() if not name.startswith("__")})


def _put_function(obj: types.FunctionType, state: ObjectState) -> None:
    # names with underscores are Python's, or torch's, which caches things in them at the first call
    _put_attributes(obj, state, {name for name in vars(obj) if name.startswith("__")})


def _put_attributes(obj: Any, state: ObjectState, others: Set[str]) -> None:
    """Set the attributes of an object to those of a state, except ``others``, which are no part of the state."""
    for name in vars(obj).keys() - state.attributes.keys() - others:
        del vars(obj)[name]
    vars(obj).update(state.attributes)


def _of_class(cls: type) -> dict[str, Any]:
    return {name: held for name, held in vars(cls).items() if not (name.startswith("__") or hasattr(held, "__get__"))}


def _put_class(cls: type, state: ObjectState) -> None:
    now = _of_class(cls)
    for name in now.keys() - state.attributes.keys():
        delattr(cls, name)
    for name, held in state.attributes.items():
        if now.get(name) is not held:
            setattr(cls, name, held)


_AS_OBJECT = _Kind(lambda obj: ObjectState(None, obj.state()), lambda obj, state: obj.put(state.attributes))
_EXACT: dict[type, _Kind] = {
    Variable: _AS_OBJECT,
    Buffers: _AS_OBJECT,
    types.CellType: _Kind(_read_cell, lambda obj, state: Variable(obj, "").put(state.attributes)),
    contextvars.ContextVar: _Kind(_read_context_variable, _put_context_variable),
    types.MethodType: _Kind(lambda obj: ObjectState((obj.__self__, obj.__func__), {}), _put_nothing),
    types.FunctionType: _Kind(_read_function, _put_function),
}
_BY_BASE: tuple[tuple[Any, _Kind], ...] = (
    (nn.Module, _Kind(
        lambda obj: ObjectState(None, {n: held for n, held in vars(obj).items() if n not in BASE_MODULE_ATTRIBUTES}),
        lambda obj, state: _put_attributes(obj, state, BASE_MODULE_ATTRIBUTES),
    )),
    (type, _Kind(lambda obj: ObjectState(None, _of_class(obj)), _put_class)),
    (functools.partial, _Kind(
        lambda obj: ObjectState((obj.func, *obj.args, *obj.keywords.values()), {}), _put_nothing,
    )),
    (GENERATORS, _Kind(ObjectState.of_contents, _put_contents)),
)  # fmt: skip
# Types whose references to other objects never change; functions may still get other attributes.
FIXED = frozenset((tuple, frozenset, types.FunctionType, types.MethodType, functools.partial))


@weakly_cached
def _kind(cls: Any) -> _Kind:
    """Return the kind of a type; cached, since every micro-batch needs it."""
    if cls in _EXACT:
        return _EXACT[cls]
    return next((kind for base, kind in _BY_BASE if issubclass(cls, base)), None) or _kind_of_objects(cls)


def _kind_of_objects(cls: type) -> _Kind:
    """Return the kind of a type of containers, or of objects with attributes."""
    items, slots = _items_reader(cls), _slots(cls)

    def read(obj: Any) -> ObjectState:
        held = {}
        for name in slots:
            with contextlib.suppress(AttributeError):  # not set; a __getattribute__ of the class must not see this read
                held[name] = object.__getattribute__(obj, name)
        own = getattr(obj, "__dict__", None)
        return ObjectState(items(obj), held | own if type(own) is dict and own is not obj else held)

    def put(obj: Any, state: ObjectState) -> None:
        _put_items(obj, state.items)
        own = getattr(obj, "__dict__", None)
        if type(own) is dict and own is not obj:
            own.clear()
            own.update((name, value) for name, value in state.attributes.items() if name not in slots)
        for name in slots:
            if name in state.attributes:
                object.__setattr__(obj, name, state.attributes[name])
            elif hasattr(obj, name):
                object.__delattr__(obj, name)

    # a list, a dict, ...; a threading.local has attributes although its type does not show it
    if not slots and cls.__dictoffset__ == 0 and not issubclass(cls, threading.local):
        return _Kind(lambda obj: ObjectState(items(obj), {}), put)
    return _Kind(read, put)


def _items_reader(cls: type) -> Callable[[Any], Any]:
    """Return the function that reads the items of objects of a type; it returns None if they have none."""
    if issubclass(cls, dict):
        read = dict_type(cls).items
        return lambda obj: dict(read(obj))
    for kind, copy in _COPIES.items():
        if issubclass(cls, kind):
            return lambda obj: copy(kind.__iter__(obj))  # the class may override __iter__ with a method that raises
    return lambda obj: None


def num_items(obj: Any) -> int | None:
    """Return the number of items of a container, ignoring a ``__len__`` of its class; None for other objects."""
    kind = next((kind for kind in (dict, *_COPIES) if issubclass(type(obj), kind)), None)  # isinstance trusts proxies
    return None if kind is None else kind.__len__(obj)


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


def _slots(cls: type) -> frozenset[str]:
    # Only classes with __slots__: members of C types may be read-only, or give a new object each time (numpy's dtype).
    bases = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    members = {n for base in bases for n, m in base.items() if isinstance(m, types.MemberDescriptorType)}
    # a subclass may have replaced a slot, for instance by a property
    members = {n for n in members if isinstance(inspect.getattr_static(cls, n), types.MemberDescriptorType)}
    return frozenset(members) if cls.__module__.partition(".")[0] not in sys.stdlib_module_names else frozenset()


def same_items(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if one is None or other is None:
        return one is other
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    # map compares each pair by ``is`` without a loop in Python
    if isinstance(one, dict):
        return all(map(operator.is_, one, other)) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))


def _differing(one: dict[Any, Any], other: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(k for k in {**one, **other} if k not in one or k not in other or one[k] is not other[k])


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


# -- contents: arrays, generators of random numbers, iterators -------------------------------------------------------


def is_constant(obj: Any) -> bool:
    """Return whether an object can never change: a number, a string, bytes, None, or a tuple of these."""
    return type(obj) in ATOMS or (type(obj) in _TUPLES and ATOMS.issuperset(map(type, obj)))


def is_restorable(obj: Any) -> bool:
    """Return whether an object is a random generator, or a writable array that is neither large nor memory-mapped."""
    if isinstance(obj, np.ndarray):
        return obj.flags.writeable and not isinstance(obj, np.memmap) and obj.nbytes <= _LARGEST
    if isinstance(obj, BYTES):
        return memoryview(obj).nbytes <= _LARGEST
    return is_generator(obj)


def is_generator(obj: Any) -> bool:
    """Return whether an object is a random generator of torch, NumPy or Python, other than their global generators.

    The global ones, such as those of ``np.random.rand`` and ``random.random``, give all stages the same numbers. User
    objects may hold them; a distribution of SciPy holds NumPy's, for example.
    """
    return isinstance(obj, GENERATORS) and id(obj) not in _COMMON and not any(obj is one for one in all_generators())


def is_iterator(obj: Any) -> bool:
    """Return whether an object is an iterator whose position cannot be restored.

    An iterator whose class is written in Python is not: its position is in its attributes, which can be restored.
    """
    cls = type(obj)
    if not hasattr(cls, "__next__"):
        return False
    return cls.__module__ in ("builtins", "itertools") or _num_yielded(obj) is not None


def _words(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of an array as integers: a view, or a copy of an array that is not contiguous or has objects."""
    if type(values) is np.ndarray and values.flags.c_contiguous and not values.dtype.hasobject:
        flat = values.reshape(-1).view(np.uint8)
    else:
        flat = np.frombuffer(values.tobytes(), np.uint8)
    return flat if flat.size % 8 else flat.view(np.uint64)  # comparing eight bytes takes no longer than one


def _progress(obj: Any, depth: int = 9) -> Any:
    """Return the position of an iterator as an object that can be compared, without advancing the iterator."""
    if isinstance(obj, types.GeneratorType):
        frame = obj.gi_frame
        return None if frame is None else (frame.f_lasti, {k: _comparable(v, depth) for k, v in frame.f_locals.items()})
    if isinstance(obj, itertools.count):
        return repr(obj)
    if _num_yielded(obj) is not None:
        return _num_yielded(obj)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = obj.__reduce__()
    except TypeError:  # the iterator does not show its position
        return None
    return _comparable(parts, depth)


def _comparable(part: Any, depth: int) -> Any:
    """Return a part of an iterator's position as an object that can be compared."""
    if isinstance(part, (type(None), bool, int, float, str, bytes, range)):
        return part
    if depth and type(part) in (tuple, list):  # they may be new at each call, so their ids differ
        return [_comparable(inner, depth - 1) for inner in part]
    return _progress(part, depth - 1) if depth and is_iterator(part) else id(part)


def _num_yielded(obj: Any) -> int | None:
    """Return the number of batches that an iterator of a DataLoader has yielded; None for other objects."""
    found = getattr(obj, "_num_yielded", None) if isinstance(obj, _BaseDataLoaderIter) else None
    return found if isinstance(found, int) else None


class _OpaqueKind(NamedTuple):
    """Functions that copy the contents of objects of one kind, and put a copy back."""

    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def _bits(obj: Any) -> Any:
    return obj.bit_generator if isinstance(obj, np.random.Generator) else obj


def _put_bits(obj: Any, copy: Any) -> None:
    _bits(obj).state = pickle.loads(copy)


_OPAQUE: tuple[tuple[Any, _OpaqueKind], ...] = (
    (np.ndarray, _OpaqueKind(lambda obj: obj.copy(), lambda obj, copy: operator.setitem(obj, ..., copy))),
    ((bytearray, array.array), _OpaqueKind(
        lambda obj: obj[:], lambda obj, copy: operator.setitem(obj, slice(None), copy),
    )),
    (BYTES, _OpaqueKind(bytes, lambda obj, copy: ctypes.memmove(ctypes.addressof(obj), copy, len(copy)))),
    (torch.Generator, _OpaqueKind(
        lambda obj: obj.get_state().numpy().tobytes(),
        lambda obj, copy: obj.set_state(torch.frombuffer(bytearray(copy), dtype=torch.uint8)),
    )),
    (random.Random, _OpaqueKind(lambda obj: obj.getstate(), lambda obj, copy: obj.setstate(copy))),
    (np.random.RandomState, _OpaqueKind(
        lambda obj: pickle.dumps(obj.get_state()), lambda obj, copy: obj.set_state(pickle.loads(copy)),
    )),
    (GENERATORS, _OpaqueKind(lambda obj: pickle.dumps(_bits(obj).state), _put_bits)),
    (object, _OpaqueKind(_progress, _put_nothing)),  # iterators
)  # fmt: skip


@weakly_cached
def _opaque_kind(cls: Any) -> _OpaqueKind:
    """Return the kind of a type whose contents are its state; cached, since each micro-batch uses it."""
    return next(kind for base, kind in _OPAQUE if issubclass(cls, base))

"""Objects: what Python objects hold, found through containers, attributes and closures, compared and put back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.utils import opaque as opaque_contents
from lightning_avgpipe.utils.packages import LIGHTNING
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import version_of

# What holds no values of a step, and leads to everything else. Of the standard library, and of Lightning,
# only containers are opened.
_CLOSED = (
    *LIGHTNING, "lightning_avgpipe", "torchmetrics", "torch.optim",
    "torch.utils.data", "torch.distributed", "torch.cuda", "torch._C",
)  # fmt: skip
_OPEN = (
    "builtins", "collections", "types.SimpleNamespace", "functools.partial", "abc", "typing",
    "lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict",
)  # fmt: skip


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


class _State(NamedTuple):
    """What an object holds: its items (None if it has none), and its attributes."""

    items: Any
    attributes: dict[str, Any]

    def children(self) -> list[Any]:
        if self.items is None or self.attributes is _OF_GENERATOR:
            return list(self.attributes.values())
        return [*(self.items.values() if type(self.items) is dict else self.items), *self.attributes.values()]

    def is_same(self, other: _State) -> bool:
        if self.attributes is _OF_GENERATOR:
            return bool(self.items == other.items)
        if self.items is not other.items and not same_items(self.items, other.items):
            return False
        return (not self.attributes and not other.attributes) or same_items(self.attributes, other.attributes)


@dataclass(frozen=True)
class Change:
    """What became of an object.

    Attributes:
        index: of the object among all owners.
        type: its name.
        items: what it holds now; None if that is as it was.
        attributes: those that are new or changed.
        removed: names of those that are gone.
    """

    index: int
    type: str
    items: Any
    attributes: dict[str, Any]
    removed: tuple[str, ...]


class Objects:
    """The mutable objects that are reached from some roots, and what each of them holds now.

    Modules are not entered, nor is what belongs to a Trainer.

    Args:
        roots: where to begin.
        modules: whose attributes are looked at nevertheless.
        contents: whether the numbers in tensors are kept as well, except for parameters.
        opaque: whether what is in arrays and generators of random numbers is kept as well, or in generators only.
        generators: those of random numbers that are owners, by their numbers among all that are reached.

    Attributes:
        tensors: that the objects hold, each once, in the order in which they are reached.
        owners: the objects that can change, in this order, which is the same for objects that are alike.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        contents: bool = False,
        opaque: bool | Literal["generators"] = False,
        generators: Collection[int] = (),
    ) -> None:
        self.tensors: list[Tensor] = []
        self.owners: list[Any] = []
        self._states: list[tuple[Any, _State]] = []
        self._indices: dict[int, int] = {}
        self._opaque: list[tuple[Any, Any]] = []
        opened = {id(module): module for module in modules}
        is_generator = opaque_contents.is_generator
        is_opaque = is_generator if opaque == "generators" else opaque_contents.is_opaque
        seen: set[int] = set()
        numbering = count()
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
                self._opaque.append((obj, opaque_contents.contents(obj)))
            elif is_open(cls) or id(obj) in opened or (is_generator(obj) and next(numbering) in generators):
                state = _state(obj)
                self._states.append((obj, state))
                if cls not in _FIXED:
                    self._indices[id(obj)] = len(self.owners)
                    self.owners.append(obj)
                children = state.children()
                if not ATOMS.issuperset(map(type, children)):  # long lists of numbers are common
                    waiting.extend(children[::-1])
        self._versions = [(tensor, version_of(tensor)) for tensor in self.tensors]
        numbers = [t for t in self.tensors if contents and not isinstance(t, nn.Parameter)]
        self._contents = [(t, t.detach().clone()) for t in numbers]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """After this context every object holds again what it held when it was found."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Put back what every object held."""
        for obj, state in self._states:
            if not state.is_same(_state(obj)):
                _put(obj, state)
        for tensor, copy in self._contents:
            if not tensor.is_meta and not same_contents(tensor, copy.to(tensor.device)):  # it may have moved meanwhile
                tensor.detach().copy_(copy)
        for obj, copy in self._opaque:
            if not opaque_contents.is_same(obj, copy):
                opaque_contents.put(obj, copy)

    def changed(self) -> list[Any]:
        """The objects, and tensors, that have been changed since they were found."""
        found = [obj for obj, before in self._states if not before.is_same(_state(obj))]
        found += [obj for obj, copy in self._opaque if not opaque_contents.is_same(obj, copy)]
        return found + [tensor for tensor, version in self._versions if version_of(tensor) != version]

    def differences(self) -> list[tuple[Any, frozenset[Any] | None]]:
        """The objects that have been changed, and which attributes, or items of dicts; None if that is not known."""
        found: list[tuple[Any, frozenset[Any] | None]] = []
        for obj, before in self._states:
            now = _state(obj)
            if now.is_same(before):
                continue
            names = _differing(now.attributes, before.attributes)
            if not same_items(now.items, before.items):
                keys = _differing(now.items, before.items) if isinstance(now.items, dict) else frozenset()
                found.append((obj, names | keys if keys else None))
            else:
                found.append((obj, names))
        return found + [(obj, None) for obj, copy in self._opaque if not opaque_contents.is_same(obj, copy)]

    def follow(self, changed: Iterable[Any]) -> None:
        """Of these objects keep what they hold now."""
        ids = set(map(id, changed))
        self._states = [(obj, _state(obj) if id(obj) in ids else state) for obj, state in self._states]
        self._opaque = [(o, opaque_contents.contents(o) if id(o) in ids else copy) for o, copy in self._opaque]

    def adopt(self, others: Objects, known: Objects) -> None:
        """Take in those of the others that are neither here nor known: what has been made since."""
        here = {id(obj) for objects in (self, known) for obj, _ in (*objects._states, *objects._opaque)}
        self._states += [(obj, state) for obj, state in others._states if id(obj) not in here]
        self._opaque += [(obj, copy) for obj, copy in others._opaque if id(obj) not in here]

    def keep_changed(self) -> None:
        """Forget the objects that hold what they held, and the contents of tensors."""
        ids = set(map(id, self.changed()))
        self._states = [(obj, state) for obj, state in self._states if id(obj) in ids]
        self._opaque = [(obj, copy) for obj, copy in self._opaque if id(obj) in ids]
        self.tensors, self._versions, self._contents = [], [], []

    def reach(self, others: Collection[int]) -> bool:
        """Whether one of the objects and tensors with these ids is among them."""
        found = (*(obj for obj, _ in self._states), *(obj for obj, _ in self._opaque), *self.tensors)
        return any(id(obj) in others for obj in found)

    @property
    def generators(self) -> list[Any]:
        """Those of random numbers among them, in the order in which they are reached."""
        return [obj for obj, _ in self._opaque if opaque_contents.is_generator(obj)]

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Each object with the items that it held; None for one that has none."""
        return ((obj, state.items) for obj, state in self._states)

    def among(self, chosen: Collection[int]) -> Objects:
        """Those with these ids, as they are now."""
        objects = Objects(())
        objects._states = [(obj, _state(obj)) for obj, _ in self._states if id(obj) in chosen]
        objects._opaque = [(o, opaque_contents.contents(o)) for o, _ in self._opaque if id(o) in chosen]
        return objects

    @staticmethod
    def assign(obj: Any, other: Any) -> bool:
        """Let an object hold what another of its type holds; returns whether it can."""
        if type(obj) is not type(other) or type(obj) in ATOMS | _FIXED or not is_open(type(obj)):
            return False
        if opaque_contents.is_opaque(obj):
            return False
        _put(obj, _state(other))
        return True

    @classmethod
    def only(cls, owner: Any) -> Objects:
        """One object, and not what it holds."""
        objects = cls(())
        objects.owners, objects._indices, objects._states = [owner], {id(owner): 0}, [(owner, _state(owner))]
        return objects

    def index(self, obj: Any) -> int | None:
        """The number of an owner; None if it is none."""
        return self._indices.get(id(obj))

    def changes(self) -> list[Change]:
        """What has become of the objects since they were found."""
        found = []
        for obj, before in self._states:
            now = _state(obj)
            if now.is_same(before):
                continue
            old = before.attributes
            found.append(
                Change(
                    self._indices[id(obj)],
                    type(obj).__qualname__,
                    None if same_items(now.items, before.items) else now.items,
                    {k: v for k, v in now.attributes.items() if k not in old or old[k] is not v},
                    tuple(name for name in old if name not in now.attributes),
                )
            )
        return found

    def apply(self, changes: Iterable[Change]) -> None:
        """Let objects that are like those of which the changes are become what those became.

        Raises:
            LookupError: these are other objects.
        """
        for change in changes:
            obj = self.owners[change.index] if change.index < len(self.owners) else None
            if type(obj).__qualname__ != change.type:
                raise LookupError(f"a {change.type} was expected, a {type(obj).__qualname__} was found")
            now = _state(obj)
            attributes = {k: v for k, v in now.attributes.items() if k not in change.removed} | change.attributes
            _put(obj, _State(now.items if change.items is None else change.items, attributes))

    def replace_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Put ``fn(tensor)`` in the place of every tensor."""
        for obj, state in self._states:
            new = _State(_mapped(fn, state.items), _mapped(fn, state.attributes))
            if not state.is_same(new):
                _put(obj, new)


def led_to(roots: Iterable[Any], most: int) -> list[Any]:
    """The objects with code that are reached: functions, and what has attributes.

    Args:
        roots: where to begin.
        most: items of a container that is looked into; a longer one is data.
    """
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        obj = waiting.pop()
        cls: Any = type(obj)
        if cls in ATOMS or id(obj) in seen or not is_open(cls):
            continue
        seen[id(obj)] = obj
        if not isinstance(obj, (*_ITEMS, tuple, frozenset)) or 0 < len(obj) <= most:
            waiting.extend(_state(obj).children())
    return list(seen.values())


def _opens(cls: type) -> bool:
    """Whether objects of a type are looked into."""
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


is_open: Callable[[type], bool] = functools.cache(_opens)

_OF_GENERATOR: dict[str, Any] = {}  # the attributes of one, whose items are its contents
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_ITEMS = (list, dict, set, deque)
# What holds others for ever.
_FIXED = frozenset((tuple, frozenset, types.FunctionType, types.MethodType, functools.partial))
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _state(obj: Any) -> _State:
    cls: Any = type(obj)
    return _reader(cls)(obj)


@functools.cache
def _reader(cls: Any) -> Callable[[Any], _State]:
    """What reads the states of objects of a type: found once, since a step's objects are read with each micro-batch."""
    for known, reader in _READERS.items():
        if cls is known:
            return reader
    if issubclass(cls, nn.Module):
        return lambda obj: _State(
            None, {name: held for name, held in vars(obj).items() if name not in _OF_EVERY_MODULE}
        )
    if issubclass(cls, functools.partial):
        return lambda obj: _State((obj.func, *obj.args, *obj.keywords.values()), {})
    if issubclass(cls, opaque_contents.GENERATORS):
        return lambda obj: _State(opaque_contents.contents(obj), _OF_GENERATOR)
    items = _items_reader(cls)
    slots = _slots(cls)
    if not slots and cls.__dictoffset__ == 0:  # a list, a dict, ...
        return lambda obj: _State(items(obj), {})

    def read(obj: Any) -> _State:
        held = {}
        for name in slots:
            with contextlib.suppress(AttributeError):  # not set; its class may watch who reads it
                held[name] = object.__getattribute__(obj, name)
        own = getattr(obj, "__dict__", None)
        return _State(items(obj), held | own if type(own) is dict and own is not obj else held)

    return read


def _items_reader(cls: type) -> Callable[[Any], Any]:
    """What reads the items of objects of a type; it reads None if they have none."""
    if issubclass(cls, dict):
        read = _dict_type(cls).items
        return lambda obj: dict(read(obj))
    for kind, copy in ((set, set), (_ITEMS, list), ((tuple, frozenset), tuple)):
        if issubclass(cls, kind):
            return copy
    return lambda obj: None


def _cell_state(obj: types.CellType) -> _State:
    try:
        return _State(None, {"cell_contents": obj.cell_contents})
    except ValueError:  # not assigned yet
        return _State(None, {})


_READERS: dict[type, Callable[[Any], _State]] = {
    Variable: lambda obj: _State(None, obj.state()),
    types.CellType: _cell_state,
    types.MethodType: lambda obj: _State((obj.__self__, obj.__func__), {}),
    types.FunctionType: lambda obj: _State(
        (*(obj.__closure__ or ()), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()), {}
    ),
}


def _put(obj: Any, state: _State) -> None:
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
        for name in vars(obj).keys() - state.attributes.keys() - _OF_EVERY_MODULE:
            del vars(obj)[name]
        vars(obj).update(state.attributes)
        return
    if isinstance(obj, dict):
        kind = _dict_type(cls)
        kind.clear(obj)
        for key, item in state.items.items():
            kind.__setitem__(obj, key, item)
    elif isinstance(obj, list):
        list.__setitem__(obj, slice(None), state.items)
    elif isinstance(obj, deque):
        deque.clear(obj)
        deque.extend(obj, state.items)
    elif isinstance(obj, set):
        set.clear(obj)
        set.update(obj, state.items)
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


def _differing(one: dict[Any, Any], other: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(k for k in {**one, **other} if k not in one or k not in other or one[k] is not other[k])


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

"""Objects: what Python objects hold, found through containers, attributes and closures, compared and put back."""

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
from lightning_avgpipe.utils.object_state import ITEMS, State, Variable, put_state, same_items, state_of
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


class Objects:
    """The mutable objects that are reached from some roots, and what each of them holds now.

    Modules are not entered, nor is what belongs to a Trainer.

    Args:
        roots: where to begin.
        modules: whose attributes are looked at nevertheless.
        contents: whether the numbers in tensors are kept as well, except for parameters.
        opaque: whether what is in arrays and generators of random numbers is kept as well, or in generators only, or
            how far iterators have come only.
        generators: those of random numbers that are owners, by their numbers among all that are reached.

    Attributes:
        tensors: that the objects hold, each once, in the order in which they are reached.
        owners: the objects that can change, in this order, which is the same for objects that are alike.
        indices: their numbers, by id.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        contents: bool = False,
        opaque: bool | Literal["generators", "iterators"] = False,
        generators: Collection[int] = (),
    ) -> None:
        self.tensors: list[Tensor] = []
        self.owners: list[Any] = []
        self.indices: dict[int, int] = {}
        self._states: list[tuple[Any, State]] = []
        self._opaque: list[tuple[Any, Any]] = []
        opened = {id(module): module for module in modules}
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
                self._opaque.append((obj, opaque_contents.contents(obj)))
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
        """After this context every object holds again what it held when it was found."""
        try:
            yield
        finally:
            self.restore()

    def modified(self) -> Iterator[tuple[Any, State, State]]:
        """Each object that holds something else than when it was found: that, and what it holds now."""
        for obj, before in self._states:
            now = state_of(obj)
            if not now.is_same(before):
                yield obj, before, now

    def restore(self) -> None:
        """Put back what every object held."""
        for obj, before, _ in self.modified():
            put_state(obj, before)
        for tensor, copy in self._contents:
            if not tensor.is_meta and not same_contents(tensor, copy.to(tensor.device)):  # it may have moved meanwhile
                tensor.detach().copy_(copy)
        for obj, copy in self._opaque:
            if not opaque_contents.is_same(obj, copy):
                opaque_contents.put(obj, copy)

    def changed(self) -> list[Any]:
        """The objects, and tensors, that have been changed since they were found."""
        found = [obj for obj, _, _ in self.modified()]
        found += [obj for obj, copy in self._opaque if not opaque_contents.is_same(obj, copy)]
        return found + [tensor for tensor, version in self._versions if version_of(tensor) != version]

    def differences(self) -> list[tuple[Any, frozenset[Any] | None]]:
        """The objects that have been changed, and which attributes, or items of dicts; None if that is not known."""
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
        """Of these objects keep what they hold now."""
        ids = set(map(id, changed))
        self._states = [(obj, state_of(obj) if id(obj) in ids else state) for obj, state in self._states]
        self._opaque = [(o, opaque_contents.contents(o) if id(o) in ids else copy) for o, copy in self._opaque]

    def adopt(self, others: Objects, known: Objects) -> None:
        """Take in those of the others that are neither here nor known: what has been made since."""
        here = {id(obj) for objects in (self, known) for obj, _ in (*objects._states, *objects._opaque)}
        self._states += [(obj, state) for obj, state in others._states if id(obj) not in here]
        self._opaque += [(obj, copy) for obj, copy in others._opaque if id(obj) not in here]

    def reach(self, others: Collection[int]) -> bool:
        """Whether one of the objects and tensors with these ids is among them."""
        found = (*(obj for obj, _ in self._states), *(obj for obj, _ in self._opaque), *self.tensors)
        return any(id(obj) in others for obj in found)

    @property
    def opaque(self) -> list[Any]:
        """The arrays, generators or iterators that were asked for, in the order in which they are reached."""
        return [obj for obj, _ in self._opaque]

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Each object with the items that it held; None for one that has none."""
        return ((obj, state.items) for obj, state in self._states)

    def among(self, chosen: Collection[int]) -> Objects:
        """Those with these ids, and what they held; without tensors."""
        objects = Objects(())
        objects._states = [(obj, state) for obj, state in self._states if id(obj) in chosen]
        objects._opaque = [(obj, copy) for obj, copy in self._opaque if id(obj) in chosen]
        return objects

    def replace_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Put ``fn(tensor)`` in the place of every tensor."""
        for obj, state in self._states:
            new = state.mapped(fn)
            if not state.is_same(new):
                put_state(obj, new)


def assign(obj: Any, other: Any) -> bool:
    """Let an object hold what another of its type holds; returns whether it can."""
    if type(obj) is not type(other) or type(obj) in ATOMS | _FIXED or not is_open(type(obj)):
        return False
    if opaque_contents.is_opaque(obj):
        return False
    put_state(obj, state_of(other))
    return True


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
        if not isinstance(obj, (*ITEMS, tuple, frozenset)) or 0 < len(obj) <= most:
            waiting.extend(state_of(obj).children())
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

_KINDS = {"generators": opaque_contents.is_generator, "iterators": opaque_contents.is_iterator}
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
# What holds others for ever.
_FIXED = frozenset((tuple, frozenset, types.FunctionType, types.MethodType, functools.partial))


def _differing(one: dict[Any, Any], other: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(k for k in {**one, **other} if k not in one or k not in other or one[k] is not other[k])

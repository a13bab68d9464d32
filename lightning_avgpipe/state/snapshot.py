"""Walk over all objects that are reachable from some roots, take a snapshot of each, compare it and restore it.

::

    roots       attributes of modules, variables that code refers to, arguments of a call
    walk        root -> items, attributes, closures -> their items, ... ; into modules only on request
    snapshot    (object, its state) of each, and on request copies of tensors' contents
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_avgpipe.state import objects
from lightning_avgpipe.state.objects import (
    ATOMS,
    FIXED,
    GENERATORS,
    Buffers,
    ObjectState,
    Variable,
    num_items,
    set_state,
    state_of,
)
from lightning_avgpipe.utils.lightning import LIGHTNING
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.utils.tensors import is_strided, same_contents
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.utils.weak_cache import weakly_cached

Opaque = bool | Literal["generators", "iterators"]
K = TypeVar("K", bound=Hashable)

# Packages whose objects are not entered: they hold no values of a step, but lead to almost everything else. Of the
# standard library and of Lightning, only the types in _OPEN are entered.
_CLOSED = (
    *LIGHTNING, "lightning_avgpipe", "torchmetrics", "torch.optim",
    "torch.utils.data", "torch.distributed", "torch.cuda", "torch._C",
)  # fmt: skip
_OPEN = (
    "builtins", "collections", "types.SimpleNamespace", "argparse.Namespace", "argparse._AttributeHolder",
    "weakref.WeakKeyDictionary", "weakref.WeakValueDictionary", "_weakrefset.WeakSet", "functools.partial", "abc",
    "typing", "_thread._local",
    "lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict",
)  # fmt: skip
_VALUES = (*(kind for kind in ATOMS if kind is not type(None)), tuple, frozenset)  # and types derived from these
_CHOICES = {"generators": objects.is_generator, "iterators": objects.is_iterator}


class Snapshot:
    """The objects that are reachable from some roots, with the state of each.

    To enter an object means to go on to the objects that it refers to. Modules and objects of Lightning and similar
    libraries, such as a Trainer, are not entered.

    Args:
        roots: objects to begin with.
        entered: further roots, which are entered whatever they are (modules, classes).
        contents: whether the values of tensors are kept as well, except those of parameters.
        opaque: whether the contents of arrays and random generators are kept as well; ``"generators"``: only those of
            random generators; ``"iterators"``: only the positions of iterators.
        generators: random generators to treat as owners, by their indices among all random generators that are reached.
        reuse: earlier snapshot. Its copies of arrays and generators are reused where these have not changed.

    Attributes:
        tensors: tensors that are reached, each once, in the order in which they are reached.
        opaque: arrays, generators or iterators whose contents are kept, in the order in which they are reached.
        owners: other mutable objects that are reached. Structures that are equal have their owners in the same order.
        indices: id of an owner -> its position in ``owners``.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        entered: Iterable[Any] = (),
        contents: bool = False,
        opaque: Opaque = False,
        generators: Collection[int] = (),
        reuse: Snapshot | None = None,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.opaque: list[Any] = []
        self.owners: list[Any] = []
        self.indices: dict[int, int] = {}
        self._states: list[tuple[Any, ObjectState]] = []
        opened = {id(obj): obj for obj in entered}
        kept = {} if reuse is None else reuse._copies()
        is_opaque = _CHOICES.get(str(opaque), objects.is_restorable)
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
                known = kept.get(id(obj))
                state = known if known is not None and known.is_of(obj) else ObjectState.of_contents(obj)
                self._states.append((obj, state))
                self.opaque.append(obj)
            elif is_open(cls) or id(obj) in opened or (objects.is_generator(obj) and next(numbering) in generators):
                state = state_of(obj)
                self._states.append((obj, state))
                if cls not in FIXED or state.attributes:
                    self.indices[id(obj)] = len(self.owners)
                    self.owners.append(obj)
                children = state.children()
                if not ATOMS.issuperset(map(type, children)):  # long lists of numbers are common
                    waiting.extend(children[::-1])
        self._versions = [(tensor, version_of(tensor)) for tensor in self.tensors]
        # a step may have left a placeholder somewhere, which has no contents
        numbers = [t for t in self.tensors if contents and not isinstance(t, (nn.Parameter, Absent))]
        self._contents = [(t, t.detach().clone()) for t in numbers]

    def _copies(self) -> dict[int, ObjectState]:
        """Return the kept contents of arrays, generators and iterators by id."""
        return {id(obj): state for obj, state in self._states if state.is_contents}

    # -- compare ------------------------------------------------------------------------------------------------------

    def modified(self) -> Iterator[tuple[Any, ObjectState, ObjectState]]:
        """Yield ``(object, state in the snapshot, current state)`` for each object whose state has changed."""
        for obj, before in self._states:
            if not before.is_of(obj):
                yield obj, before, before.now(obj)

    def changed(self) -> list[Any]:
        """Return the objects and tensors that have been changed since the snapshot."""
        return [obj for obj, before in self._states if not before.is_of(obj)] + self.written()

    def written(self) -> list[Any]:
        """Return the tensors that have been changed in place since the snapshot."""
        return [tensor for tensor, version in self._versions if version_of(tensor) != version]

    def differences(self) -> list[tuple[Any, frozenset[Any] | None]]:
        """Return the changed objects with the names of changed attributes and dict items; None if these are unknown."""
        return [(obj, now.changed_names(before)) for obj, before, now in self.modified()]

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Return pairs of an object and its items in the snapshot, which are None for an object without items."""
        return ((obj, state.items) for obj, state in self._states)

    def reached(self) -> set[int]:
        """Return the ids of the objects and tensors that are reached."""
        return {id(obj) for obj in (*(obj for obj, _ in self._states), *self.tensors)}

    # -- restore ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore every object to its snapshot at the end of this context."""
        try:
            yield
        finally:
            self.restore()

    def restore(self, now: Snapshot | None = None) -> None:
        """Restore every object to its snapshot.

        Args:
            now: snapshot of the current state that was made with this one as ``reuse``; it saves comparing arrays
                again.
        """
        known = {} if now is None else now._copies()
        for obj, before in self._states:
            if not (known[id(obj)] is before if id(obj) in known else before.is_of(obj)):
                set_state(obj, before)
        for tensor, copy in self._contents:
            _put_contents(tensor, copy)

    # -- change the snapshot itself -----------------------------------------------------------------------------------

    def update(self, changed: Iterable[Any]) -> None:
        """Update the snapshot to the current states of some objects."""
        ids = set(map(id, changed))
        self._states = [(obj, state.now(obj) if id(obj) in ids else state) for obj, state in self._states]

    def add_new(self, others: Snapshot, known: Snapshot) -> None:
        """Add the objects of ``others`` that are neither here nor in ``known``: they were made since."""
        here = {id(obj) for one in (self, known) for obj, _ in one._states}
        self._states += [(obj, state) for obj, state in others._states if id(obj) not in here]

    def drop_unchanged(self) -> None:
        """Drop everything that has not changed; of a module, keep only the attributes that hold another object now.

        Tensors with a ``grad_fn`` are dropped as well, since they would keep the graph alive.
        """
        kept: list[tuple[Any, ObjectState]] = []
        for obj, before, now in self.modified():
            if not isinstance(obj, (nn.Module, Buffers)):
                kept.append((obj, before))
                continue
            for name, held in before.attributes.items() if isinstance(obj, nn.Module) else ():
                if now.attributes.get(name, kept) is not held and getattr(held, "grad_fn", None) is None:
                    kept.append((Variable(vars(obj), name), ObjectState(None, {"value": held})))
        self._states, self._versions, self._contents, self.tensors = kept, [], [], []

    def restricted_to(self, chosen: Collection[int]) -> Snapshot:
        """Return a snapshot of only the objects with these ids, without tensors."""
        found = Snapshot(())
        found._states = [(obj, state) for obj, state in self._states if id(obj) in chosen]
        return found

    def replace_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor in the objects by ``fn(tensor)``."""
        for obj, state in self._states:
            if not state.is_contents and not state.is_same(new := state.mapped(fn)):
                set_state(obj, new)


def keys_leading_to(held: Mapping[K, Any], chosen: Collection[int], opaque: Opaque = True) -> tuple[K, ...]:
    """Return the keys of the values from which an object or tensor with one of these ids is reachable."""
    if not chosen:
        return ()
    return tuple(k for k, value in held.items() if not Snapshot([value], opaque=opaque).reached().isdisjoint(chosen))


def assign(obj: Any, other: Any) -> bool:
    """Set an object to the state of another one; return whether this was possible.

    It is not possible if the types differ, or if the state is unknown or immutable, as of NumPy scalars and named
    tuples.
    """
    if type(obj) is not type(other) or type(obj) in FIXED or not is_open(type(obj)):
        return False
    state = state_of(other)
    is_known = state.items is not None or state.attributes or hasattr(obj, "__dict__")
    if not is_known or isinstance(obj, _VALUES) or objects.is_restorable(obj):
        return False
    set_state(obj, state)
    return True


def reachable(roots: Iterable[Any], most: int) -> list[Any]:
    """Return all objects that are reachable from some roots, except tensors, modules, numbers and the like.

    Args:
        roots: objects to begin with.
        most: largest number of items of a container that is entered; a larger one is assumed to hold data.
    """
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        obj = waiting.pop()
        cls: Any = type(obj)
        if cls in ATOMS or id(obj) in seen or not is_open(cls):
            continue
        seen[id(obj)] = obj
        if (size := num_items(obj)) is None or 0 < size <= most:
            waiting.extend(state_of(obj).children())
    return list(seen.values())


@weakly_cached
def is_open(cls: type) -> bool:
    """Return whether objects of a type are entered."""
    if issubclass(cls, (Tensor, nn.Module, type, types.ModuleType, *GENERATORS)):
        return False
    if cls in (types.FunctionType, types.MethodType, types.CellType, contextvars.ContextVar, Variable, Buffers):
        return True
    for base in cls.__mro__[:-1]:
        name, root = f"{base.__module__}.{base.__qualname__}", base.__module__.partition(".")[0]
        if any(f"{name}.".startswith(f"{o}.") for o in _OPEN):
            continue
        if root in sys.stdlib_module_names or any(name.startswith(f"{closed}.") for closed in _CLOSED):
            return False
    return True


def _put_contents(tensor: Tensor, copy: Tensor) -> None:
    if tensor.is_meta:
        return
    with torch.no_grad():
        if is_strided(tensor) and tensor.shape != copy.shape:  # observers of quantisation resize their buffers
            tensor.resize_(copy.shape)
        if not same_contents(tensor, copy.to(tensor.device)):  # the tensor may have moved since
            tensor.detach().copy_(copy)

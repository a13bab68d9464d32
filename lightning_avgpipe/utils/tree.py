"""Trees: any nesting of containers, as a list of leaves and a spec from which the tree can be rebuilt.

This is a thin layer over ``torch.utils._pytree``. The following types, which occur in batches and which pytree does not
support, are registered with it when an object of the type is first seen:

=========================================  ==================================================================
dataclasses                                all attributes, fields or not, frozen or not; ``__init__`` and
                                           ``__post_init__`` are not run again
subclasses of dict and UserDict            their items (transformers' ``BatchEncoding``), and their attributes
other Mapping types                        their items, if ``type(mapping)(dict)`` makes an equal one
subclasses of namedtuples                  their fields (``PackedSequence``; newer versions of pytree know them)
=========================================  ==================================================================

Before a type is registered, its first object is flattened and rebuilt. If the result is not equal, objects of the type
are leaves. A type that is registered already, such as transformers' ``ModelOutput``, is not changed.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from lightning_avgpipe.utils.weak_cache import weakly_cached

__all__ = [
    "TreeSpec", "children", "flatten", "flatten_with_names", "leaves", "map_tensors", "named_children", "tensors",
    "unflatten",
]  # fmt: skip

IsLeaf = Callable[[Any], bool]


def flatten(obj: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], TreeSpec]:
    """Flatten a tree into its leaves and a spec.

    Args:
        obj: any object. An object that is not a container is a single leaf, and so is None.
        is_leaf: function that returns whether a container is a leaf as well.
    Returns:
        The leaves in order, and a spec, which can be pickled and compared.
    Raises:
        RecursionError: the object contains itself.
    """
    if type(obj) is Tensor and is_leaf is None:
        return [obj], _LEAF
    try:
        leaves, spec = pytree.tree_flatten(obj, is_leaf)
        while not _LEAF_TYPES.issuperset(map(type, leaves)) and _found_nodes(leaves, is_leaf):
            leaves, spec = pytree.tree_flatten(obj, is_leaf)
    except RecursionError:
        raise _endless(obj) from None
    return leaves, spec


def _endless(obj: Any) -> RecursionError:
    return RecursionError(
        f"a {type(obj).__name__} leads back into itself, through items of a container or attributes of a "
        "dataclass, so it is not a tree; remove the reference that leads back, or make its type a plain class"
    )


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """Rebuild a tree with new containers: the inverse of :func:`flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def flatten_with_names(obj: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Flatten a tree, and name its leaves by the code that reaches them, such as ``['labels']`` or ``[0].mask``."""
    leaves, spec = flatten(obj)
    return list(zip(_names(obj, ""), leaves, strict=True)), spec


def tensors(obj: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [obj] if type(obj) in _TENSOR_TYPES else [leaf for leaf in leaves(obj) if isinstance(leaf, Tensor)]


def leaves(obj: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    try:
        _collect(obj, found)
    except RecursionError:
        raise _endless(obj) from None
    return found


def _collect(obj: Any, found: list[Any]) -> None:
    """Append the leaves of a tree, without pytree for common containers: every call in a step does this."""
    cls = type(obj)
    if cls in _LEAF_TYPES:
        found.append(obj)
    elif cls is tuple or cls is list:
        for child in obj:
            _collect(child, found)
    elif cls is dict:
        for child in obj.values():
            _collect(child, found)
    else:
        found += flatten(obj)[0]


def map_tensors(fn: Callable[[Tensor], Any], obj: Any) -> Any:
    """Return the tree with ``fn(tensor)`` in place of every tensor; other leaves are kept as they are."""
    try:
        return _map(fn, obj)
    except RecursionError:
        raise _endless(obj) from None


def _map(fn: Callable[[Tensor], Any], obj: Any) -> Any:
    """Map the tensors of a tree, without pytree for common containers as in :func:`_collect`."""
    cls = type(obj)
    if cls in _TENSOR_TYPES:
        return fn(obj)
    if cls is tuple or cls is list:
        return cls([_map(fn, child) for child in obj])
    if cls is dict:
        return {key: _map(fn, child) for key, child in obj.items()}
    if cls in _LEAF_TYPES:
        return fn(obj) if issubclass(cls, Tensor) else obj
    leaves, spec = flatten(obj)
    return unflatten([fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def children(obj: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten one level of a tree. The only child of a leaf is the leaf itself."""
    return flatten(obj, is_leaf=lambda node: node is not obj)


def named_children(obj: Any, name: str) -> list[tuple[str, Any]]:
    """Return the children of a container with their names, as in :func:`flatten_with_names`."""
    below, spec = children(obj)
    return [(name + step, child) for step, child in zip(_steps(obj, spec, len(below)), below, strict=True)]


def _names(obj: Any, name: str) -> list[str]:
    below, spec = children(obj)
    if spec.is_leaf():
        return [name]
    steps = _steps(obj, spec, len(below))
    return [leaf for step, child in zip(steps, below, strict=True) for leaf in _names(child, name + step)]


def _steps(obj: Any, spec: TreeSpec, num_children: int) -> list[str]:
    """Return the code that reaches each child from its container: ``['key']``, ``[0]`` or ``.field``."""
    with_keys = pytree.SUPPORTED_NODES[spec.type].flatten_with_keys_fn
    if with_keys is not None:
        return [str(key) for key, _ in with_keys(obj)[0]]
    if isinstance(obj, Mapping) and len(obj) == num_children:  # some types register themselves without keys
        return [f"[{key!r}]" for key in obj]
    return [f"[{i}]" for i in range(num_children)]


# -- which types are leaves ------------------------------------------------------------------------------------------

_LEAF: TreeSpec = pytree.tree_flatten(None)[1]
_LEAF_TYPES: set[type] = {Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes}
_TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))
_REGISTRATION = threading.RLock()


def _leaf() -> TreeSpec:
    return _LEAF


# Pickle torch's LeafSpec by a function: unpickling the class would show a deprecation warning on each process.
if type(_LEAF) is not TreeSpec:
    copyreg.pickle(type(_LEAF), lambda _: (_leaf, ()))


def _found_nodes(leaves: Iterable[Any], is_leaf: IsLeaf | None) -> bool:
    """Register the types of leaves that are containers after all, if possible; return whether there are any."""
    found = False
    for leaf in leaves:
        cls = type(leaf)
        if cls in _LEAF_TYPES or (is_leaf is not None and is_leaf(leaf)):
            continue
        with _REGISTRATION:
            recipe = _recipe(cls)
            if cls in pytree.SUPPORTED_NODES:
                found = True
            elif recipe is not None and _restores(recipe, leaf):
                _register(cls, recipe)
                found = True
            else:
                _LEAF_TYPES.add(cls)
    return found


def _register(cls: type, recipe: _Recipe) -> None:
    def with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], _Layout]:
        values, layout = recipe.take_apart(obj)
        keys = [*map(pytree.MappingKey, layout.keys), *map(pytree.GetAttrKey, layout.attributes)]
        return list(zip(keys, values, strict=True)), layout

    pytree.register_pytree_node(cls, recipe.take_apart, recipe.put_together, flatten_with_keys_fn=with_keys)


# -- how objects are taken apart -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The part of a spec for one container. Its children are its items, followed by its attributes."""

    cls: type
    keys: tuple[Any, ...] = ()
    attributes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # attributes that are the item of the same name: obj.loss is obj["loss"]
    is_own_dict: bool = False  # obj.__dict__ is obj, a common way to give a dict attribute access

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_layout, (self.cls, self.keys, self.attributes, self.shared, self.is_own_dict)


def _received_layout(cls: type, *rest: Any) -> _Layout:
    """Unpickle a layout, and register its type if this process has not seen an object of it yet."""
    with _REGISTRATION:
        recipe = _recipe(cls)
        if recipe is not None and cls not in pytree.SUPPORTED_NODES:
            _register(cls, recipe)
            _LEAF_TYPES.discard(cls)
    return _Layout(cls, *rest)


class _Recipe(NamedTuple):
    take_apart: Callable[[Any], tuple[list[Any], _Layout]]
    put_together: Callable[[Iterable[Any], _Layout], Any]


def _recipe(cls: type) -> _Recipe | None:
    """Return the functions that flatten and rebuild objects of a type; None if these are leaves."""
    if issubclass(cls, (Tensor, torch.nn.Module, type, Enum, TreeSpec)):
        return None
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return _Recipe(_take_fields, _make_namedtuple)
    if issubclass(cls, (dict, UserDict)) or is_dataclass(cls):
        return _Recipe(_take_state, _make_from_state)
    if issubclass(cls, Mapping):
        return _Recipe(_take_items, _make_from_items)
    return None


def _restores(recipe: _Recipe, obj: Any) -> bool:
    try:
        values, layout = recipe.take_apart(obj)
        copy = recipe.put_together(values, layout)
        copied, copied_layout = recipe.take_apart(copy)
    except Exception:  # user code of the type may raise anything
        return False
    same_values = len(values) == len(copied) and all(a is b for a, b in zip(values, copied, strict=True))
    return type(copy) is type(obj) and copied_layout == layout and same_values


def _take_fields(obj: Any) -> tuple[list[Any], _Layout]:
    return list(obj), _Layout(type(obj), attributes=obj._fields)


def _make_namedtuple(values: Iterable[Any], layout: _Layout) -> Any:
    return layout.cls._make(values)  # type: ignore[attr-defined]


def _take_items(obj: Any) -> tuple[list[Any], _Layout]:
    # Allow at most one attribute, which holds the items: then nothing is lost, and the object does not contain itself.
    cls: Any = type(obj)
    if len(getattr(obj, "__dict__", ())) + len(_slots(cls)) > 1:
        raise TypeError(f"{cls.__name__} holds more than its items")
    return [obj[key] for key in obj], _Layout(cls, tuple(obj))


def _make_from_items(values: Iterable[Any], layout: _Layout) -> Any:
    return layout.cls(dict(zip(layout.keys, values, strict=True)))


def _take_state(obj: Any) -> tuple[list[Any], _Layout]:
    cls: Any = type(obj)
    items: dict[Any, Any] = {}
    state: dict[str, Any] = getattr(obj, "__dict__", {})
    is_own_dict = state is obj
    if is_own_dict:
        state = {}
    if issubclass(cls, dict):
        items = dict(dict_type(cls).items(obj))  # not obj.items(), which the class may have overridden
    elif issubclass(cls, UserDict):
        items = obj.data
    held = {name: getattr(obj, name) for name in _slots(cls) if hasattr(obj, name)}
    held |= {name: value for name, value in state.items() if name not in _derived(cls)}
    shared = tuple(name for name, value in held.items() if name in items and items[name] is value)
    attributes = tuple(name for name in held if name not in shared)
    values = [*items.values(), *(held[name] for name in attributes)]
    return values, _Layout(cls, tuple(items), attributes, shared, is_own_dict)


def _make_from_state(values: Iterable[Any], layout: _Layout) -> Any:
    cls: Any = layout.cls
    values = iter(values)
    items = {key: next(values) for key in layout.keys}
    held = dict(zip(layout.attributes, values, strict=True)) | {name: items[name] for name in layout.shared}
    obj: Any = cls.__new__(cls)
    if issubclass(cls, dict):
        for key, value in items.items():
            dict_type(cls).__setitem__(obj, key, value)
    elif issubclass(cls, UserDict):
        obj.__dict__["data"] = items
    if layout.is_own_dict:
        obj.__dict__ = obj
    for name, value in held.items():
        if name in _slots(cls):
            object.__setattr__(obj, name, value)  # frozen dataclasses forbid the plain assignment
        else:
            obj.__dict__[name] = value
    return obj


def dict_type(cls: type) -> type[dict[Any, Any]]:
    """Return the base class with whose methods to read and set a dict's items: an OrderedDict has its own order."""
    return OrderedDict if issubclass(cls, OrderedDict) else dict


@weakly_cached
def _slots(cls: type) -> Sequence[str]:
    """Return the names of attributes that are not in ``__dict__``: ``__slots__``, defaultdict's ``default_factory``."""
    members = {n for base in cls.__mro__ for n, m in vars(base).items() if isinstance(m, types.MemberDescriptorType)}
    in_order = [field.name for field in fields(cls)] if is_dataclass(cls) else []
    return [name for name in in_order if name in members] + sorted(members.difference(in_order))


@weakly_cached
def _derived(cls: type) -> frozenset[str]:
    """Return the names in ``__dict__`` that are not children: UserDict's ``data``, and cached properties."""
    cached = {n for base in cls.__mro__ for n, m in vars(base).items() if isinstance(m, functools.cached_property)}
    return frozenset(cached | {"data"} if issubclass(cls, UserDict) else cached)

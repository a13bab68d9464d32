"""Run a step without a trace: random state, buffers and attributes are restored after it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.changes import put_back
from lightning_avgpipe.capture.outside import outside
from lightning_avgpipe.utils.device import all_generators
from lightning_avgpipe.utils.lightning import LIGHTNING
from lightning_avgpipe.utils.object_state import OF_EVERY_MODULE, same_items
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.random_streams import HostState
from lightning_avgpipe.utils.tensors import is_strided, same_contents
from lightning_avgpipe.utils.torch_compat import REGISTRIES, untraced, version_of

_REGISTRIES = (*REGISTRIES, "_non_persistent_buffers_set")
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()
_Saved = dict[str, tuple[Any, Any]]  # name -> the object, and the copy to restore its contents from
_LIBRARIES = ("torch", *LIGHTNING, "torchmetrics", "builtins", "abc", "typing")


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Restore the generators of torch (all devices), NumPy and Python after this context."""
    of_torch = [(generator, generator.get_state()) for generator in all_generators()]
    on_host = HostState.now()
    try:
        yield
    finally:
        for generator, state in of_torch:
            generator.set_state(state)
        on_host.put()


@contextlib.contextmanager
def untouched(module: nn.Module, changing: Collection[str] = ()) -> Iterator[None]:
    """Restore all that a step of ``module`` changes after this context.

    Restored are buffers, attributes of all submodules (counters, cached masks, lists of outputs, metric states) and
    random state, in place where they are tensors or containers. So are attributes of the user's classes, and global and
    closure variables that their code names. Parameters get back their memory, and those in ``changing`` their contents.

    Args:
        changing: full names of the parameters whose contents the step changes.
    """
    parameters = dict(module.named_parameters())
    with untraced():  # reading the data must not fetch absent weights
        weights = [(p, p.detach(), p.detach().clone() if name in changing else None) for name, p in parameters.items()]
    saved = [(m, _copies(vars(m), _REGISTRIES), _copies(m._buffers)) for m in module.modules()]
    classes = [(kind, _copies(_class_attributes(kind))) for kind in _own_classes(module)]
    values = (value for value in attribute_values(module.modules()) if not isinstance(value, Tensor))
    objects, variables = Objects(values, contents=True, opaque=True), Objects(outside(module).values(), opaque=True)
    with random_state(), objects.restored(), variables.restored():
        try:
            yield
        finally:
            for parameter, memory, contents in weights:
                put_back(parameter, memory, contents)
            for m, attributes, buffers in saved:
                _restore(vars(m), attributes, _REGISTRIES)
                for name, (held, copy) in buffers.items():  # TorchScript's buffers are no dict
                    m._buffers[name] = _put_back(held, copy)
            for kind, own in classes:
                _restore_class(kind, own)


def attribute_values(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the values of modules' attributes, without parameters, buffers, submodules and hooks."""
    return [held for m in modules for name, held in vars(m).items() if name not in OF_EVERY_MODULE]


@contextlib.contextmanager
def unchanged(owner: Any) -> Iterator[None]:
    """Restore the attributes of any object after this context, and the contents of their tensors and containers."""
    saved = _copies(vars(owner))
    try:
        yield
    finally:
        _restore(vars(owner), saved)


def _own_classes(module: nn.Module) -> list[type]:
    found = dict.fromkeys(kind for m in module.modules() for kind in type(m).__mro__)
    return [kind for kind in found if kind.__module__.partition(".")[0] not in _LIBRARIES]


def _class_attributes(kind: type) -> dict[str, Any]:
    return {name: held for name, held in vars(kind).items() if not (name.startswith("__") or hasattr(held, "__get__"))}


def _restore_class(kind: type, saved: _Saved) -> None:
    now = _class_attributes(kind)
    for name in now.keys() - saved.keys():
        delattr(kind, name)
    for name, (held, copy) in saved.items():
        if now.get(name) is not _put_back(held, copy):
            setattr(kind, name, held)


class Attributes:
    """A snapshot of modules' attributes and registered buffers, which copies containers but no tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._saved = [(m, *_references(m)) for m in modules]
        self._versions = [
            (m, name, held, version_of(held))
            for m, attributes, buffers in self._saved
            for name, held in (*((name, held) for name, (held, _) in attributes.items()), *buffers.items())
            if isinstance(held, Tensor) and not held.is_inference()
        ]
        self._whole = True

    def restore(self) -> None:
        """Restore the attributes and buffers of the snapshot; after :meth:`keep_changed` only the kept attributes."""
        for m, attributes, buffers in self._saved:
            _restore(vars(m), attributes, OF_EVERY_MODULE if self._whole else vars(m))
            m._buffers.update(buffers)

    def keep_changed(self) -> None:
        """Forget attributes that have not changed, and tensors with a gradient history, which would keep the graph."""
        changed: list[Any] = []
        for m, attributes, _ in self._saved:
            kept = {
                name: (held, copy)
                for name, (held, copy) in attributes.items()
                if not (vars(m).get(name, _MISSING) is held and _has_items(held, copy))
                and not (isinstance(held, Tensor) and held.grad_fn is not None)
            }
            if kept:
                changed.append((m, kept, {}))
        self._saved, self._versions, self._whole = changed, [], False

    def written(self) -> tuple[nn.Module, str] | None:
        """Return an attribute or buffer whose tensor was changed in place since the snapshot; None if there is none."""
        return next(((m, name) for m, name, held, version in self._versions if version_of(held) != version), None)


def _references(module: nn.Module) -> tuple[_Saved, dict[str, Any]]:
    own = {name: held for name, held in vars(module).items() if name not in OF_EVERY_MODULE}
    return {name: (held, _copy(held, contents=False)) for name, held in own.items()}, dict(module._buffers)


def _has_items(held: Any, copy: Any) -> bool:
    return copy is None or (same_items(held, copy[0]) and all(_has_items(item, below) for item, below in copy[1]))


def _copies(attributes: Mapping[str, Any], without: Collection[str] = ()) -> _Saved:
    """Return each attribute with the copy that restores it."""
    return {name: (held, _copy(held)) for name, held in attributes.items() if name not in without}


def _restore(attributes: dict[str, Any], saved: _Saved, without: Collection[str] = ()) -> None:
    for name in [name for name in attributes if name not in without and name not in saved]:
        del attributes[name]
    attributes.update({name: _put_back(held, copy) for name, (held, copy) in saved.items()})


def _copy(held: Any, inside: frozenset[int] = frozenset(), contents: bool = True) -> Any:
    """Return what restores an object: a tensor's contents, if wanted; a container's items, and what restores these."""
    if isinstance(held, Tensor):
        return held.detach().clone() if contents and not isinstance(held, nn.Parameter) else None
    if not isinstance(held, _CONTAINERS) or id(held) in inside:
        return None
    inside |= {id(held)}
    below = [(item, _copy(item, inside, contents)) for item in (held.values() if isinstance(held, dict) else held)]
    return held.copy(), [(item, copy) for item, copy in below if copy is not None]


def _put_back(held: Any, copy: Any) -> Any:
    if copy is None:
        return held
    if isinstance(held, Tensor):
        with torch.no_grad():
            if is_strided(held) and not held.is_meta and held.shape != copy.shape:  # as observers of quantisation do
                held.resize_(copy.shape)
            if not held.is_meta and not same_contents(held, copy.to(held.device)):  # the tensor may have moved since
                held.detach().copy_(copy)
        return held
    items, below = copy
    if not same_items(held, items):
        held.clear()
        held.extend(items) if isinstance(held, (list, deque)) else held.update(items)
    for item, copy_of_item in below:
        _put_back(item, copy_of_item)
    return held

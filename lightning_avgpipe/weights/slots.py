"""Slots: the places where a module holds a tensor, and where it can be replaced by another tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.state.objects import BASE_MODULE_ATTRIBUTES

_REGISTERS = ("_parameters", "_buffers")
_DEPTH = 4  # most levels of nested containers


class Slot:
    """A place where a module holds a tensor: a parameter, buffer or attribute, or a plain list, tuple or dict."""

    def __init__(self, container: Any, key: Any) -> None:
        self._container = container
        self._key = key

    def get(self) -> Any:
        return self._container[self._key]

    def set(self, tensor: Any) -> None:
        self._container[self._key] = tensor


class _Attribute(Slot):
    """An attribute that must be set by ``setattr``: recurrent layers also keep their weights in a list."""

    def set(self, tensor: Any) -> None:
        setattr(self._container, self._key, tensor)

    def get(self) -> Any:
        return getattr(self._container, self._key)


@contextlib.contextmanager
def swapped(slots: Sequence[tuple[Slot, Tensor]]) -> Iterator[None]:
    """Put a tensor into each slot within this context, and restore the previous ones afterwards."""
    before = [(slot, slot.get()) for slot, _ in slots]
    for slot, tensor in slots:
        slot.set(tensor)
    try:
        yield
    finally:
        for slot, tensor in before:
            slot.set(tensor)


def slots_for(module: nn.Module, tensors: Iterable[Tensor]) -> dict[int, list[Slot]]:
    """Return the places where a module holds each tensor, by the ``id`` of the tensor."""
    found: dict[int, list[Slot]] = {id(tensor): [] for tensor in tensors}
    for slot in _slots_of(module) if found else ():
        places = found.get(id(slot.get()))
        if places is not None:
            places.append(slot)
    return found


def _slots_of(module: nn.Module) -> Iterator[Slot]:
    """Yield the places of a module and its submodules; some hold no tensor."""
    for owner in module.modules():
        recurrent = isinstance(owner, nn.RNNBase)
        for register in _REGISTERS:
            tensors = vars(owner)[register]
            for name in tensors.keys():  # noqa: SIM118  the registers of a scripted module are no iterables
                yield _Attribute(owner, name) if recurrent else Slot(tensors, name)
        for name, value in vars(owner).items():
            if name in BASE_MODULE_ATTRIBUTES or (recurrent and name.startswith("_flat_weight")):
                continue
            yield from _slots_within(vars(owner), name, value)


def _slots_within(container: Any, key: Any, value: Any, depth: int = 0) -> Iterator[Slot]:
    """Yield the places in ``container[key]``, which is ``value``, and in the lists, tuples and dicts within it."""
    if isinstance(value, Tensor):
        yield Slot(container, key)
    if depth == _DEPTH:
        return
    within: Any = _Tuple(container, key) if isinstance(value, tuple) else value
    if isinstance(value, tuple) or type(value) is list:
        entries: Iterable[tuple[Any, Any]] = enumerate(value)
    elif type(value) is dict:
        entries = value.items()
    else:
        return
    for inner, entry in entries:
        yield from _slots_within(within, inner, entry, depth + 1)


class _Tuple(Slot):
    """A tuple in a slot, as a container of slots: setting an entry puts a new tuple into the slot."""

    def __getitem__(self, i: int) -> Any:
        return self.get()[i]

    def __setitem__(self, i: int, entry: Any) -> None:
        before = self.get()
        entries = [*before[:i], entry, *before[i + 1 :]]
        self.set(before._make(entries) if hasattr(before, "_make") else type(before)(entries))

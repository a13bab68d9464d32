"""Parcels: what a unit gave besides trees of tensors, and what it wrote into objects that were there before.

::

    stage 0    layers.0(x, cache)     runs:    (result, changes of cache)  ->  bytes, and the tensors in them
    stage 1    layers.0(x, cache)     skipped: the same changes happen to the cache that this stage made,
                                               with received values, or such that are absent, as the tensors

A tensor stands in the bytes as a number, an object that was reached from the arguments as its number among them, and a
module as its path.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.object_state import State, put_state, same_items, state_of
from lightning_avgpipe.utils.objects import ATOMS, Objects, is_open
from lightning_avgpipe.utils.placeholder import TensorMeta


class Parcel(NamedTuple):
    """What a call gave.

    Attributes:
        content: the result and the changes, without tensors.
        tensors: descriptions of these.
    """

    content: bytes
    tensors: tuple[TensorMeta, ...]


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


class Packer:
    """Makes parcels, and opens them.

    Args:
        root: the module whose submodules are known to all.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._paths = {id(module): path for path, module in self._modules.items()}

    @staticmethod
    def is_needed(result: Any, objects: Objects) -> bool:
        """Whether the result of a call is not all that it gave, or hides tensors or objects that were there before."""
        opaque = [x for x in tree.flatten(result)[0] if not isinstance(x, Tensor) and is_open(type(x))]
        if opaque:
            inside = Objects(opaque)
            if inside.tensors or any(id(owner) in objects.indices for owner in inside.owners):
                return True
        return any(True for _ in objects.modified())

    def pack(self, result: Any, objects: Objects) -> tuple[Parcel, list[Tensor]]:
        """A parcel, and the tensors that it describes.

        Args:
            objects: that were reached from the arguments, as they were before the call.
        Raises:
            Exception: what pickling raises for an object that cannot be sent.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._paths, objects)
        pickler.dump((result, [_change(objects, *modified) for modified in objects.modified()]))
        found = list(pickler.tensors)
        return Parcel(buffer.getvalue(), tuple(map(TensorMeta.of, found))), found

    def unpack(self, parcel: Parcel, tensors: Sequence[Tensor], objects: Objects) -> Any:
        """Let the changes happen to these objects, and return the result.

        Args:
            tensors: in the order of the parcel's.
        Raises:
            LookupError: these are other objects.
        """
        result, changes = _Unpickler(io.BytesIO(parcel.content), tensors, objects.owners, self._modules).load()
        for change in changes:
            _apply(change, objects.owners)
        return result


def _change(objects: Objects, obj: Any, before: State, now: State) -> Change:
    old = before.attributes
    return Change(
        objects.indices[id(obj)],
        type(obj).__qualname__,
        None if same_items(now.items, before.items) else now.items,
        {k: v for k, v in now.attributes.items() if k not in old or old[k] is not v},
        tuple(name for name in old if name not in now.attributes),
    )


def _apply(change: Change, owners: Sequence[Any]) -> None:
    obj = owners[change.index] if change.index < len(owners) else None
    if type(obj).__qualname__ != change.type:
        raise LookupError(f"a {change.type} was expected, a {type(obj).__qualname__} was found")
    now = state_of(obj)
    attributes = {k: v for k, v in now.attributes.items() if k not in change.removed} | change.attributes
    put_state(obj, State(now.items if change.items is None else change.items, attributes))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, paths: dict[int, str], objects: Objects) -> None:
        super().__init__(file)
        self._paths = paths
        self._objects = objects
        self._numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in ATOMS:
            return None
        if isinstance(obj, Tensor):
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return "tensor", self._numbers[id(obj)]
        if isinstance(obj, nn.Module) and id(obj) in self._paths:
            return "module", self._paths[id(obj)]
        index = self._objects.indices.get(id(obj))
        return None if index is None else ("object", index)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[Tensor], objects: Sequence[Any], modules: dict[str, nn.Module]
    ) -> None:
        super().__init__(file)
        self._kinds: dict[str, Any] = {"tensor": tensors, "object": objects, "module": modules}

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        return self._kinds[kind][key]

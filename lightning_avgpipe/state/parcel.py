"""Pack what a unit returns, and how it changes objects in its arguments, into parcels for other stages.

Parcels are used where the result is not a plain tree of tensors, or objects have changed.

::

    stage 0    layers.0(x, cache)     runs:    (result, changes of cache)  ->  bytes, and the tensors in them
    stage 1    layers.0(x, cache)     skipped: the same changes are applied to the cache that this stage made,
                                               with received or absent tensors

In the bytes, a tensor is represented by its number, an object that is reachable from the arguments by its index, and a
module by its path.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.state.objects import ATOMS, ObjectState, same_items, set_state, state_of
from lightning_avgpipe.state.snapshot import Snapshot, is_open
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import TensorMeta


class Parcel(NamedTuple):
    """The pickled result and changes of a call.

    Attributes:
        content: result and changes, pickled without tensors.
        tensors: descriptions of the tensors.
    """

    content: bytes
    tensors: tuple[TensorMeta, ...]


@dataclass(frozen=True)
class Change:
    """The change of an object by a call.

    Attributes:
        index: index of the object in :attr:`Snapshot.owners`.
        type: name of its type.
        items: items of the object after the call; None if they are unchanged.
        attributes: new or changed attributes.
        removed: names of removed attributes.
    """

    index: int
    type: str
    items: Any
    attributes: dict[str, Any]
    removed: tuple[str, ...]


class Packer:
    """A packer that makes parcels and applies them.

    Args:
        root: module whose submodules all processes have.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._paths = {id(module): path for path, module in self._modules.items()}

    @staticmethod
    def is_needed(result: Any, objects: Snapshot) -> bool:
        """Return whether a call needs a parcel: it changed objects, or its result has objects with tensors or state."""
        opaque = [x for x in tree.flatten(result)[0] if not isinstance(x, Tensor) and is_open(type(x))]
        if opaque:
            inside = Snapshot(opaque)
            if inside.tensors or inside.owners:
                return True
        return any(True for _ in objects.modified())

    def pack(self, result: Any, objects: Snapshot) -> tuple[Parcel, list[Tensor]]:
        """Make a parcel, and return it with the tensors that it describes.

        Args:
            result: result of the call.
            objects: snapshot from before the call of the objects that are reachable from the arguments.
        Raises:
            Exception: an object cannot be pickled; the error is pickle's.
        """
        changes = [_change(objects, *modified) for modified in objects.modified()]
        content, found = self.pickled((result, changes), objects)
        return Parcel(content, tuple(map(TensorMeta.of, found))), found

    def pickled(self, item: Any, objects: Snapshot | None = None) -> tuple[bytes, list[Tensor]]:
        """Pickle an item with references to its tensors, submodules and these objects; return the bytes and tensors."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._paths, {} if objects is None else objects.indices)
        pickler.dump(item)
        return buffer.getvalue(), pickler.tensors

    def unpickled(self, content: bytes, tensors: Sequence[Tensor], objects: Sequence[Any] = ()) -> Any:
        """Unpickle an item, with these tensors and objects in the places of the references."""
        return _Unpickler(io.BytesIO(content), tensors, objects, self._modules).load()

    def unpack(self, parcel: Parcel, tensors: Sequence[Tensor], objects: Snapshot) -> Any:
        """Apply the changes of a parcel to objects, and return the result.

        Args:
            parcel: parcel of the call.
            tensors: tensors in the order of the parcel's descriptions.
            objects: snapshot of the objects that are reachable from the arguments in this process.
        Raises:
            LookupError: an object has another type here than the one that was changed.
        """
        result, changes = self.unpickled(parcel.content, tensors, objects.owners)
        for change in changes:
            _apply(change, objects.owners)
        return result


def _change(objects: Snapshot, obj: Any, before: ObjectState, now: ObjectState) -> Change:
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
    set_state(obj, ObjectState(now.items if change.items is None else change.items, attributes))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, paths: dict[int, str], indices: Mapping[int, int]) -> None:
        super().__init__(file)
        self._paths = paths
        self._indices = indices
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
        index = self._indices.get(id(obj))
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

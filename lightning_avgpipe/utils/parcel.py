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
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.utils import tree
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
            if inside.tensors or any(objects.index(owner) is not None for owner in inside.owners):
                return True
        return bool(objects.changes())

    def pack(self, result: Any, objects: Objects) -> tuple[Parcel, list[Tensor]]:
        """A parcel, and the tensors that it describes.

        Args:
            objects: that were reached from the arguments, as they were before the call.
        Raises:
            Exception: what pickling raises for an object that cannot be sent.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._paths, objects)
        pickler.dump((result, objects.changes()))
        found = list(pickler.tensors)
        return Parcel(buffer.getvalue(), tuple(map(TensorMeta.of, found))), found

    def unpack(self, parcel: Parcel, tensors: Sequence[Tensor], objects: Objects) -> Any:
        """Let the changes happen to these objects, and return the result.

        Args:
            tensors: in the order of the parcel's.
        """
        result, changes = _Unpickler(io.BytesIO(parcel.content), tensors, objects.owners, self._modules).load()
        objects.apply(changes)
        return result


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
        index = self._objects.index(obj)
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

"""Follow units that write into objects, or return objects that hold tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import ANYWHERE, Draft
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer


class Openings:
    """A record of the objects that units write into.

    Args:
        draft: call graph under construction.
        lasting: objects that existed before the step.
    """

    def __init__(self, module: nn.Module, draft: Draft, lasting: Objects) -> None:
        self._packer = Packer(module)
        self._draft = draft
        self._lasting = lasting
        self._writers: dict[int, list[int]] = defaultdict(list)  # lasting object -> nodes that write into it

    def opened(
        self, node: Node, result: Any, objects: Objects, exports: bool, writes: bool
    ) -> tuple[Node, list[Tensor]]:
        """Return the node, and the tensors that it gave: those in its result, or also those that it wrote into objects.

        Args:
            objects: objects that its arguments lead to, as they were before; with ``exports`` also those in its
                attributes.
            writes: whether the node wrote into a tensor that is held by an object.
        """
        if not writes and not self._packer.is_needed(result, objects):
            return node, tree.tensors(result)
        try:
            given = self._packer.pack(result, objects)[1]
        except Exception as error:  # any type: pickling runs code of the objects
            reason = f"{node} leaves in an object what cannot be sent to another stage: {error}"
            self._draft.pin(node.index + 1, ANYWHERE, reason)
            return node, tree.tensors(result)
        written = [obj for obj, _, _ in objects.modified()]
        lasting = tuple(objects.indices[id(obj)] for obj in written if id(obj) in self._lasting.indices)
        for owner in (objects.owners[i] for i in lasting):
            first = self._writers[id(owner)][:1]
            self._writers[id(owner)].append(node.index)
            if first and not isinstance(owner, nn.Module):
                reason = f"an object of type {type(owner).__name__} that outlives the step is written to on both sides"
                self._draft.pin(first[0] + 1, node.index, reason)
        return replace(node, opens=True, exports=exports, lasting=lasting), given

"""Collect the nodes and values of a call graph while its step runs."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_avgpipe.capture.graph import Node, Value, made_by
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import itself
from lightning_avgpipe.utils.tensors import KnownTensors, has_gaps, is_lent, is_strided, tensor_arguments, tensor_bytes
from lightning_avgpipe.utils.torch_compat import SavedHooks, address, innermost_hooks, version_of

# Functions whose results have a length that depends on the numbers in their arguments.
_SIZED = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"))
# Functions whose results are as long as their arguments.
_AS_LONG = frozenset(("squeeze", "flatten", "view", "reshape", "to", "cpu", "long", "int", "detach", "__getitem__"))
# Functions that return the length of a tensor.
_ASKS = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel))  # type: ignore[attr-defined]

END_OF_STEP = sys.maxsize  # as the last position of a range: the end of the step
Pin = tuple[int, int, str]  # first and last position where no cut may lie, and the reason


class Draft:
    """A call graph under construction.

    Args:
        module: module whose step it is.
        known: record of which tensor holds which value.
        owned: ids of the parameters and buffers whose uses are recorded by name.
        readers: units that an earlier recording has seen find values in objects.
        lasting: tensors that are in memory anyway, such as weights, buffers and the batch; saving them costs nothing.

    Attributes:
        nodes: nodes so far, in program order.
        values: values so far, in the order in which they were made.
        observed: values that are needed at the end of the step.
        resident: units that are always nodes, whatever their arguments are.
        readers: units that find values in objects only, not in their arguments.
        pinned: ranges where no cut may lie, see :attr:`CallGraph.pinned`.
        saved: numbers of the storages (:attr:`Value.storage`) that nodes save for their backwards.
    """

    def __init__(
        self, module: nn.Module, known: KnownTensors, owned: Container[int], readers: Collection[str],
        lasting: Iterable[Tensor],
    ) -> None:  # fmt: skip
        self._known = known
        self._owned = owned
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.observed: set[int] = set()
        self.resident, self.readers = set(readers), set(readers)
        self.pinned: list[Pin] = []
        self.saved: set[int] = set()
        self._storages: dict[int, int] = {}
        self._lasting = set(map(address, lasting))
        self._noted: list[Any] = []  # weak references, which keep the address of a freed storage from being reused
        self._recomputed = 0  # regions around this point of the step whose nodes are recomputed
        self._held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique
        self._sized: set[int] = set()  # values whose length depends on numbers
        self._packer = Packer(module)
        self._writers: dict[int, list[int]] = defaultdict(list)  # lasting object -> nodes that write into it

    def position(self) -> int:
        """Return the number of nodes so far."""
        return len(self.nodes)

    def pin(self, begin: int, end: int, reason: str) -> None:
        """Forbid cuts at the positions ``begin .. end``."""
        self.pinned.append((begin, end, reason))

    def maker(self, value: int) -> Node:
        """Return the first node that has returned a value or written into it."""
        return next(node for node in self.nodes if value in made_by(node))

    # -- values --------------------------------------------------------------------------------------------------------

    def values_of(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the values that these tensors hold."""
        found = (self._known.value_of(t) for t in tensors)
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def add(
        self, node: Node, given: Sequence[Tensor], taken: Sequence[Tensor], versions: Sequence[int],
        saved: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Add a node, with its outputs and writes.

        Args:
            given: tensors that it returned.
            taken: tensors that it took, into which it may have written.
            versions: versions of these before it ran.
            saved: addresses of the storages that it saves for its backward, with their bytes.
        """
        writes = self._written(taken, versions, node.name)
        outputs = outputs_of(given, taken, self._known, lambda tensor: self._new(tensor, node.name))
        self.saved.update(self._storages[address] for address in saved if address in self._storages)
        internal = sum(nbytes for address, nbytes in saved.items() if address not in self._storages)
        self.nodes.append(replace(node, outputs=outputs, writes=writes, saved_bytes=internal))

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """Note that the nodes of this context are recomputed in the backward, from the values that they take."""
        begin = self.position()
        self._recomputed += 1
        try:
            yield
        finally:
            self._recomputed -= 1
        taken = {value for node in self.nodes[begin:] for value in node.inputs}
        made = {value for node in self.nodes[begin:] for value in made_by(node)}
        self.saved.update(self.values[value].storage for value in taken - made)

    @contextlib.contextmanager
    def saving(self, visitors: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
        """Yield a dict that gets the storages which are saved for backwards within this context, ``address -> bytes``.

        The addresses are unique until a context is entered again.

        Args:
            visitors: lasting tensors that are on another device within this context.
        """
        found: dict[int, int] = {}
        if self._recomputed:
            yield found
            return
        lasting = self._lasting.union(map(address, visitors))
        self._noted.clear()
        outer = innermost_hooks()  # hooks of ours around these, to which saved tensors are passed on

        def pack(tensor: Tensor) -> Any:
            if not is_lent(tensor) and (storage := address(tensor)) not in lasting and storage not in found:
                found[storage] = _saved_bytes(tensor)
                self._noted.append(_weak_storage(tensor))
            return tensor if outer is None else outer.pack_hook(tensor)

        with SavedHooks(pack, itself if outer is None else outer.unpack_hook):
            yield found

    def _written(
        self, taken: Sequence[Tensor], versions: Sequence[int], name: str
    ) -> tuple[tuple[int, int, bool], ...]:
        """Return the writes, see :attr:`Node.writes`, of a node of this name."""
        writes: list[tuple[int, int, bool]] = []
        for i, (tensor, version) in enumerate(zip(taken, versions, strict=False)):
            if version_of(tensor) == version:
                continue
            for target, base in ((tensor, False), (tensor._base, True)):
                if target is not None and id(target) not in self._owned:
                    value = self._known.own_value_of(target)
                    writes.append((i, self._new(target, name) if value is None else value, base))
        return tuple(dict.fromkeys(writes))

    def _new(self, tensor: Tensor, name: str) -> int:
        index = len(self.values)
        storage = self._storages.setdefault(address(tensor), len(self._storages))
        self.values.append(
            Value(
                index, name, tuple(tensor.shape), str(tensor.dtype), tensor_bytes(tensor),
                tensor.requires_grad, storage, is_strided(tensor), has_gaps(tensor),
            )
        )  # fmt: skip
        self._held.append(tensor)
        self._known.learn(tensor, index)
        return index

    # -- numbers of values, which may decide what the step does next ---------------------------------------------------

    def reads_numbers(self, name: str, inputs: Sequence[int], result: Any) -> bool:
        """Return whether a glue operation on these values gives Python code numbers of values.

        ::

            if chosen.any(): ...                        a number
            for expert in hit.nonzero().squeeze(-1):    the numbers decide how many tensors
            if len(torch.where(chosen == 3)[0]): ...    a length that depends on numbers, see described()
        """
        if name == "unbind":
            return not self._sized.isdisjoint(inputs)
        return bool(inputs) and any(isinstance(leaf, (bool, int, float)) for leaf in tree.flatten(result)[0])

    def note_length(self, name: str, args: Sequence[Any], inputs: Sequence[int]) -> None:
        """Remember the results of the last added glue operation if their length depends on numbers of values."""
        masked = name == "__getitem__" and self.values_of(
            [t for t in tensor_arguments(*args[1:]) if t.dtype is torch.bool]
        )
        new = name in _SIZED or (name == "where" and len(args) == 1) or masked
        if (new and inputs) or (name in _AS_LONG and not self._sized.isdisjoint(inputs)):
            self._sized.update(self.nodes[-1].outputs)

    def note_metadata_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note that the step has read a description of tensors, such as a length that depends on numbers of values."""
        if func in _ASKS and not self._sized.isdisjoint(self.values_of(tensors)):
            self.nodes[-1] = replace(self.nodes[-1], reads_numbers=True)

    # -- objects that units write into ---------------------------------------------------------------------------------

    def with_objects(
        self, node: Node, result: Any, objects: Snapshot, lasting: Snapshot, exports: bool, writes: bool
    ) -> tuple[Node, list[Tensor]]:
        """Return the node with its writes into objects, and the tensors that it gave, in its result or these objects.

        Args:
            objects: objects that its arguments lead to, as they were before; with ``exports`` also those in its
                attributes.
            lasting: objects that existed before the step.
            writes: whether the node wrote into a tensor that is held by an object.
        """
        if not writes and not self._packer.is_needed(result, objects):
            return node, tree.tensors(result)
        try:
            given = self._packer.pack(result, objects)[1]
        except Exception as error:  # any type: pickling runs code of the objects
            reason = f"{node} leaves in an object what cannot be sent to another stage: {error}"
            self.pin(node.index + 1, END_OF_STEP, reason)
            return node, tree.tensors(result)
        written = [obj for obj, _, _ in objects.modified()]
        indices = tuple(objects.indices[id(obj)] for obj in written if id(obj) in lasting.indices)
        for owner in (objects.owners[i] for i in indices):
            first = self._writers[id(owner)][:1]
            self._writers[id(owner)].append(node.index)
            if first and not isinstance(owner, nn.Module):
                reason = f"an object of type {type(owner).__name__} that outlives the step is written to on both sides"
                self.pin(first[0] + 1, node.index, reason)
        return replace(node, writes_objects=True, exports=exports, lasting=indices), given


def _weak_storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none, and are known by identity
        return tensor


def _saved_bytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()


def outputs_of(
    given: Sequence[Tensor], taken: Sequence[Tensor], known: KnownTensors[int], new: Callable[[Tensor], int]
) -> tuple[int, ...]:
    """Return the :attr:`Node.outputs` of a node that took and returned these tensors; ``new`` gives a new value."""
    outputs = []
    for tensor in given:
        value = known.own_value_of(tensor)
        if value is None:
            same = next((i for i, t in enumerate(taken) if t is tensor), None)
            value = new(tensor) if same is None else -1 - same
        outputs.append(value)
    return tuple(outputs)

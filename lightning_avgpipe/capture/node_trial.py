"""Run nodes alone, on detached copies of their inputs, so that nothing of the run remains; collect times and bytes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import random_state, untouched
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.torch_compat import SavedHooks, storage_id

REGION_BACKWARD = 3.0  # in forwards: a recomputed forward, and a backward of two forwards


class Sample(NamedTuple):
    """The seconds of one execution of a node alone."""

    forward_s: float
    backward_s: float


@dataclass
class Samples:
    """Samples by kind of call, shared by graphs that have the same calls.

    Attributes:
        found: samples of each kind.
        complete: kinds of which no more samples are needed.
        spent_s: seconds that measuring has taken.
    """

    found: dict[Hashable, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    complete: set[Hashable] = field(default_factory=set)
    spent_s: float = 0.0

    def median(self, kind: Hashable) -> Sample:
        """Return the median of the forwards, and that of the backwards."""
        samples = self.found[kind]
        return Sample(statistics.median(s.forward_s for s in samples), statistics.median(s.backward_s for s in samples))

    def take(self, other: Samples) -> None:
        """Replace these samples by another process's, which started from these."""
        self.found, self.complete, self.spent_s = other.found, other.complete, other.spent_s


class SavedTensors:
    """The tensors that nodes save in one run of a step: values by index, everything else in bytes.

    Args:
        num_nodes: number of nodes in the step.
        resident: tensors that are in memory in any case, such as weights.

    Attributes:
        internal: for each node the bytes that only this node saves.
        values: indices of the values that any node saves.
    """

    def __init__(self, num_nodes: int, resident: Iterable[Tensor]) -> None:
        self.internal = [0] * num_nodes
        self.values: set[int] = set()
        self._resident = {storage_id(tensor) for tensor in resident}
        self._homes: dict[int, tuple[Tensor, int]] = {}  # storage -> (tensor that keeps it alive, value)

    def learn(self, tensor: Tensor, value: int) -> None:
        """Note that a tensor of the step is this value."""
        self._homes.setdefault(storage_id(tensor), (tensor.detach(), value))

    def count(
        self,
        node: Node,
        module: nn.Module | None,
        kept: Sequence[Tensor],
        outputs: Sequence[Tensor],
        copies: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Note what the forward of a node has saved.

        Args:
            node: node that ran.
            module: the called module, if the node is a call.
            kept: the saved tensors.
            outputs: tensors that the node returned.
            copies: ``(original, copy)`` of each tensor that the node was given.
        """
        own = {storage_id(t): value for t, value in zip(outputs, node.outputs, strict=True) if value >= 0}
        for original, copy in copies:
            if (home := self._homes.get(storage_id(original))) is not None:
                own[storage_id(copy)] = home[1]
        visitors = {storage_id(t) for t in tensors_of(module)} if module is not None else set()
        inside: dict[int, int] = {}
        for tensor in kept:
            storage = storage_id(tensor)
            if storage in visitors or storage in self._resident:
                continue
            value = own.get(storage)
            if value is not None:
                self.values.add(value)
            else:
                inside[storage] = _nbytes(tensor)
        self.internal[node.index] = sum(inside.values())


def _nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()


class NodeTrial:
    """A runner that executes nodes alone and measures them.

    Args:
        device: device on which nodes run.
        packer: finds the tensors in results and objects.
    """

    def __init__(self, device: torch.device, packer: Packer) -> None:
        self._device = device
        self._packer = packer
        self._start_s = math.inf  # overhead of starting a backward, which a stage has once and each node alone has too

    def given(self, result: Any, objects: Snapshot | None) -> list[Tensor]:
        """Return the tensors that a node gives, including those that it has left in objects."""
        return tree.tensors(result) if objects is None else self._packer.pack(result, objects)[1]

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of ``work``, and its seconds."""
        return port_of(self._device).timed(work)

    def run(
        self, operation: Operation, node: Node, sums: Sequence[Tensor], counted: SavedTensors | None = None
    ) -> Sample:
        """Run and measure the forward and backward of a node.

        Args:
            operation: operation that the step has come to.
            node: node of the operation.
            sums: tensors to which the gradients of the module's trained parameters are added, see :func:`sums_of`.
            counted: record in which the tensors are noted that the forward saves.
        """
        copies, module = _Copies(clones=bool(node.writes)), operation.module
        copy_tensors = tree.map_tensors if node.kind == "call" else _map_arguments
        args, kwargs = copy_tensors(copies, (operation.args, operation.kwargs))
        objects = Snapshot((args, kwargs), opaque=True)
        within = random_state() if module is None else untouched(module, _changed_in(node))
        with within, objects.restored():
            objects.replace_tensors(copies)  # tensors that units collect in objects belong to the graph of other nodes
            _, written = operation._replace(args=args, kwargs=kwargs).with_objects(node)
            torch.clear_autocast_cache()  # in training each micro-batch casts the weights again
            saved: list[Tensor] = []

            def save(tensor: Tensor) -> Tensor:
                if counted is not None:
                    saved.append(tensor)
                return tensor

            # hooks of our own, so that those of a checkpointed region around this node do not act
            with SavedHooks(save, _as_it_is):
                result, forward_s = self.timed(lambda: operation.run(*args, **kwargs))
            given = self.given(result, written)
            if counted is not None:
                counted.count(node, module, saved, given, copies.pairs())
            outputs = list({id(t): t for t in given if t.requires_grad}.values())
            sources = copies.leaves() + _trained(module)
            if not outputs or not sources or not torch.is_grad_enabled():
                return Sample(forward_s, 0.0)
            try:
                empty_s, backward_s = self._empty_backward_s(), self._backward_s(outputs, sources, sums)
            except RuntimeError:  # such as a reentrant checkpoint, which refuses autograd.grad
                return Sample(forward_s, REGION_BACKWARD * forward_s)
        # The least so far: an empty backward takes up to six times as long where the allocator has no memory at hand,
        # and does so until something else has been allocated.
        self._start_s = min(self._start_s, empty_s, backward_s)
        return Sample(forward_s, backward_s - self._start_s)

    def _backward_s(self, outputs: list[Tensor], sources: list[Tensor], sums: Sequence[Tensor]) -> float:
        """Return the seconds of a backward that adds the gradients of the last sources to the sums."""
        ones = [torch.ones_like(t) for t in outputs]

        def backward() -> None:
            gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
            with torch.no_grad():
                for total, gradient in zip(sums, gradients[len(sources) - len(sums) :], strict=True):
                    if gradient is not None:
                        total.add_(gradient)

        with torch.autocast(self._device.type, enabled=False):
            return self.timed(backward)[1]

    def _empty_backward_s(self) -> float:
        """Return the seconds of a backward that computes nothing."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        view, one = leaf.view(1), torch.ones(1, device=self._device)
        return self.timed(lambda: torch.autograd.grad(view, leaf, one))[1]


def sums_of(module: nn.Module | None) -> list[Tensor]:
    """Return zeros like each trained parameter of a module, to add gradients to."""
    return [torch.zeros_like(p) for p in _trained(module)]


class _Copies:
    """Copies of a node's arguments, which are leaves of a separate graph.

    Args:
        clones: whether the node writes, so that it gets cloned tensors instead of the leaves.
    """

    def __init__(self, clones: bool) -> None:
        self._clones = clones
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # id -> original, leaf, what the node gets
        self._given: set[int] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor; a copy is returned as it is."""
        if id(tensor) in self._given:
            return tensor
        if id(tensor) not in self._copies:
            leaf = tensor.detach()
            if tensor.requires_grad:
                leaf.requires_grad_()
            self._copies[id(tensor)] = (tensor, leaf, leaf.clone() if self._clones else leaf)
            self._given.add(id(self._copies[id(tensor)][2]))
        return self._copies[id(tensor)][2]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return ``(original, copy given to the node)`` of all copied tensors."""
        return [(original, given) for original, _, given in self._copies.values()]

    def leaves(self) -> list[Tensor]:
        """Return the leaves that require gradients."""
        return [leaf for _, leaf, _ in self._copies.values() if leaf.requires_grad]


def _trained(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else [p for p in module.parameters() if p.requires_grad]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _changed_in(node: Node) -> set[str]:
    """Return the names, within the called module, of the states that a node changes."""
    below = len(node.name) + 1
    return {name[below:] for name in node.states if name.startswith(f"{node.name}.")}


def _map_arguments(fn: Callable[[Tensor], Tensor], arguments: Any) -> Any:
    """Return arguments with ``fn(tensor)`` in place of each tensor that ``tensor_arguments`` finds."""
    if isinstance(arguments, Tensor):
        return fn(arguments)
    if type(arguments) in (list, tuple):
        return type(arguments)(_map_arguments(fn, a) for a in arguments)
    if type(arguments) is dict:
        return {key: _map_arguments(fn, a) for key, a in arguments.items()}
    return arguments

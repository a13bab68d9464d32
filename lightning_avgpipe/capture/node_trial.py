"""Run a node alone, on detached copies of its inputs, so that nothing of the run remains; collect such samples."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import random_state, untouched
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.saved_hooks import SavedHooks

_CALLS = 2  # equal calls that are measured in one run of the step
_REPETITIONS = 3
_SHORT_S = 0.02  # repetitions of one call end after this time


class Sample(NamedTuple):
    """The seconds of one execution of a node alone."""

    forward_s: float
    backward_s: float


@dataclass
class Samples:
    """Samples by kind of call, shared by graphs that have the same calls."""

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


class Sampling:
    """The samples that are taken in one run of a step.

    Args:
        kinds: kind of each node; nodes of the same kind share their samples.
        samples: collection to which new samples are added.
        deadline: time at which repetitions end, as ``time.perf_counter()``.
    """

    def __init__(self, kinds: Sequence[Hashable], samples: Samples, deadline: float) -> None:
        self._kinds = kinds
        self._samples = samples
        self._deadline = deadline
        self._calls: dict[Hashable, int] = defaultdict(int)

    def wants(self, index: int) -> bool:
        """Return whether a node is to be measured in this run."""
        kind = self._kinds[index]
        return kind not in self._samples.complete and self._calls[kind] < _CALLS

    def add(self, index: int, sample: Sample) -> None:
        """Add a sample of a node."""
        self._samples.found[self._kinds[index]].append(sample)

    def repeat(self, index: int, begin: float, warm_up: Sample, once: Callable[[], Sample]) -> None:
        """Measure a node a few times, or use the warm-up as its sample if there is no time for more.

        Args:
            index: index of the node.
            begin: start of the warm-up, as ``time.perf_counter()``.
            warm_up: first execution, which takes longer.
            once: execute the node once more.
        """
        self._calls[self._kinds[index]] += 1
        took = time.perf_counter() - begin
        share = max(0.0, self._deadline - time.perf_counter()) / (len(self._kinds) - index)
        if took > share:
            self.add(index, warm_up)
            return
        for _ in range(_REPETITIONS):
            self.add(index, once())
            if time.perf_counter() - begin > min(share, _SHORT_S) + took:
                break


REGION_BACKWARD = 3.0  # in forwards: a recomputed forward, and a backward of two forwards

# Gets the tensors that a forward saved, those that it returned, and (original, copy) of each argument.
Kept = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]], None]


@dataclass(frozen=True)
class NodeExecution:
    """One execution of a node in a step.

    Attributes:
        node: executed node of the step.
        module: the called module, if the node is a call.
        run: executes the node.
        arguments: return ``(args, kwargs)`` with a function applied to their tensors.
    """

    node: Node
    module: nn.Module | None
    run: Callable[..., Any]
    arguments: Callable[[Callable[[Tensor], Tensor]], Any]

    def objects(self, args: Any, kwargs: Any) -> Snapshot | None:
        """Return the objects that the node may write into; None if it writes into none."""
        if not self.node.opens:
            return None
        module = self.module if self.node.exports else None
        modules = () if module is None else module.modules()
        return Snapshot((args, kwargs), modules, generators=self.node.generators)

    @property
    def changing(self) -> set[str]:
        """The names within the module of the states that the node changes."""
        below = len(self.node.name) + 1
        return {name[below:] for name in self.node.states if name.startswith(f"{self.node.name}.")}


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

    def run(self, execution: NodeExecution, sums: Sequence[Tensor], kept: Kept | None = None) -> Sample:
        """Run and measure the forward and backward of a node.

        Args:
            execution: execution of the node.
            sums: tensors to which the gradients of the module's trained parameters are added, see :func:`sums_of`.
            kept: is called with the tensors that the forward saved.
        """
        copies = _Copies(clones=bool(execution.node.writes))
        args, kwargs = execution.arguments(copies)
        objects, module = Snapshot((args, kwargs), opaque=True), execution.module
        with untouched(module, execution.changing) if module is not None else random_state(), objects.restored():
            objects.replace_tensors(copies)  # tensors that units collect in objects belong to the graph of other nodes
            written = execution.objects(args, kwargs)
            torch.clear_autocast_cache()  # in training each micro-batch casts the weights again
            saved: list[Tensor] = []

            def save(tensor: Tensor) -> Tensor:
                if kept is not None:
                    saved.append(tensor)
                return tensor

            # hooks of our own, so that those of a checkpointed region around this node do not act
            with SavedHooks(save, _as_it_is):
                result, forward_s = self.timed(lambda: execution.run(*args, **kwargs))
            given = self.given(result, written)
            if kept is not None:
                kept(saved, given, copies.pairs())
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

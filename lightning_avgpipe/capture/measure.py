"""Measure the time of each node of a step on this device, one node at a time.

The step is run a few times. Before a node runs as usual, it is run alone on detached copies of its inputs::

    step      embed ............ block0 ............ block1 ............ loss
    alone       F B  F B  F B      F B  F B  F B      (as block0)          F B  F B  F B
                ^    ^                                ^
                |    samples                          equal calls share their samples
                warm-up

Every run of the step adds samples, so that a disturbance of the machine does not hit one node only; the median counts.
The step's own run saves nothing for a backward. So besides the values between nodes, the activations of only one unit
are in memory at a time.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_avgpipe.capture.costs import Costs, stash_bytes
from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.tracer import StepTracer, function_name
from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.errors import CaptureError, StepChangedError
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import Untouched, random_state
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of, visiting
from lightning_avgpipe.utils.output import unmuted_stream
from lightning_avgpipe.utils.patching import itself
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import tensor_arguments
from lightning_avgpipe.utils.torch_compat import SavedHooks, is_transforming

_ROUNDS = 5  # runs of the step
_PATIENCE_S = 2.0  # a longer measurement shows a progress bar
_CALLS = 2  # equal calls that are measured in one run of the step
_REPETITIONS = 3
_SHORT_S = 0.02  # repetitions of one call end after this time


_BACKWARD = "it runs a backward itself, which cannot be measured"


class UnmeasurableError(CaptureError):
    """An error for a step whose nodes cannot be measured one by one."""


def _progress(total: int, step: str, shows: bool) -> Any:
    """Return a progress bar that appears only after a while, and only on a terminal."""
    disable = None if shows else True  # None: unless it is a terminal
    return tqdm(
        total=total, desc=f"Measuring the units of {step}", unit="call", delay=_PATIENCE_S, leave=False,
        disable=disable, file=unmuted_stream(sys.stderr),
    )  # fmt: skip


def measure(
    graph: CallGraph,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    device: torch.device | None = None,
    samples: Samples | None = None,
    shows: bool = True,
    budget_s: float = 30.0,
) -> Costs:
    """Measure the seconds of every node's forward and backward, and undo all changes of the step.

    The time of a backward includes the addition to existing gradients. Stashed bytes are taken from the graph.

    Args:
        graph: call graph of the step, captured with these arguments.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of one micro-batch.
        module: module whose step it is.
        device: device to compute on; parameters that are elsewhere are moved there one unit at a time.
        samples: samples of other graphs of the same step and module; new ones are added.
        shows: whether a progress bar appears if it takes long and the output is a terminal.
        budget_s: seconds, including those that the samples have taken, after which nothing is repeated; each node is
            measured at least once.
    Raises:
        StepChangedError: the step did not do the same as when it was captured.
        UnmeasurableError: the step, or one of its units, runs a backward itself, or a unit cannot run alone.
    """
    if any(node.kind == "glue" and node.name in ("grad", "backward") for node in graph.nodes):
        raise UnmeasurableError(_BACKWARD)
    samples = Samples() if samples is None else samples
    device = device or torch.device("cpu")
    begin = time.perf_counter()
    trial = NodeTrial(graph, module, device, samples, begin + budget_s - samples.spent_s)
    before = Untouched(module, graph.changed)
    with _progress(_ROUNDS * len(graph.nodes), graph.step, shows) as bar:
        for _ in range(_ROUNDS):
            round_begin = time.perf_counter()
            timer = _Timer(trial, bar)
            batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
            with (
                before.restored(),
                Snapshot(batch, opaque=True).restored(),
                timer.visiting(module),
                timer.following(compiled=not graph.drawing),
            ):
                timer.with_state_copied(run(*batch))
            timer.check_finished()
            now = time.perf_counter()
            if now + (now - round_begin) > trial.deadline or samples.complete.issuperset(trial.kinds):
                break
    samples.complete.update(trial.kinds)
    samples.spent_s += time.perf_counter() - begin
    medians = [samples.median(kind) for kind in trial.kinds]
    return Costs(
        tuple(sample.forward_s for sample in medians),
        tuple(sample.backward_s for sample in medians),
        stash_bytes(graph),
        measured=True,
    )


class _Timer(StepTracer):
    """A tracer that runs the step as usual, and measures each node alone before it runs.

    Args:
        trial: runs nodes alone and measures them.
        bar: progress bar.
    """

    is_dry_run = True

    def __init__(self, trial: NodeTrial, bar: tqdm) -> None:
        self._graph, self._module, self._device = graph, module, device = trial.graph, trial.module, trial.device
        units = {id(module.get_submodule(path)): path for path in graph.units}
        away = {id(t) for path in graph.called for t in tensors_of(module.get_submodule(path))}
        super().__init__(units, owned_tensors(module, graph.glue_states), device, away)
        self._trial = trial
        self._calls: Counter[Hashable] = Counter()  # calls that have been measured in this run
        self._bar = bar
        self._position = 0

    def check_finished(self) -> None:
        """Check that the step did not end before its last node."""
        if self._position < len(self._graph.nodes):
            raise StepChangedError(
                f"{self._graph.step} ended before {self._graph.nodes[self._position]}, which it called when it was "
                "captured; a step must do the same for every batch"
            )

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        if path not in self._graph.resident and not self._any_known(tensors):
            with self.executing():
                return run(*args, **kwargs)
        with visiting(tensors_of(module), self._device), self.executing():
            return self._node(Operation("call", path, run, args, kwargs, tensors, module))

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        if not self._any_known(tensors) and not any(id(t) in self._owned for t in tensors):
            return func(*args, **kwargs)
        with visiting([t for t in tensors if id(t) in self._offloaded], self._device):
            return self._node(Operation("glue", function_name(func), func, args, kwargs, tensors))

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nodes, position = self._graph.nodes, self._position
        named = nodes[position].name.split(", ") if position < len(nodes) else []
        inside = [t for m in self._module.named_modules() if m[0] and m[0] in named for t in tensors_of(m[1])]
        with visiting(inside, self._device), self.executing():
            return self._node(Operation("region", "", run, args, kwargs, tensor_arguments(args, kwargs)))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.executing():
            return run(*args, **kwargs)

    def _any_known(self, tensors: Sequence[Tensor]) -> bool:
        return any(self.known.value_of(t) is not None for t in tensors)

    def _node(self, operation: Operation) -> Any:
        index, nodes = self._position, self._graph.nodes
        node = nodes[index] if index < len(nodes) else None
        if node is None or not operation.matches(node):
            raise StepChangedError(
                f"{self._graph.step} calls {operation.name} at {source_line()} where it called {node or 'nothing'} "
                "when it was captured; a step must do the same for every batch. What it makes in its first call only "
                "(a buffer, a table) must be made before training (__init__, setup, on_fit_start)"
            )
        self._position += 1
        self._bar.update()
        # Glue that writes may write to a view of anything, so it cannot run on a copy first. Within a transform of
        # torch.func, or for a checkpointed region, gradients cannot be computed alone. Then the backward is estimated.
        is_free = node.kind == "glue" and not (node.writes or node.states)
        measurable = not is_transforming() and (node.kind == "call" or is_free)
        if measurable:
            self._measure(operation, node)
        tensors, objects = operation.with_objects(node)
        with SavedHooks(_drop, _dropped):
            result, seconds = self._trial.timed(lambda: operation.run(*operation.args, **operation.kwargs))
        given = self._trial.given(result, objects)
        if not measurable:
            backward_s = seconds * (REGION_BACKWARD if node.kind == "region" else 1.0)
            self._trial.add(node, Sample(seconds, backward_s if any(t.requires_grad for t in given) else 0.0))
        self._remember(node, given, tensors)
        return result

    def _remember(self, node: Node, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for leaf, value in zip(given, node.outputs, strict=True):
            if value >= 0 and leaf not in self.known:
                self.known.learn(leaf, value)
        for target, value in node.written(tensors):
            if target not in self.known:
                self.known.learn(target, value)

    def _measure(self, operation: Operation, node: Node) -> None:
        """Measure a node a few times, or once if there is no time for more, unless it has been measured enough."""
        trial, kind = self._trial, self._trial.kinds[node.index]
        if kind in trial.samples.complete or self._calls[kind] >= _CALLS:
            return
        sums, begin = [torch.zeros_like(p) for p in _trained(operation.module)], time.perf_counter()
        before = None if operation.module is None else Untouched(operation.module, _changed_in(node))
        warm_up = trial.run(operation, node, sums, before)
        self._calls[kind] += 1
        took = time.perf_counter() - begin
        share = max(0.0, trial.deadline - time.perf_counter()) / (len(trial.kinds) - node.index)
        if took > share:
            trial.add(node, warm_up)
            return
        for _ in range(_REPETITIONS):
            trial.add(node, trial.run(operation, node, sums, before))
            if time.perf_counter() - begin > min(share, _SHORT_S) + took:
                break


def _kinds(graph: CallGraph, module: nn.Module) -> list[Hashable]:
    """Return for each node a key that is equal for nodes that take the same time."""

    def shapes(values: Sequence[int]) -> Hashable:
        found = (graph.values[v] for v in values if v >= 0)
        return tuple((v.shape, v.dtype, v.requires_grad) for v in found)

    kinds: list[Hashable] = []
    for node in graph.nodes:
        what: Hashable = node.name
        if node.kind == "call":
            unit = module.get_submodule(node.name)
            weights = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in unit.parameters())
            modes = tuple(inner.training for inner in unit.modules())
            what = (type(unit).__qualname__, repr(unit), weights, modes)
        given, made = shapes(node.inputs), shapes(node.outputs)
        kinds.append((node.kind, what, given, made, len(node.writes), node.flops, node.draws))
    return kinds


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(packed: None) -> Tensor:
    raise UnmeasurableError(_BACKWARD)


# -- nodes alone, on detached copies of their inputs, so that the run has no side effects ----------------------------


REGION_BACKWARD = 3.0  # in forwards: the recomputed forward, and a backward that takes two forwards


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
        """Replace these samples by those of another process, which has added its own to a copy of these."""
        self.found, self.complete, self.spent_s = other.found, other.complete, other.spent_s


class NodeTrial:
    """A runner that executes nodes alone and measures them.

    Args:
        graph: call graph of the step.
        module: module whose step it is.
        device: device on which nodes run.
        samples: collection to which new samples are added.
        deadline: time at which repetitions end, as ``time.perf_counter()``.

    Attributes:
        kinds: kind of each node; nodes of the same kind share their samples.
        timed: returns the result of a function, and its seconds.
    """

    def __init__(
        self, graph: CallGraph, module: nn.Module, device: torch.device, samples: Samples, deadline: float
    ) -> None:
        self.graph, self.module, self.device, self.samples, self.deadline = graph, module, device, samples, deadline
        self.kinds = _kinds(graph, module)
        self.timed = port_of(device).timed
        self._packer = Packer(module)
        self._start_s = math.inf  # overhead of starting a backward: once for a stage, but in each measurement of a node

    def add(self, node: Node, sample: Sample) -> None:
        """Add a sample of a node."""
        self.samples.found[self.kinds[node.index]].append(sample)

    def given(self, result: Any, objects: Snapshot | None) -> list[Tensor]:
        """Return the tensors that a node gives, including those that it has left in objects."""
        return tree.tensors(result) if objects is None else self._packer.pack(result, objects)[1]

    def run(self, operation: Operation, node: Node, sums: Sequence[Tensor], before: Untouched | None) -> Sample:
        """Run and measure the forward and backward of a node, and undo its changes.

        Args:
            operation: operation that the step has reached.
            node: node of the operation.
            sums: tensors to which the gradients of the module's trained parameters are added.
            before: state of the called module, to be restored; None: the node is no call of a module.
        """
        copies = _Copies(clones=bool(node.writes))
        args, kwargs = tree.map_tensors(copies, (operation.args, operation.kwargs))
        objects = Snapshot((args, kwargs), opaque=True)
        with random_state() if before is None else before.restored(), objects.restored():
            objects.replace_tensors(copies)  # tensors that units collect in objects belong to the graph of other nodes
            _, written = operation._replace(args=args, kwargs=kwargs).with_objects(node)
            torch.clear_autocast_cache()  # in training each micro-batch casts the weights again
            # hooks of our own on top, so that those of a checkpointed region around this node have no effect
            try:
                with SavedHooks(itself, itself):
                    result, forward_s = self.timed(lambda: operation.run(*args, **kwargs))
            except Exception as error:  # such as a derivative by what other units have computed, which is a copy here
                raise UnmeasurableError(f"'{node.name}' does not run alone ({error})") from error
            given = self.given(result, written)
            outputs = list({id(t): t for t in given if t.requires_grad}.values())
            sources = copies.leaves() + _trained(operation.module)
            if not outputs or not sources or not torch.is_grad_enabled():
                return Sample(forward_s, 0.0)
            try:
                empty_s, backward_s = self._empty_backward_s(), self._backward_s(outputs, sources, sums)
            except RuntimeError:  # such as a reentrant checkpoint, which refuses autograd.grad
                return Sample(forward_s, REGION_BACKWARD * forward_s)
        # Take the smallest so far: an empty backward takes up to six times as long if the allocator has no memory at
        # hand, until something else has been allocated.
        self._start_s = min(self._start_s, empty_s, backward_s)
        return Sample(forward_s, backward_s - self._start_s)

    def _backward_s(self, outputs: list[Tensor], sources: list[Tensor], sums: Sequence[Tensor]) -> float:
        """Return the seconds of a backward that adds the gradients of the last ``len(sums)`` sources to the sums."""
        ones = [torch.ones_like(t) for t in outputs]

        def backward() -> None:
            gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
            with torch.no_grad():
                for total, gradient in zip(sums, gradients[len(sources) - len(sums) :], strict=True):
                    if gradient is not None:
                        total.add_(gradient)

        with torch.autocast(self.device.type, enabled=False):
            return self.timed(backward)[1]

    def _empty_backward_s(self) -> float:
        """Return the seconds of a backward that computes nothing."""
        leaf = torch.zeros(1, device=self.device, requires_grad=True)
        view, one = leaf.view(1), torch.ones(1, device=self.device)
        return self.timed(lambda: torch.autograd.grad(view, leaf, one))[1]


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

    def leaves(self) -> list[Tensor]:
        """Return the leaves that require gradients."""
        return [leaf for _, leaf, _ in self._copies.values() if leaf.requires_grad]


def _trained(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else [p for p in module.parameters() if p.requires_grad]


def _changed_in(node: Node) -> set[str]:
    """Return the names, within the called module, of the states that a node changes."""
    below = len(node.name) + 1
    return {name[below:] for name in node.states if name.startswith(f"{node.name}.")}

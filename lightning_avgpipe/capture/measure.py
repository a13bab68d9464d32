"""Measure the time of each node of a step on this device, one node at a time.

The step is run a few times. Before a node runs as usual, it is run alone on detached copies of its inputs::

    step      embed ............ block0 ............ block1 ............ loss
    alone       F B  F B  F B      F B  F B  F B      (as block0)          F B  F B  F B
                ^    ^                                ^
                |    samples                          equal calls share their samples
                warm-up, counts what is saved

Every run of the step adds samples, so a disturbance of the machine does not hit one node only; the median counts. The
step's own tensors keep nothing for a backward: besides the values between nodes, one unit's activations are alive at a
time.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_avgpipe.capture.costs import Costs, value_bytes
from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.capture.node_trial import REGION_BACKWARD, NodeTrial, Sample, Samples, SavedTensors, sums_of
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.tracer import StepTracer, function_name
from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.errors import CaptureError, StepChangedError
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import untouched
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import visiting
from lightning_avgpipe.utils.output import heard
from lightning_avgpipe.utils.tensors import tensor_arguments
from lightning_avgpipe.utils.torch_compat import SavedHooks, is_transforming

_ROUNDS = 5  # runs of the step
_PATIENCE_S = 2.0  # a longer measurement shows its progress
_CALLS = 2  # equal calls that are measured in one run of the step
_REPETITIONS = 3
_SHORT_S = 0.02  # repetitions of one call end after this time


def _progress(graph: CallGraph) -> tqdm[Any]:
    total, doing = _ROUNDS * len(graph.nodes), f"Measuring the units of {graph.step}"
    return tqdm(total=total, desc=doing, unit="call", delay=_PATIENCE_S, leave=False, file=heard(sys.stderr))


def measure(
    graph: CallGraph,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    device: torch.device | None = None,
    samples: Samples | None = None,
    budget_s: float = 30.0,
) -> Costs:
    """Return the seconds of every node's forward and backward, and the bytes stashed between them, without a trace.

    A backward includes the addition to gradients that exist already.

    Args:
        graph: call graph of the step, captured with these arguments.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of one micro-batch.
        module: module whose step it is.
        device: device to compute on; parameters that are elsewhere are moved there one unit at a time.
        samples: samples of other graphs of the same step and module; new ones are added.
        budget_s: seconds, including those that the samples have taken, after which nothing is repeated; each node is
            measured at least once.
    Raises:
        StepChangedError: the step did something else than when it was captured.
    """
    samples = Samples() if samples is None else samples
    device = device or torch.device("cpu")
    kinds, begin = _kinds(graph, module), time.perf_counter()
    deadline = begin + budget_s - samples.spent_s
    trial = NodeTrial(device, Packer(module))
    saved: SavedTensors | None = None
    with _progress(graph) as bar:
        for _ in range(_ROUNDS):
            round_begin = time.perf_counter()
            batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
            counted = None if saved else SavedTensors(len(graph.nodes), [*tensors_of(module), *tree.tensors(batch)])
            timer = _Timer(graph, module, device, trial, kinds, samples, deadline, counted, bar)
            following = timer.following(compiled=not graph.drawing)
            with untouched(module, graph.changed), Snapshot(batch, opaque=True).restored(), timer.visiting(), following:
                run(*batch)
            timer.check_finished()
            saved = saved or counted
            now = time.perf_counter()
            if now + (now - round_begin) > deadline or samples.complete.issuperset(kinds):
                break
    samples.complete.update(kinds)
    samples.spent_s += time.perf_counter() - begin
    medians = [samples.median(kind) for kind in kinds]
    assert saved is not None
    return Costs(
        tuple(sample.forward_s for sample in medians),
        tuple(sample.backward_s for sample in medians),
        tuple(a + b for a, b in zip(saved.internal, value_bytes(graph, saved.values), strict=True)),
        measured=True,
    )


class _Timer(StepTracer):
    """A tracer that runs the step as usual, and each node alone before it.

    Args:
        graph: call graph of the step.
        module: module whose step it is.
        device: device to compute on.
        trial: runs nodes alone and measures them.
        kinds: kind of each node; nodes of the same kind share their samples.
        samples: collection to which new samples are added.
        deadline: time at which repetitions end, as ``time.perf_counter()``.
        saved: record of the saved tensors, which are the same in every run; None: they are known already.
        bar: progress bar.
    """

    rehearses = True

    def __init__(
        self,
        graph: CallGraph,
        module: nn.Module,
        device: torch.device,
        trial: NodeTrial,
        kinds: Sequence[Hashable],
        samples: Samples,
        deadline: float,
        saved: SavedTensors | None,
        bar: tqdm,
    ) -> None:
        units = {id(module.get_submodule(path)): path for path in graph.units}
        super().__init__(units, owned_tensors(module, graph.glue_states), device)
        self._graph = graph
        self._module = module
        self._device = device
        self._trial = trial
        self._kinds = kinds
        self._samples = samples
        self._calls: Counter[Hashable] = Counter()  # calls that have been measured in this run
        self._deadline = deadline
        self._saved = saved
        self._bar = bar
        self._position = 0

    def visiting(self) -> AbstractContextManager[None]:
        """Move the tensors outside of called units to the device within this context."""
        called = {node.name for node in self._graph.nodes if node.kind == "call"}
        inside = {id(t) for path in called for t in tensors_of(self._module.get_submodule(path))}
        return visiting([t for t in tensors_of(self._module) if id(t) not in inside], self._device)

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
                f"{self._graph.step} calls {operation.name} where it called {node.name if node else 'nothing'} when it "
                "was captured; a step must do the same for every batch"
            )
        self._position += 1
        self._bar.update()
        is_free = not (node.writes or node.states)
        if not is_transforming() and (node.kind == "call" or (node.kind == "glue" and is_free)):
            self._measure(operation, node)
            tensors, objects = operation.with_objects(node)
            with SavedHooks(_drop, _dropped):
                result = operation.run(*operation.args, **operation.kwargs)
            given = self._trial.given(result, objects)
        else:
            tensors = operation.tensors
            result, given = self._estimated(node, lambda: operation.run(*operation.args, **operation.kwargs))
        self._remember(node, given, tensors)
        return result

    def _estimated(self, node: Node, run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """Run a node and measure its forward only; return its result and tensors.

        Glue that writes may write to a view of anything, so it cannot run on a copy first. Gradients of a checkpointed
        region, or within a transform of torch.func, cannot be asked for.
        """
        with SavedHooks(_drop, _dropped):
            result, seconds = self._trial.timed(run)
        given, is_region = tree.tensors(result), node.kind == "region"
        trains = any(t.requires_grad for t in given)
        factor = REGION_BACKWARD if is_region else 1.0
        self._add(node, Sample(seconds, factor * seconds if trains else 0.0))
        if is_region and trains and self._saved is not None:
            self._saved.values.update(node.inputs)
        return result, given

    def _remember(self, node: Node, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for leaf, value in zip(given, node.outputs, strict=True):
            if value >= 0 and leaf not in self.known:
                self._learn(leaf, value)
        for target, value in node.written(tensors):
            if target not in self.known:
                self._learn(target, value)

    def _learn(self, tensor: Tensor, value: int) -> None:
        self.known.learn(tensor, value)
        if self._saved is not None:
            self._saved.learn(tensor, value)

    def _measure(self, operation: Operation, node: Node) -> None:
        """Measure a node a few times, or once if there is no time for more, unless it has been measured enough."""
        kind = self._kinds[node.index]
        timed = kind not in self._samples.complete and self._calls[kind] < _CALLS
        if not timed and self._saved is None:
            return
        sums, begin = sums_of(operation.module), time.perf_counter()
        warm_up = self._trial.run(operation, node, sums, self._saved)
        if not timed:
            return
        self._calls[kind] += 1
        took = time.perf_counter() - begin
        share = max(0.0, self._deadline - time.perf_counter()) / (len(self._kinds) - node.index)
        if took > share:
            self._add(node, warm_up)
            return
        for _ in range(_REPETITIONS):
            self._add(node, self._trial.run(operation, node, sums))
            if time.perf_counter() - begin > min(share, _SHORT_S) + took:
                break

    def _add(self, node: Node, sample: Sample) -> None:
        self._samples.found[self._kinds[node.index]].append(sample)


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
    raise CaptureError("the step runs a backward itself, which cannot be measured; use costs='flops'")

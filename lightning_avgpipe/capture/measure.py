"""Measuring: what each node of a step costs on this device, one node at a time.

The step is run a few times. At each node, before it runs as usual, it is run alone on detached copies of its inputs::

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

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from tqdm.auto import tqdm

from lightning_avgpipe.capture.costs import Costs, value_bytes
from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.snapshot import random_state, untouched
from lightning_avgpipe.capture.tracer import StepTracer, function_name, tensor_arguments
from lightning_avgpipe.capture.visit import Visit
from lightning_avgpipe.errors import CaptureError, StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.parcel import Packer
from lightning_avgpipe.utils.torch_compat import storage_id

__all__ = ["Samples", "measure"]

_ROUNDS = 5  # runs of the step
_CALLS = 2  # equal calls that are measured in one of them
_REPETITIONS = 3
_CALIBRATIONS = 20
_SHORT_S = 0.02  # repetitions of one call end after this time
_REGION_BACKWARD = 3.0  # the forward once more, and a backward of two forwards
_PATIENCE_S = 2.0  # a longer measurement shows its progress


class Sample(NamedTuple):
    """One execution of a node alone, in seconds."""

    forward_s: float
    backward_s: float


@dataclass
class Samples:
    """What was measured, by kinds of calls: another graph with the same calls need not measure them again."""

    found: dict[Hashable, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    complete: set[Hashable] = field(default_factory=set)
    spent_s: float = 0.0

    def median(self, kind: Hashable) -> Sample:
        """The median of forwards, and that of backwards."""
        samples = self.found[kind]
        return Sample(statistics.median(s.forward_s for s in samples), statistics.median(s.backward_s for s in samples))


def measure(
    graph: CallGraph,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    device: torch.device | None = None,
    samples: Samples | None = None,
    budget_s: float = 30.0,
) -> Costs:
    """Seconds of every node's forward and backward, and the bytes that stay between them. Nothing else remains.

    A backward includes the addition to the gradients that are there already.

    Args:
        graph: of the step, as captured with these arguments.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of one micro-batch.
        module: whose step it is.
        device: where to compute; parameters that are elsewhere visit it one unit at a time.
        samples: of other graphs of the same step and module; new ones are added.
        budget_s: after so many seconds, with those that the samples have taken, no repetition is begun; each node is
            measured at least once.
    Raises:
        StepChangedError: the step did something else than when it was captured.
    """
    samples = Samples() if samples is None else samples
    device = device or torch.device("cpu")
    kinds = _kinds(graph, module)
    begin = time.perf_counter()
    budget_s -= samples.spent_s
    internal = [0] * len(graph.nodes)
    saved: set[int] = set()
    with tqdm(
        total=_ROUNDS * len(graph.nodes),
        desc=f"Measuring the units of {graph.step}",
        unit="call",
        delay=_PATIENCE_S,
        leave=False,
    ) as bar:
        for number in range(_ROUNDS):
            round_begin = time.perf_counter()
            timer = _Timer(graph, module, device, kinds, samples, begin + budget_s, number == 0, bar)
            batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
            timer.exclude(tree.tensors(batch))
            timer.calibrate()
            following = timer.following(compiled=not graph.drawing)
            with untouched(module, graph.changed), Objects(batch).restored(), timer.visiting(), following:
                run(*batch)
            timer.check_finished()
            if number == 0:
                internal, saved = timer.internal, timer.saved
            now = time.perf_counter()
            if now + (now - round_begin) > begin + budget_s or samples.complete.issuperset(kinds):
                break
    samples.complete.update(kinds)
    samples.spent_s += time.perf_counter() - begin
    medians = [samples.median(kind) for kind in kinds]
    return Costs(
        tuple(sample.forward_s for sample in medians),
        tuple(sample.backward_s for sample in medians),
        tuple(a + b for a, b in zip(internal, value_bytes(graph, saved), strict=True)),
        measured=True,
    )


class _Timer(StepTracer):
    """Runs the step as usual, and each node alone before it."""

    rehearses = True

    def __init__(
        self,
        graph: CallGraph,
        module: nn.Module,
        device: torch.device,
        kinds: Sequence[Hashable],
        samples: Samples,
        deadline: float,
        counts: bool,
        bar: tqdm,
    ) -> None:
        units = {id(module.get_submodule(path)): path for path in graph.units}
        super().__init__(units, owned_tensors(module, graph.glue_states), device)
        self._graph = graph
        self._module = module
        self._device = device
        self._kinds = kinds
        self._samples = samples
        self._deadline = deadline
        self._counts = counts  # what is saved; it is the same in every run
        self._bar = bar
        self._call_s = 0.0
        self._position = 0
        self._packer = Packer(module)
        self._measured: dict[Hashable, int] = defaultdict(int)
        self._excluded = {storage_id(t) for t in _tensors_of(module)}
        self._homes: dict[int, tuple[Tensor, int]] = {}  # storage -> a tensor that keeps it alive, its value
        self.internal = [0] * len(graph.nodes)
        self.saved: set[int] = set()

    def exclude(self, tensors: Sequence[Tensor]) -> None:
        """These are in memory whatever is stashed."""
        self._excluded.update(map(storage_id, tensors))

    def calibrate(self) -> None:
        """Find out what it takes to start a backward, which each node alone does and a stage does once."""

        def nothing() -> float:
            view = leaf.view(1)
            return self._timed(lambda: torch.autograd.grad(view, leaf, one))[1]

        with torch.inference_mode(False), torch.enable_grad():  # an evaluation is measured too
            leaf = torch.zeros(1, device=self._device, requires_grad=True)
            one = torch.ones(1, device=self._device)
            self._call_s = statistics.median(nothing() for _ in range(_CALIBRATIONS))

    def visiting(self) -> Visit:
        """What lies outside of the units that are called is on the device while the step is measured."""
        called = {node.name for node in self._graph.nodes if node.kind == "call"}
        inside = {id(t) for path in called for t in _tensors_of(self._module.get_submodule(path))}
        return Visit([t for t in _tensors_of(self._module) if id(t) not in inside], self._device)

    def check_finished(self) -> None:
        """Raise if the step ended before its last node."""
        if self._position < len(self._graph.nodes):
            raise StepChangedError(
                f"{self._graph.step} ended before {self._graph.nodes[self._position]}, which it called when it was "
                "captured; a step must do the same for every batch"
            )

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        if path not in self._graph.resident and not self._any_known(tensors):
            return run(*args, **kwargs)
        with Visit(_tensors_of(module), self._device):
            return self._node("call", path, module, run, args, kwargs, tensors, tree.map_tensors)

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        if not self._any_known(tensors) and not any(id(t) in self._owned for t in tensors):
            return func(*args, **kwargs)
        return self._node("glue", function_name(func), None, func, args, kwargs, tensors, _map_arguments)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nodes, position = self._graph.nodes, self._position
        named = nodes[position].name.split(", ") if position < len(nodes) else []
        inside = [t for m in self._module.named_modules() if m[0] and m[0] in named for t in _tensors_of(m[1])]
        with Visit(inside, self._device):
            return self._node("region", "", None, run, args, kwargs, tensor_arguments(args, kwargs), _map_arguments)

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def _any_known(self, tensors: Sequence[Tensor]) -> bool:
        return any(self.value_of(t) is not None for t in tensors)

    def _node(
        self,
        kind: str,
        name: str,
        module: nn.Module | None,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        map_tensors: Callable[..., Any],
    ) -> Any:
        index, nodes = self._position, self._graph.nodes
        node = nodes[index] if index < len(nodes) else None
        if node is None or node.kind != kind or (node.name != name and kind != "region"):
            raise StepChangedError(
                f"{self._graph.step} calls {name} where it called {node.name if node else 'nothing'} when it was "
                "captured; a step must do the same for every batch"
            )
        self._position += 1
        self._bar.update()
        if kind == "call" or (kind == "glue" and not (node.writes or node.states)):
            self._measure(node, module, run, lambda copy: map_tensors(copy, (args, kwargs)))
            objects = self._objects(node, module, args, kwargs)
            with saved_tensors_hooks(_drop, _dropped):
                result = run(*args, **kwargs)
            tensors = tensors if objects is None else [*tensors, *objects.tensors]
            given = self._given(result, objects)
        else:
            # What glue writes to may be a view of anything, so there is no copy to practise on; and the gradients of a
            # checkpointed region cannot be asked for. The backwards are estimated.
            with saved_tensors_hooks(_drop, _dropped):
                result, seconds = self._timed(lambda: run(*args, **kwargs))
            trains = any(t.requires_grad for t in tree.tensors(result))
            factor = _REGION_BACKWARD if kind == "region" else 1.0
            self._samples.found[self._kinds[index]].append(Sample(seconds, factor * seconds if trains else 0.0))
            if kind == "region" and trains:
                self.saved.update(node.inputs)
            given = tree.tensors(result)
        self._remember(node, given, tensors)
        return result

    def _objects(self, node: Node, module: nn.Module | None, args: Any, kwargs: Any) -> Objects | None:
        """What a node that writes into objects may write into."""
        if not node.opens:
            return None
        return Objects((args, kwargs), module.modules() if node.exports and module is not None else ())

    def _given(self, result: Any, objects: Objects | None) -> list[Tensor]:
        return tree.tensors(result) if objects is None else self._packer.pack(result, objects)[1]

    def _remember(self, node: Node, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for leaf, value in zip(given, node.outputs, strict=True):
            if value >= 0 and not self.is_known(leaf):
                self._learn(leaf, value)
        for i, value, base in node.writes:
            target = tensors[i]._base if base else tensors[i]
            if target is not None and not self.is_known(target):
                self._learn(target, value)

    def _learn(self, tensor: Tensor, value: int) -> None:
        self.know(tensor, value)
        self._homes.setdefault(storage_id(tensor), (tensor.detach(), value))

    # -- one node alone ---------------------------------------------------------------------------------------------

    def _measure(
        self,
        node: Node,
        module: nn.Module | None,
        run: Callable[..., Any],
        arguments: Callable[[Callable[[Tensor], Tensor]], Any],
    ) -> None:
        kind = self._kinds[node.index]
        timed = kind not in self._samples.complete and self._measured[kind] < _CALLS
        if not timed and not self._counts:
            return
        weights: list[Tensor] = [p for p in module.parameters() if p.requires_grad] if module is not None else []
        sums = [torch.zeros_like(p) for p in weights]
        begin = time.perf_counter()
        warm_up = self._alone(node, module, run, arguments, weights, sums, counts=self._counts)
        took = time.perf_counter() - begin
        if not timed:
            return
        self._measured[kind] += 1
        share = max(0.0, self._deadline - time.perf_counter()) / (len(self._graph.nodes) - node.index)
        if took > share:
            self._samples.found[kind].append(warm_up)
            return
        for _ in range(_REPETITIONS):
            self._samples.found[kind].append(self._alone(node, module, run, arguments, weights, sums))
            if time.perf_counter() - begin > min(share, _SHORT_S) + took:
                break

    def _alone(
        self,
        node: Node,
        module: nn.Module | None,
        run: Callable[..., Any],
        arguments: Callable[[Callable[[Tensor], Tensor]], Any],
        weights: list[Tensor],
        sums: list[Tensor],
        counts: bool = False,
    ) -> Sample:
        copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # id -> original, leaf, what the node gets

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) in given:
                return tensor
            if id(tensor) not in copies:
                leaf = tensor.detach()
                if tensor.requires_grad:
                    leaf.requires_grad_()
                # a node that writes gets a tensor that is nobody else's, and no leaf
                copies[id(tensor)] = (tensor, leaf, leaf.clone() if node.writes else leaf)
                given.add(id(copies[id(tensor)][2]))
            return copies[id(tensor)][2]

        given: set[int] = set()
        args, kwargs = arguments(copy)
        objects = Objects((args, kwargs))
        below = len(node.name) + 1
        changing = {name[below:] for name in node.states if name.startswith(f"{node.name}.")}
        with untouched(module, changing) if module is not None else random_state(), objects.restored():
            objects.replace_tensors(copy)  # what units collect in them has a history, which is not this node's
            written = self._objects(node, module, args, kwargs)
            torch.clear_autocast_cache()  # in training every micro-batch casts the weights anew
            kept: list[Tensor] = []

            def note(tensor: Tensor) -> Tensor:
                kept.append(tensor)
                return tensor

            # hooks of our own, so that those of a checkpointed region around this node do not act
            with saved_tensors_hooks(note if counts else _keep, _keep):
                result, forward_s = self._timed(lambda: run(*args, **kwargs))
            if counts:
                aliases = {storage_id(given): self._storage_value(tensor) for tensor, _, given in copies.values()}
                self._count(node, module, kept, self._given(result, written), aliases)
            outputs = list({id(t): t for t in self._given(result, written) if t.requires_grad}.values())
            sources = [leaf for _, leaf, _ in copies.values() if leaf.requires_grad] + weights
            if not outputs or not sources or not torch.is_grad_enabled():
                return Sample(forward_s, 0.0)
            try:
                backward_s = self._backward_s(outputs, sources, sums)
            except RuntimeError:  # a reentrant checkpoint inside cannot be asked for gradients: training shows the rest
                return Sample(forward_s, _REGION_BACKWARD * forward_s)
        return Sample(forward_s, max(0.0, backward_s - self._call_s))

    def _backward_s(self, outputs: list[Tensor], sources: list[Tensor], sums: list[Tensor]) -> float:
        """Seconds of a backward that adds to the sums the gradients of the last sources."""
        ones = [torch.ones_like(t) for t in outputs]

        def backward() -> None:
            gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
            with torch.no_grad():
                for total, gradient in zip(sums, gradients[len(sources) - len(sums) :], strict=True):
                    if gradient is not None:
                        total.add_(gradient)

        with torch.autocast(self._device.type, enabled=False):
            return self._timed(backward)[1]

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        return port_of(self._device).timed(work)

    # -- what stays -------------------------------------------------------------------------------------------------

    def _count(
        self,
        node: Node,
        module: nn.Module | None,
        kept: Sequence[Tensor],
        outputs: Sequence[Tensor],
        aliases: dict[int, int | None],
    ) -> None:
        """Note what a forward saved: values by their numbers, everything else in bytes."""
        own = {storage_id(t): value for t, value in zip(outputs, node.outputs, strict=True) if value >= 0}
        visitors = {storage_id(t) for t in _tensors_of(module)} if module is not None else set()
        inside: dict[int, int] = {}
        for tensor in kept:
            storage = storage_id(tensor)
            if storage in visitors or storage in self._excluded:
                continue
            value = aliases.get(storage)
            value = own.get(storage) if value is None else value
            if value is not None:
                self.saved.add(value)
            else:
                inside[storage] = _nbytes(tensor)
        self.internal[node.index] = sum(inside.values())

    def _storage_value(self, tensor: Tensor) -> int | None:
        home = self._homes.get(storage_id(tensor))
        return home[1] if home is not None else None


def _kinds(graph: CallGraph, module: nn.Module) -> list[Hashable]:
    """For each node what it has in common with those that take the same time."""

    def shapes(values: Sequence[int]) -> Hashable:
        found = (graph.values[v] for v in values if v >= 0)
        return tuple((v.shape, v.dtype, v.requires_grad) for v in found)

    kinds: list[Hashable] = []
    for node in graph.nodes:
        what: Hashable = node.name
        if node.kind == "call":
            unit = module.get_submodule(node.name)
            weights = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in unit.parameters())
            what = (type(unit).__qualname__, repr(unit), weights)
        kinds.append((node.kind, what, shapes(node.inputs), shapes(node.outputs), len(node.writes), node.flops))
    return kinds


def _map_arguments(fn: Callable[[Tensor], Tensor], arguments: Any) -> Any:
    """The inverse of ``tensor_arguments``: replaces what that finds."""
    if isinstance(arguments, Tensor):
        return fn(arguments)
    if type(arguments) in (list, tuple):
        return type(arguments)(_map_arguments(fn, a) for a in arguments)
    if type(arguments) is dict:
        return {key: _map_arguments(fn, a) for key, a in arguments.items()}
    return arguments


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(packed: None) -> Tensor:
    raise CaptureError("the step runs a backward itself, which cannot be measured; use costs='flops'")

"""Capture: run a step function once on one micro-batch and write down its call graph."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_avgpipe import tree
from lightning_avgpipe.capture.batch import BatchUse
from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.draws import DrawWatch, random_bits
from lightning_avgpipe.capture.graph import CallGraph, Node, Value
from lightning_avgpipe.capture.snapshot import untouched
from lightning_avgpipe.capture.tracer import CallWatcher, StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.capture.units import Units
from lightning_avgpipe.capture.visit import Visit
from lightning_avgpipe.errors import CaptureError, SkippedStepError
from lightning_avgpipe.source import source_line

__all__ = ["capture", "owned_tensors"]


def capture(
    step: str,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    units: Sequence[str],
    device: torch.device | None = None,
    ignore: Collection[nn.Module] = (),
) -> CallGraph:
    """Record what ``run(*args)`` does with the units of ``module``. Nothing remains of the execution.

    Args:
        step: name of the step function, for messages.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of the step, the micro-batch first.
        module: whose submodules are called.
        units: paths of the submodules that are never split; what else the step calls, outside of them, is a unit too.
        device: where to compute; parameters that are elsewhere visit it one unit at a time.
        ignore: modules that only observe.

    Raises:
        SkippedStepError: the step returned None in training.
        CaptureError: the step returned no loss in training.
    """
    glue_states: set[str] = set()
    while True:
        recorder = _Recorder(module, units, device, glue_states, ignore)
        try:
            # a step may change its batch
            graph = _record(recorder, step, run, tree.map_tensors(torch.clone, tuple(args)))
        except Exception as error:
            error.add_note(f"while {step} was followed on a first micro-batch, to learn what it calls")
            raise
        # Whether an operation on a buffer is a node must be known before the buffer is first changed.
        if recorder.glue_states <= glue_states:
            return graph
        glue_states |= recorder.glue_states


def _record(recorder: _Recorder, step: str, run: Callable[..., Any], args: Sequence[Any]) -> CallGraph:
    module = recorder.module
    batch = [(leaf, _version(leaf)) for leaf in tree.tensors(args)]
    if args:
        recorder.batch.begin(args[0])
    with untouched(module), recorder.visiting():
        with recorder.following(), watching(recorder.calls):
            result = run(*args)
        recorder.watch.look()
        if step == "training_step":
            _check_loss(result)
        recorder.keep(tree.tensors(result))
        recorder.find_reassigned_buffers()
    return CallGraph(
        step=step,
        nodes=tuple(recorder.drawn(node) for node in recorder.nodes),
        values=tuple(recorder.values),
        kept=frozenset(recorder.kept),
        units=recorder.units.found(),
        resident=frozenset(recorder.resident),
        drawing=frozenset(recorder.watch.drawing),
        host_drawing=frozenset(recorder.watch.host_drawing),
        leaves=recorder.batch.leaves(),
        batch_writes=any(_version(leaf) != version for leaf, version in batch),
        glue_states=frozenset(recorder.glue_states),
        pinned=tuple(recorder.pinned),
        opened=tuple(recorder.calls.ended),
    )


def _check_loss(result: Any) -> None:
    if result is None:
        raise SkippedStepError("training_step returned None, so it has not shown what leads to a loss")
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(result).__name__} instead of a loss; return a tensor, or a dict with the "
            "key 'loss', or None to skip a micro-batch"
        )


_ANYWHERE = sys.maxsize


def owned_tensors(module: nn.Module, glue_states: Collection[str]) -> dict[int, str]:
    """``id -> full name`` of the tensors that belong to one stage: parameters, and buffers that glue changes."""
    owned = {id(p): name for name, p in module.named_parameters()}
    if glue_states:
        owned |= {id(b): name for name, b in module.named_buffers() if name in glue_states}
    return owned


class _Recorder(StepTracer):
    """Executes everything and notes each node."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        device: torch.device | None,
        glue_states: Collection[str],
        ignore: Collection[nn.Module],
    ) -> None:
        self.module = module
        self.units = Units(module, units, ignore)
        self._device = device
        self._in_units = {id(t) for path in units for t in _tensors_of(module.get_submodule(path))}
        # a unit that is not called itself may have buffers that glue changes
        self._buffers = dict(module.named_buffers())
        self._buffer_names = {id(b): name for name, b in self._buffers.items()}
        self.glue_states = set(glue_states)
        super().__init__({}, owned_tensors(module, glue_states))
        self.watch = DrawWatch(module, device)
        self.calls = Calls(self.watch, self._is_outside, lambda: len(self.nodes))
        self.batch = BatchUse(device)
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.kept: set[int] = set()
        self.resident: set[str] = set()
        self.pinned: list[tuple[int, int, str]] = []
        self._storages: dict[int, int] = {}
        self._births = _Births()
        self._held: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique

    # -- nodes ------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        inputs = self._inputs(tensors)
        parameters = tuple(self._owned[id(p)] for p in module.parameters())
        versions, calls = [_version(t) for t in tensors], len(self.watch.calls)
        buffers = _copies_of_buffers(module, path)
        random_before = random_bits(self._device)
        with self._visit(module), self._births, _Flops() as counter:
            result = run(*args, **kwargs)
        draws = not torch.equal(random_before, random_bits(self._device))
        states = self._changed(buffers)
        if parameters or states or draws:
            self.resident.add(path)
        elif not inputs:
            self.batch.computed(tensors, len(self.nodes))
            return result
        flops = float(counter.get_total_flops()) or _recurrent_flops(module, result)
        self._add(
            Node(len(self.nodes), "call", path, source_line(), inputs, parameters=parameters, states=states,
                 draws=draws, drawn=tuple(self.watch.calls[calls:]),
                 flops=flops + sum(t.numel() for t in tree.tensors(result))),
            result, tensors, versions,
        )  # fmt: skip
        return result

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        versions, calls = [_version(t) for t in tensors], len(self.watch.calls)
        outer, used = _Outermost(self.watch, self._visit), _Used()
        random_before = random_bits(self._device)
        with watching(outer), self._births, used, _Flops() as counter:
            result = run(*args, **kwargs)
        parameters = tuple(dict.fromkeys(self._owned[id(t)] for t in used.tensors if id(t) in self._owned))
        names = dict.fromkeys(self.watch.path(module) for module in outer.modules)
        self._add(
            Node(len(self.nodes), "region", ", ".join(names) or "a function", source_line(),
                 self._inputs([*tensors, *used.tensors]), parameters=parameters, states=self._changed(outer.buffers),
                 draws=not torch.equal(random_before, random_bits(self._device)), drawn=tuple(self.watch.calls[calls:]),
                 flops=float(counter.get_total_flops()) + sum(t.numel() for t in tree.tensors(result))),
            result, tensors, versions,
        )  # fmt: skip
        self.batch.taken(used.tensors, len(self.nodes) - 1)
        return result

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        begin = len(self.nodes)
        yield from generator
        self.pinned.append(
            (begin + 1, len(self.nodes) - 1, f"it lies in a region of torch.utils.checkpoint at {source_line()}")
        )

    def drawn(self, node: Node) -> Node:
        """The node, of whose inner calls only those of drawing modules are left."""
        drawing = self.watch.drawing | self.watch.host_drawing
        return replace(node, drawn=tuple(path for path in node.drawn if path in drawing))

    def _changed(self, buffers: Sequence[tuple[str, Tensor, Tensor]]) -> tuple[str, ...]:
        # Compared by value: batch normalisation changes its statistics without a new version.
        changed = (name for name, b, before in buffers if self._buffer(name) is not b or not torch.equal(b, before))
        return tuple(dict.fromkeys(changed))

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensor_arguments(args, kwargs)
        inputs = self._inputs(tensors)
        parameters = tuple(dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned))
        name = function_name(func)
        self._refuse_hidden(tensors, name)
        versions = [_version(t) for t in tensors]
        free = not inputs and not parameters
        passive = free and self.batch.is_passed_on(func, args, kwargs, tensors)
        random_before = random_bits(self._device)
        with Visit([t for t in tensors if id(t) in self._in_units], self._device):
            result = func(*args, **kwargs)
        for tensor, version in zip(tensors, versions, strict=True):
            if id(tensor) in self._buffer_names and _version(tensor) != version:
                self.glue_states.add(self._buffer_names[id(tensor)])
        if passive:
            self.batch.passed_on(tensors, tree.tensors(result))
        elif free:
            self.batch.computed(tensors, len(self.nodes))
        if free:
            return result
        states = tuple(name for name in parameters if name in self.glue_states)
        parameters = tuple(name for name in parameters if name not in self.glue_states)
        if name in ("backward", "grad"):
            self.pinned.append((0, _ANYWHERE, f"the step calls {name}() itself at {source_line()}"))
        self._add(
            Node(len(self.nodes), "glue", name, source_line(), inputs, parameters=parameters, states=states,
                 draws=not torch.equal(random_before, random_bits(self._device)),
                 flops=float(sum(t.numel() for t in tree.tensors(result)))),
            result, tensors, versions,
        )  # fmt: skip
        return result

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.observe()
        self.keep(tree.tensors((args, kwargs)))
        return run(*args, **kwargs)

    def _add(self, node: Node, result: Any, tensors: list[Tensor], versions: list[int]) -> None:
        self.batch.taken(tensors, node.index)
        writes: list[tuple[int, int, bool]] = []
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if _version(tensor) == version:
                continue
            for target, base in ((tensor, False), (tensor._base, True)):
                if target is not None:
                    known = self.value_of(target) if self.is_known(target) else None
                    writes.append((i, self._new_value(target, node.name) if known is None else known, base))
        outputs = []
        for leaf in tree.tensors(result):
            if self.is_known(leaf):
                outputs.append(self._known[id(leaf)][1])
                continue
            same = next((i for i, t in enumerate(tensors) if t is leaf), None)
            outputs.append(-1 - same if same is not None else self._new_value(leaf, node.name))
        self.nodes.append(replace(node, outputs=tuple(outputs), writes=tuple(dict.fromkeys(writes))))

    def _is_outside(self, module: nn.Module) -> bool:
        """Whether a module, which is called now, is no unit and in no unit."""
        return not self._inside and self.unit(module) is None

    def unit(self, module: nn.Module) -> str | None:
        return self.units.path(module)

    def _inputs(self, tensors: list[Tensor]) -> tuple[int, ...]:
        found = (self.value_of(t) for t in tensors)
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def _new_value(self, tensor: Tensor, name: str) -> int:
        index = len(self.values)
        storage = self._storages.setdefault(_storage(tensor), len(self._storages))
        self.values.append(
            Value(
                index, name, tuple(tensor.shape), str(tensor.dtype), tensor.numel() * tensor.element_size(),
                tensor.requires_grad, storage,
            )
        )  # fmt: skip
        self._held.append(tensor)
        self.know(tensor, index)
        return index

    # -- what stages cannot share ------------------------------------------------------------------------------------

    def keep(self, tensors: list[Tensor]) -> None:
        """These tensors are needed at the end of the step."""
        self.kept.update(self._inputs(tensors))
        self.batch.kept(tensors)

    def _refuse_hidden(self, tensors: list[Tensor], name: str) -> None:
        """A tensor that was made inside a unit and came out of no node was left behind, say in an attribute."""
        for tensor in tensors:
            if self._births.include(tensor) and self.value_of(tensor) is None:
                self.pinned.append(
                    (0, len(self.nodes), f"{name}() at {source_line()} reads a tensor that a unit left in an attribute")
                )

    def find_reassigned_buffers(self) -> None:
        """A buffer that glue replaces by a new tensor must be replaced on the last stage only."""
        after = dict(self.module.named_buffers())
        by_units = {name for node in self.nodes if node.kind != "glue" for name in node.states}
        for name, buffer in self._buffers.items():
            if name not in by_units and after.get(name, buffer) is not buffer:
                self.glue_states.add(name)
                first = next((node.index for node in self.nodes if name in node.states), 0)
                self.pinned.append((first + 1, _ANYWHERE, f"the step assigns a new tensor to the buffer '{name}'"))

    def _buffer(self, name: str) -> Tensor | None:
        path, _, leaf = name.rpartition(".")
        return self.module.get_submodule(path)._buffers.get(leaf)

    # -- device -------------------------------------------------------------------------------------

    def visiting(self) -> Any:
        """What lies outside of units is on the device while the step is captured."""
        return Visit([t for t in _tensors_of(self.module) if id(t) not in self._in_units], self._device)

    def _visit(self, module: nn.Module) -> Any:
        return Visit(_tensors_of(module), self._device)


class _Births(TorchDispatchMode):
    """Remembers the tensors that are made inside units, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = weakref.ref(tensor)
        return result

    def include(self, tensor: Tensor) -> bool:
        """Whether this very tensor was made inside a unit."""
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor


class _Outermost(CallWatcher):
    """Passes calls on to another watcher; the outermost modules bring their parameters to the device.

    Attributes:
        modules: the outermost ones, in order.
        buffers: theirs, as of before the call.
    """

    def __init__(self, watch: DrawWatch, visit: Callable[[nn.Module], Any]) -> None:
        self._watch = watch
        self._visit = visit
        self._visits: list[Any] = []
        self._depth = 0
        self.modules: list[nn.Module] = []
        self.buffers: list[tuple[str, Tensor, Tensor]] = []

    def enter(self, module: nn.Module) -> None:
        if self._depth == 0:
            self.modules.append(module)
            self.buffers += _copies_of_buffers(module, self._watch.path(module))
            self._visits.append(self._visit(module))
            self._visits[-1].__enter__()
        self._depth += 1
        self._watch.enter(module)

    def leave(self, module: nn.Module) -> None:
        self._watch.leave(module)
        self._depth -= 1
        if self._depth == 0:
            self._visits.pop().__exit__()


class _Used(TorchFunctionMode):
    """Collects the tensors that torch functions take."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors += tensor_arguments(args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Flops(FlopCounterMode):
    """Counts the operations of a unit as a whole.

    Torch's own per-module counts need gradient hooks, which fail where a parameter is the argument of a module and
    gradients are off, as in a parametrization under ``torch.inference_mode``.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]


class _NoModules(contextlib.nullcontext[None]):
    parents = frozenset({"Global"})

    def __exit__(self, *exc_info: object) -> None:
        """Torch passes no arguments."""


def _copies_of_buffers(module: nn.Module, path: str) -> list[tuple[str, Tensor, Tensor]]:
    """Full name, buffer and a copy of it, for all buffers of a module."""
    return [(f"{path}.{name}", b, b.detach().clone()) for name, b in module.named_buffers()]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none
        return id(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _recurrent_flops(unit: nn.Module, result: Any) -> float:
    """Fused recurrent kernels are not counted by torch: two operations per weight and time step."""
    weights = sum(p.numel() for m in unit.modules() if isinstance(m, nn.RNNBase) for p in m.parameters())
    outputs = tree.tensors(result)
    rows = outputs[0].numel() // max(outputs[0].shape[-1], 1) if weights and outputs and outputs[0].ndim else 0
    return 2.0 * weights * rows

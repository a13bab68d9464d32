"""Recomputation: a stage keeps its inputs instead of its activations, and repeats its forward before the backward.

::

    plain                  F0 F1 . . . B0 ......... keeps all that F0 and F1 computed
    recompute=True         F0 F1 . . . F0'B0 ...... keeps what F0 and F1 received; F0' is the replay once more
    recompute=["blocks"]   F0 F1 . . . B0'......... keeps the inputs of these units, each repeated within the backward

The whole stage: the step function is replayed a second time, with the numbers, random numbers and state of the first
time, so glue, autocast and everything else that the step does around its units is as it was. Only the backward's
transient is one full stash, whatever is in flight. Single units: ``torch.utils.checkpoint``; no glue is repeated, and
the last stage benefits even where its backward follows at once.

A repetition leaves no trace: buffers and attributes of modules are as before it, and nothing is logged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.outside import outside
from lightning_avgpipe.capture.snapshot import Attributes, attribute_values, random_state
from lightning_avgpipe.engine.own_module import OwnModule
from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.planning.recompute_policy import Recompute, repeated
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.random_streams import RandomState

# -- what a repetition finds, and leaves -----------------------------------------------------------------------------


class _Repeating(threading.local):
    now = False


_repeating = _Repeating()


def is_repeating() -> bool:
    """Whether this thread repeats a forward, whose effects have happened already."""
    return _repeating.now


class Surroundings:
    """The state of modules that a forward reads and changes, as it was before the forward.

    Made before the first execution. Buffers are known to change from the capture, and copied; of attributes those are
    kept which the first execution changes.

    Args:
        modules: that the forward may change.
        buffers: ids of the buffers of theirs that it changes.
        parameters: that it writes into.
        read: what leads to objects that it reads or changes, and others may change before it is repeated.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        buffers: set[int],
        parameters: Sequence[nn.Parameter] = (),
        read: Sequence[Any] = (),
    ) -> None:
        self._modules = modules
        self._read = read
        self._objects, self._inner = self._now()
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._before = Attributes(modules)
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        copies: dict[int, Tensor] = {}
        for module in modules if buffers else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in buffers:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    self._buffers.append((module, name, copies[id(buffer)]))

    def _now(self) -> tuple[Objects, Objects]:
        return Objects(self._read, opaque=True), Objects(attribute_values(self._modules), opaque=True)

    def done(self) -> None:
        """The first execution has ended."""
        self._before.keep_changed()
        self._inner = self._inner.among(set(map(id, self._inner.changed())))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within this context the modules are as before the first execution; then as they were before this context.

        Raises:
            StepChangedError: a tensor that is no buffer was changed in place, which cannot be undone.
        """
        now, (objects, inner) = Attributes(self._modules), self._now()
        outer, _repeating.now = _repeating.now, True
        self._before.restore()
        self._inner.restore()
        self._objects.restore()
        for module, name, copy in self._buffers:
            # other objects, not other contents: what was saved for a backward stays as it is
            module._buffers[name] = copy
        memory = [(parameter, parameter.detach()) for parameter, _ in self._parameters]
        for parameter, copy in self._parameters:
            parameter.data = copy
        try:
            yield
            written = now.written()
        finally:
            _repeating.now = outer
            now.restore()
            inner.restore()
            objects.restore()
            for parameter, own in memory:
                parameter.data = own
        if written is not None:
            raise StepChangedError(
                f"'{written[1]}' of {type(written[0]).__name__} is a tensor that a forward changes in place, and its "
                "repetition (recompute) changed it once more; make it a buffer (register_buffer), or do without "
                "recompute"
            )


class Observations:
    """What ``self.log`` and metrics returned in the first execution; they are not called again.

    Args:
        observe: calls them; None: they are called as they are.
    """

    def __init__(self, observe: Callable[[Callable[..., Any], Any, Any], Any] | None = None) -> None:
        self._observe = observe
        self._results: list[Any] = []

    def first(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Observe."""
        result = run(*args, **kwargs) if self._observe is None else self._observe(run, args, kwargs)
        if any(tensor.grad_fn is not None for tensor in tree.tensors(result)):
            raise ConfigurationError(
                "a metric returned a value with a gradient, which cannot be repeated without updating the metric "
                "twice; compute the loss from a function, or do without recompute"
            )
        self._results.append(result)
        return result

    def again(self) -> Callable[[Callable[..., Any], Any, Any], Any]:
        """What to call in the repetition: gives the same results in the same order."""
        results = iter(self._results)
        return lambda run, args, kwargs: next(results)


# -- single units ----------------------------------------------------------------------------------------------------


class UnitRepeater:
    """Makes calls of units keep their inputs only.

    Args:
        module: the whole module.
        recompute: which units.
        device: of the stage.
        read: what leads to objects outside of units that units may change, and that change otherwise.
    """

    def __init__(self, module: nn.Module, recompute: Recompute, device: torch.device, read: Sequence[Any] = ()) -> None:
        self._module = module
        self._read = read
        self._parameters = frozenset(name for name, _ in module.named_parameters())
        self._recompute = recompute
        self._device = device

    def __call__(self, node: Node, run: Callable[..., Any]) -> Callable[..., Any]:
        """What executes the unit: ``run`` itself where it was not chosen."""
        if not self._recompute.includes(node.name) or not torch.is_grad_enabled():
            return run
        modules = list(self._module.get_submodule(node.name).modules())
        buffers = {id(self._buffer(name)) for name in node.states}
        draws = RandomState(self._device)  # the unit was seeded just now; if it has not drawn so far, it may begin to
        parameters = [self._module.get_parameter(name) for name in node.states if name in self._parameters]
        surroundings: Surroundings | None = None

        def unit(*args: Any, **kwargs: Any) -> Any:
            nonlocal surroundings
            if surroundings is None:
                surroundings = Surroundings(modules, buffers, parameters, (args, kwargs, *self._read))
                result = run(*args, **kwargs)
                surroundings.done()
                return result
            with surroundings.again(), random_state():
                draws.put(self._device)
                return run(*args, **kwargs)

        def repeatable(*args: Any, **kwargs: Any) -> Any:
            # what is drawn inside is seeded by whoever watches
            return checkpoint(unit, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return repeatable

    def _buffer(self, name: str) -> Tensor | None:
        path, _, leaf = name.rpartition(".")
        return self._module.get_submodule(path)._buffers.get(leaf)


# -- stages ----------------------------------------------------------------------------------------------------------


class Repetition:
    """What a stage, or a neighbour that has what it received, does once more.

    Args:
        own: what the stage makes of the module.
        device: where it computes.
        recompute: what is to be repeated.
        relayed: whether what the stage receives goes on to the next one.

    Attributes:
        overwritten: received values that the stage changes in place, and somebody needs once more.
        units: makes calls of units keep their inputs; None: none does.
    """

    def __init__(self, own: OwnModule, device: torch.device, recompute: Recompute, relayed: bool) -> None:
        program, module = self._program, self._module = own.program, own.module
        self._stages = recompute.stages
        repeats = bool(recompute.stages or recompute.modules)
        self._read = [*own.attributes.variables, *_unowned(program, module)] if repeats else []
        self.units = UnitRepeater(module, recompute, device, self._read) if recompute.modules else None
        self._scope = _scope(program, module) if recompute.stages else []
        self.overwritten = _overwritten(program) if recompute.stages or relayed else frozenset[int]()
        self._micro_batches: frozenset[int] = frozenset()

    def follow(self, row: Sequence[Action]) -> None:
        """These actions of the stage follow; forwards whose backwards are not among them come with those that do."""
        self._micro_batches = repeated(row, self._program.is_last) if self._stages else frozenset()

    def __contains__(self, micro_batch: int) -> bool:
        """Whether the forward of a micro-batch is repeated."""
        return micro_batch in self._micro_batches

    def surroundings(self, rewritten: Sequence[nn.Parameter]) -> Surroundings:
        """Of a forward that begins, which writes into these parameters."""
        states = {name for node in self._program.nodes for name in node.states}
        buffers = {id(b) for name, b in self._module.named_buffers() if name in states} if states else set()
        return Surroundings(self._scope, buffers, rewritten, self._read)


def _scope(program: StageProgram, module: nn.Module) -> list[nn.Module]:
    """The modules that a stage's forward may change: its units, and what lies outside of all units."""
    mine = {node.name for node in program.nodes if node.kind == "call"}
    foreign = {
        id(inner)
        for path in program.graph.units
        if path not in mine and path in program.graph.resident
        for inner in module.get_submodule(path).modules()
    }
    foreign.difference_update(id(inner) for path in mine for inner in module.get_submodule(path).modules())
    return [m for m in module.modules() if id(m) not in foreign]


def _unowned(program: StageProgram, module: nn.Module) -> list[Any]:
    """The variables that units change (global counters); of others generators, from which they may begin to draw."""
    changed, found = {name for path, name in program.graph.of_units if not path}, list[Any]()
    for name, variable in outside(module).items():
        found += [variable] if name in changed else Objects([variable], opaque="generators").opaque
    return found


def _overwritten(program: StageProgram) -> frozenset[int]:
    """The received values that a stage changes in place, by themselves or by a value in the same memory."""
    values = program.graph.values
    written = {values[v].storage for node in program.nodes for _, v, _ in node.writes}
    return frozenset(value for value in program.receives if values[value].storage in written)

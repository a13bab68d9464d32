"""Recompute: a stage keeps its inputs instead of its activations, and repeats its forward before the backward.

::

    plain                  F0 F1 . . . B0 ......... keeps all that F0 and F1 computed
    recompute=True         F0 F1 . . . F0'B0 ...... keeps what F0 and F1 received; F0' replays F0
    recompute=["blocks"]   F0 F1 . . . B0'......... keeps the inputs of these units, each repeated within the backward

For a whole stage, the step function is replayed a second time with the inputs, random numbers and state of the first
time. So glue, autocast and everything else around the units is the same. Only one full stash exists at a time, during
the backward, however many micro-batches are in flight. Single units use ``torch.utils.checkpoint``: no glue is
repeated, and the last stage saves memory even if its backward follows at once.

A repetition has no lasting effects: it restores buffers and attributes of modules, and logs nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.engine.own_module import OwnModule
from lightning_avgpipe.engine.part import Observe
from lightning_avgpipe.engine.tensor_use import held_in, registers_of
from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.planning.recompute_policy import Recompute, repeated
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import attributes, random_state
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import RandomState

# -- the state for a repetition -------------------------------------------------------------------------------------


class _Repeating(threading.local):
    now = False


_repeating = _Repeating()


def is_repeating() -> bool:
    """Return whether this thread repeats a forward, whose side effects have happened already."""
    return _repeating.now


class ForwardState:
    """The state of modules that a forward reads and changes, as it was before the forward.

    It must be constructed before the first execution. Buffers and parameters that changed in the capture are copied. Of
    the attributes, those that the first execution changes are kept.

    Args:
        modules: modules that the forward may change.
        changed: parameters and buffers of these modules that it changes.
        read: roots of objects that it reads or changes, and that other code may change before the repetition.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        changed: Collection[Tensor],
        read: Sequence[Any],
    ) -> None:
        self._modules = modules
        self._read = read
        self._before = self._now()
        self._parameters = [(p, p.detach().clone()) for p in changed if isinstance(p, nn.Parameter)]
        copies = {id(b): b.detach().clone() for b in changed if not isinstance(b, nn.Parameter)}
        self._buffers = [
            (module, name, copies[id(buffer)])
            for module in (modules if copies else ())
            for name, buffer in module._buffers.items()
            if id(buffer) in copies
        ]

    def _now(self) -> tuple[Snapshot, Snapshot]:
        return Snapshot(self._read, opaque=True), attributes(self._modules)

    def done(self) -> None:
        """End the first execution: keep only what it has changed."""
        self._before[1].drop_unchanged()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state before the first execution within this context, and the present state after it.

        Raises:
            StepChangedError: a tensor that is not a buffer was changed in place, which cannot be undone.
        """
        now = self._now()
        outer, _repeating.now = _repeating.now, True
        for before in self._before[::-1]:
            before.restore()
        for module, name, copy in self._buffers:
            # a new object, since a backward may need the saved contents, and each repetition changes its buffer
            module._buffers[name] = copy.clone()
        memory = [(parameter, parameter.detach()) for parameter, _ in self._parameters]
        for parameter, copy in self._parameters:
            parameter.data = copy.clone()
        try:
            yield
            written = set(map(id, now[1].written()))
        finally:
            _repeating.now = outer
            for present in now[::-1]:
                present.restore()
            for parameter, own in memory:
                parameter.data = own
        for module in self._modules if written else ():
            for name, held in (*vars(module).items(), *module._buffers.items()):
                if id(held) in written:
                    raise StepChangedError(
                        f"'{name}' of {type(module).__name__} is a tensor that a forward changes in place, and its "
                        "repetition (recompute) changed it once more; make it a buffer (register_buffer), or do "
                        "without recompute"
                    )


class Observations:
    """The results of ``self.log`` and metrics in the first execution, which its repetition reuses.

    Args:
        observe: calls these functions; None: they are called directly.
    """

    def __init__(self, observe: Observe | None) -> None:
        self._observe = observe
        self._results: list[Any] = []

    def first(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that observes, and keep its result."""
        result = run(*args, **kwargs) if self._observe is None else self._observe(run, args, kwargs)
        if any(tensor.grad_fn is not None for tensor in tree.tensors(result)):
            raise ConfigurationError(
                "a metric returned a value with a gradient, which cannot be repeated without updating the metric "
                "twice; compute the loss from a function, or do without recompute"
            )
        self._results.append(result)
        return result

    def again(self) -> Observe:
        """Return a function for the repetition that returns the same results in the same order."""
        results = iter(self._results)
        return lambda run, args, kwargs: next(results)


# -- stages ----------------------------------------------------------------------------------------------------------


class Repetition:
    """The forwards that a stage repeats for their backwards.

    Args:
        own: the module as the stage sees it.
        device: device of the stage.
        recompute: options that choose what is repeated.
        relayed: whether the values that the stage receives are relayed to the next one.

    Attributes:
        overwritten: received values that the stage changes in place although they are needed again.
        units: wraps the function that executes a unit, so that it keeps only its inputs; None: no unit is repeated.
    """

    def __init__(self, own: OwnModule, device: torch.device, recompute: Recompute, relayed: bool) -> None:
        program, module = own.program, own.module
        self._program, self._module, self._device = program, module, device
        self._recompute = recompute
        repeats = bool(recompute.stages or recompute.modules)
        self._read = [*own.attributes.variables, *_unowned(program, module)] if repeats else []
        self.units = self._repeatable if recompute.modules else None
        self._scope = _scope(program, module) if recompute.stages else []
        self._registers = registers_of(module, program.states if recompute.stages else ())
        self.overwritten = _overwritten(program) if recompute.stages or relayed else frozenset[int]()
        self._micro_batches: frozenset[int] = frozenset()

    def follow(self, row: Sequence[Action]) -> None:
        """Take the next actions of the stage, with the backward of each forward that is to be repeated."""
        self._micro_batches = repeated(row, self._program.is_last) if self._recompute.stages else frozenset()

    def __contains__(self, micro_batch: int) -> bool:
        """Return whether the forward of a micro-batch is repeated."""
        return micro_batch in self._micro_batches

    def surroundings(self) -> ForwardState:
        """Return a record of the state before a forward of the stage."""
        return ForwardState(self._scope, held_in(self._registers).values(), self._read)

    def _repeatable(self, node: Node, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that executes a unit so that it keeps only its inputs, if the unit was chosen."""
        if not self._recompute.includes(node.name) or not torch.is_grad_enabled():
            return run
        modules = list(self._module.get_submodule(node.name).modules())
        changed = held_in(registers_of(self._module, node.states)).values()
        draws = RandomState(self._device)  # kept for every unit, since it may begin to draw
        surroundings: ForwardState | None = None

        def unit(*args: Any, **kwargs: Any) -> Any:
            nonlocal surroundings
            if surroundings is None:
                surroundings = ForwardState(modules, changed, (args, kwargs, *self._read))
                result = run(*args, **kwargs)
                surroundings.done()
                return result
            with surroundings.again(), random_state():
                draws.restore(self._device)
                return run(*args, **kwargs)

        def repeatable(*args: Any, **kwargs: Any) -> Any:
            # a watcher seeds the draws, so the checkpoint need not restore generators
            return checkpoint(unit, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return repeatable


def _scope(program: StageProgram, module: nn.Module) -> list[nn.Module]:
    """Return the modules that a stage's forward may change: its units, and what lies outside of all units."""
    mine = program.called
    foreign = {
        id(inner)
        for path in program.graph.units
        if path not in mine and path in program.graph.resident
        for inner in module.get_submodule(path).modules()
    }
    foreign.difference_update(id(inner) for path in mine for inner in module.get_submodule(path).modules())
    return [m for m in module.modules() if id(m) not in foreign]


def _unowned(program: StageProgram, module: nn.Module) -> list[Any]:
    """Return the variables outside of modules that units change, and the random generators that others lead to."""
    changed, found = {name for path, name in program.graph.changed_by_units if not path}, list[Any]()
    for name, variable in outside_variables(module).items():
        found += [variable] if name in changed else Snapshot([variable], opaque="generators").opaque
    return found


def _overwritten(program: StageProgram) -> frozenset[int]:
    """Return the received values that a stage changes in place, directly or through a value that shares memory."""
    values = program.graph.values
    written = {values[v].storage for node in program.nodes for _, v, _ in node.writes}
    return frozenset(value for value in program.receives if values[value].storage in written)

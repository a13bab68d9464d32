"""Make random numbers depend on what is computed, not on where or when.

Every module that draws gets a stream of numbers seeded by (seed, iteration, pipeline, micro-batch, module, occurrence
of the call). So partition, schedule and advance do not change a result. The process's own generators are restored
afterwards.

A module without children (a dropout layer, an LSTM) is seeded when it is called, unless it is a layer of torch that
never draws. A module with children, and the step's own code, is seeded anew before each drawing function that it calls.
One stage may run such a function inside of a unit, another as glue between units, and both must draw the same numbers.

Code outside of units runs on every stage, and may begin to draw at any time (in a later epoch, or by chance), so its
functions are always watched. Those inside of a unit are watched only if it drew when the step was captured. A unit that
begins to draw later draws from a stream of its own, so it does not affect code outside of it. Streams of Python's and
NumPy's generators take too long to be begun in vain. Units have them if anything drew from these generators when the
step was captured, or in an earlier iteration. In the first such iteration, a unit draws from the stream that its stage
has for the micro-batch.

A module in a unit may seed torch's generators itself (``torch.manual_seed``). From then on, until its call ends, it and
the modules that it calls draw from the generators as it has seeded them.

A region that ``torch.utils.checkpoint`` runs again in a backward draws the same numbers again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.capture.random_skips import may_draw
from lightning_avgpipe.capture.tracer import CallWatcher, StepTracer, function_name, watching
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import (
    RandomKey,
    generators,
    host_stream,
    peek_host,
    restored,
    seed_host,
    seeds_of,
    stream,
)

# fmt: off
DRAWING_FUNCTIONS = frozenset((
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout", "rrelu", "rrelu_",
    "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward",
    "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "rand", "rand_like", "randn", "randn_like",
    "randint", "randint_like", "randperm", "bernoulli", "bernoulli_", "normal", "normal_", "multinomial", "poisson",
    "binomial", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_",
    "_standard_gamma", "_sample_dirichlet",
))
# Layers that never draw, whatever their mode and attributes are.
_NEVER_DRAWING = frozenset((
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d,
    nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Identity,
    nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
))
# fmt: on

# Path of the module that draws, number of its earlier calls, and number of the drawing function within the call.
Draw = tuple[str, int, int]


def may_draw_itself(name: str) -> bool:
    """Return whether a torch function of this name may draw random numbers."""
    return name in DRAWING_FUNCTIONS or name.endswith(".apply")


@dataclass(frozen=True)
class DrawingCall:
    """A description of how calls of a module draw random numbers.

    Attributes:
        path: path of the module; "" is the step's own code.
        is_simple: whether the module has no children.
        on_host: whether it may draw from the generators of Python or NumPy.
        is_unit: whether it is a unit, so that one stage executes its calls and the others skip them.
        seeds: whether it seeds torch's generators itself.
        is_plain: whether it is a layer of torch, such as dropout, that needs at most torch's generators to be seeded.
        never_draws: whether it draws no random numbers in any mode.
    """

    path: str
    is_simple: bool
    on_host: bool
    is_unit: bool
    seeds: bool
    is_plain: bool
    never_draws: bool


@dataclass(frozen=True)
class Drawing:
    """The modules of a step that draw, or may draw, random numbers.

    Attributes:
        calls: id of a module -> how its calls draw.
        composite: paths of the modules that have children and whose own code may draw.
        known: ids of all modules of the root; other modules, which the step makes, draw for their callers.
        seen: whether anything drew, from whatever generator, when the step was captured.
        on_host: whether anything drew from the generators of Python or NumPy then.
        late_on_host: whether anything has begun to draw from these since.
    """

    calls: Mapping[int, DrawingCall]
    composite: frozenset[str]
    known: frozenset[int]
    seen: bool
    on_host: bool
    late_on_host: bool = False

    @classmethod
    def of(cls, module: nn.Module, graph: CallGraph) -> Drawing:
        """Find the modules of a step that draw or may draw.

        Included are all modules outside of units, and those that by chance did not draw when the step was captured.
        """
        drawing, host_drawing, units = may_draw(graph, module), graph.host_drawing, frozenset(graph.units)
        inside = {id(inner) for path in units for inner in module.get_submodule(path).modules()}
        outside = {path for path, inner in module.named_modules() if id(inner) not in inside}
        # if a module has several names, the last one counts; names of captured calls come last
        names = sorted({*drawing, *host_drawing, *outside, *units}, key=lambda path: (path in graph.called, path))
        modules = {path: module.get_submodule(path) for path in names}
        simple = frozenset(path for path, m in modules.items() if path and not any(True for _ in m.children()))
        composite = frozenset((*drawing, *outside)) - simple
        host = frozenset(("", *host_drawing, *units))
        never = frozenset(path for path, m in modules.items() if _never_draws(m)).difference(drawing)
        calls = {
            id(m): DrawingCall(
                path,
                is_simple=path in simple,
                on_host=path in host,
                is_unit=path in units,
                seeds=path in graph.seeding,
                # the stream of a unit begins only if it turns out that the unit is executed here
                is_plain=path in simple.difference(host_drawing, graph.seeding)
                and (path in never or (path not in units and _is_of_torch(m))),
                never_draws=path in never,
            )
            for path, m in modules.items()
        }
        seen, on_host = bool(drawing or host_drawing), bool(host_drawing)
        return cls(calls, composite, frozenset(map(id, module.modules())), seen, on_host)

    def watches_functions(self, node: Node) -> bool:
        """Return whether functions called within a node are watched, since they may draw."""
        composite = self.composite
        return node.kind != "glue" and (node.name in composite or not composite.isdisjoint(node.drawn))


class _Scope:
    """One call of a module: its path, the number of earlier calls, and the drawing functions called so far.

    Attributes:
        begins: for a unit, how its call draws, until it is known that the unit is executed here and its stream begins;
            else None.
    """

    begins: DrawingCall | None = None
    functions = 0
    regions = 0
    _entered: tuple[contextlib.AbstractContextManager[Any], ...] = ()

    def __init__(self, path: str, occurrence: int, seeds_functions: bool) -> None:
        self.path = path
        self.occurrence = occurrence
        self.seeds_functions = seeds_functions

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter a context for the rest of the call."""
        context.__enter__()
        self._entered = (*self._entered, context)

    def leave(self) -> None:
        """End the call."""
        for context in self._entered[::-1]:
            context.__exit__(None, None, None)

    def region(self) -> _Scope:
        """Return the scope of a region that is checkpointed in one piece.

        The region counts its draws separately, since not every stage executes it if the call is split. Every process
        must call this at the same point of the call.
        """
        self.regions += 1
        return _Scope(f"{self.path}<{self.regions}>", self.occurrence, self.seeds_functions)

    def copy(self) -> _Scope:
        """Return a copy of the scope with its present counts, and without contexts."""
        copied = _Scope(self.path, self.occurrence, self.seeds_functions)
        copied.functions, copied.regions = self.functions, self.regions
        return copied


_QUIET = _Scope("", 0, False)
_NOTHING = contextlib.nullcontext()


class Draws(CallWatcher):
    """A watcher that seeds the draws in one execution of a step, and counts calls and functions.

    Args:
        drawing: modules that draw or may draw.
        key: key of the execution.
        device: device of the stage.
    """

    def __init__(self, drawing: Drawing, key: RandomKey, device: torch.device) -> None:
        self.only: Container[int] | None = drawing.calls
        self._drawing = drawing
        self._key = key
        self._device = device
        self._generators = generators(device)
        self._counts: dict[str, int] = {}
        self._scopes = [_Scope("<step>", 0, True)]
        self._within = False  # whether a unit is running in which functions draw
        self._functions: _Functions | None = None  # None unless functions are watched
        self._seeding: _Scope | None = None  # the outermost call of a module that may seed
        self._given: tuple[int, ...] = ()  # seeds that the generators got last within that call
        self._has_seeded = False

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with a stream for draws that have no other; it restores torch's generators at its end."""
        return stream(self._key.derive("step"), self._device)

    # -- calls of modules ---------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module by ``run`` instead of ``nn.Module.__call__``, and watch the call."""
        if not self.enter(module):
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            self.leave(module)

    def enter(self, module: nn.Module) -> bool:
        call = self._drawing.calls.get(id(module))
        if call is None:
            if is_known := id(module) in self._drawing.known:
                self._scopes.append(_QUIET)
            return is_known
        path = call.path
        occurrence = self._counts.get(path, 0)
        self._counts[path] = occurrence + 1
        hooked = module._forward_hooks or module._forward_pre_hooks
        if call.is_plain and not hooked and self._functions is None and self._seeding is None:
            if not call.never_draws:
                seed = self._key.derive(path, occurrence)
                for generator in self._generators:
                    generator.manual_seed(seed)
            return False  # the scope of such a layer is never needed
        scope = _Scope(path, occurrence, path in self._drawing.composite)
        self._scopes.append(scope)
        if call.seeds and self._seeding is None:
            self._seeding, self._given = scope, seeds_of(self._device)
        if not call.is_unit or module._forward_hooks or StepTracer.current() is None:
            self._begin(scope, call, self._drawing.on_host)
        else:
            scope.begins = call
        if self._within and self._functions is None and path in self._drawing.composite:
            scope.enter(_Functions(self))
        return True

    def begin_unit(self, elsewhere: bool = False) -> None:
        """Begin the stream of the unit that was called last, since it is executed here.

        Args:
            elsewhere: whether other stages execute it too.
        """
        scope, drawing = self._scopes[-1], self._drawing
        if scope.begins is not None:
            # each stage notices late draws for itself, so these must not affect streams that several stages use
            self._begin(scope, scope.begins, drawing.on_host or (drawing.late_on_host and not elsewhere))
            scope.begins = None

    def _begin(self, scope: _Scope, call: DrawingCall, on_host: bool) -> None:
        # any unit gets a stream, since it may begin to draw after the capture
        if call.is_simple or call.is_unit:
            self.begin_stream(self._key.derive(scope.path, scope.occurrence))
        if on_host and call.on_host:
            scope.enter(host_stream(self._key.derive(scope.path, scope.occurrence)))

    def leave(self, module: nn.Module) -> None:
        scope = self._scopes.pop()
        if scope is self._seeding:
            self._seeding, self._has_seeded = None, False
        if scope._entered:
            scope.leave()

    def begin_on_host(self) -> tuple[float, float] | None:
        """Begin the stream of Python's and NumPy's generators for code outside of units.

        Returns:
            The first numbers of the stream if nothing is expected to draw from it, to find out whether anything did;
            else None.
        """
        seed, first = self._key.derive("host"), None
        if not (self._drawing.on_host or self._drawing.late_on_host):
            seed_host(seed)
            first = peek_host()
        seed_host(seed)
        return first

    def skip(self, calls: Sequence[str]) -> None:
        """Count calls of the modules with these paths, which another stage executes."""
        for path in calls:
            self._counts[path] = self._counts.get(path, 0) + 1

    @property
    def seed(self) -> int:
        """The seed of a stream for all draws of the running call."""
        scope = self._scopes[-1]
        return self._key.derive(scope.path, scope.occurrence)

    def begin_stream(self, seed: int) -> None:
        """Begin a new stream for later draws, unless a running module has seeded the generators itself."""
        if self._seeding is not None:
            self._has_seeded = self._has_seeded or seeds_of(self._device) != self._given
            if self._has_seeded:
                return
        for generator in self._generators:
            generator.manual_seed(seed)
        if self._seeding is not None:
            self._given = seeds_of(self._device)

    # -- functions ----------------------------------------------------------------------------------------------------

    def function(self, name: str) -> Draw | None:
        """Begin a stream for a torch function called as glue, if a function of this name may draw.

        Returns:
            The draw whose stream has begun, or None.
        """
        return self.drawing_function() if may_draw_itself(name) else None

    def drawing_function(self) -> Draw | None:
        """Begin a stream for a function that may draw; return its draw, or None if it has no stream of its own."""
        scope = self._scopes[-1]
        if not scope.seeds_functions:
            return None
        scope.functions += 1
        draw = scope.path, scope.occurrence, scope.functions
        self.begin_draw(draw)
        return draw

    def begin_draw(self, draw: Draw) -> None:
        """Begin the stream of a draw."""
        self.begin_stream(self._key.derive(*draw))

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._functions is not None:
            self.drawing_function()
        self._scopes.append(_QUIET)
        try:
            with replaced(self, "only", ()):
                return run(*args, **kwargs)
        finally:
            self._scopes.pop()

    def functions(self, path: str, calls: Collection[str]) -> contextlib.AbstractContextManager[Any]:
        """Watch the functions of a unit within this context, if they may draw.

        Args:
            path: path of the unit; "": code of the step itself.
            calls: paths of the modules called within it that drew when the step was captured.
        """
        if path in self._drawing.composite:
            return _Functions(self)
        return _NOTHING if self._drawing.composite.isdisjoint(calls) else replaced(self, "_within", True)

    # -- functions that backwards call again ---------------------------------------------------------------------------

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        counts, calls = self._counts.copy(), 0
        within = [*self._scopes, self._scopes[-1].region()] if calls_before else self._scopes
        scopes = [scope.copy() for scope in within]
        seeding, has_seeded = self._seeding, self._has_seeded

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= calls_before:
                self._scopes.append(within[-1])
                try:
                    return function(*args, **kwargs)
                finally:
                    self._scopes.pop()
            again = Draws(self._drawing, self._key, self._device)
            again._counts, again._scopes = counts.copy(), [scope.copy() for scope in scopes]
            again._seeding, again._given, again._has_seeded = seeding, seeds_of(self._device), has_seeded
            # the checkpoint's own restored state serves only draws that are not watched
            with restored(self._generators), watching(again), _Functions(again):
                return function(*args, **kwargs)

        return call


def _never_draws(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch that never draws."""
    return type(module) in _NEVER_DRAWING and "forward" not in vars(module)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


class _Functions(TorchFunctionMode):
    """A context that begins a stream before each drawing function, and watches the calls of all modules."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __enter__(self) -> _Functions:
        self._draws._functions, self._draws.only = self, None
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._draws._functions, self._draws.only = None, self._draws._drawing.calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_drawing(func):
            self._draws.drawing_function()
        return func(*args, **(kwargs or {}))


@functools.cache
def _is_drawing(func: Any) -> bool:
    return may_draw_itself(function_name(func))

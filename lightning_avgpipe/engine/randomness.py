"""Random numbers that depend on what is computed, not on where or when.

Every module that draws gets numbers seeded by (seed, iteration, pipeline, micro-batch, module, occurrence), so
partition, schedule and advance do not change a result. The process's own streams are left as they were.

A module without children (a dropout layer, an LSTM) is seeded when it is called. A module with children, and the step's
own code, is seeded anew at each drawing function that it calls: on one stage such a function may run inside a unit, on
another as glue between units, and it must draw the same.

Code outside of units runs on every stage, and may begin to draw at any time (in a later epoch, or by chance), so it is
always followed; what is inside of a unit only if it drew when the step was captured. A unit that begins later draws
from a stream of its own, which the generators of code outside of it do not notice.

What ``torch.utils.checkpoint`` runs again in a backward draws again what it drew in the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import CallWatcher, function_name, watching
from lightning_avgpipe.capture.ways import may_draw
from lightning_avgpipe.utils.random_streams import RandomKey, host_stream, restored, seed_all

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
# fmt: on


@dataclass(frozen=True)
class DrawingCall:
    """What calls of a module draw.

    Attributes:
        path: of the module; "" is the step's own code.
        is_simple: whether it has no children.
        is_seeded: whether its calls begin a stream: those of simple modules, and of units that did not draw when the
            step was captured.
        is_composite: whether its own code may draw from torch's generators, and it is not simple.
        on_host: whether it may draw from the generators of Python and NumPy.
        layers: what is inside of a unit that may do so in hooks only, since it is torch's own.
    """

    path: str
    is_simple: bool
    is_seeded: bool
    is_composite: bool
    on_host: bool
    layers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Drawing:
    """The modules of a step that draw, or may.

    Attributes:
        calls: of them, by the ids of the modules.
        composite: paths of those that are.
        known: ids of all modules of the root; what the step makes itself is none of them, and draws for its caller.
        seen: whether anything drew when the step was captured.
    """

    calls: Mapping[int, DrawingCall]
    composite: frozenset[str]
    known: frozenset[int]
    seen: bool

    @classmethod
    def of(cls, module: nn.Module, graph: CallGraph) -> Drawing:
        """Find the modules by their paths.

        Those outside of all units may draw, and so may those that chance has left out when the step was captured.
        """
        drawing, host_drawing, units = may_draw(graph, module), graph.host_drawing, frozenset(graph.units)
        inside = {id(inner) for path in units for inner in module.get_submodule(path).modules()}
        outside = {path for path, inner in module.named_modules() if id(inner) not in inside}
        modules = {path: module.get_submodule(path) for path in {*drawing, *host_drawing, *outside, *units}}
        layers = {path: tuple(module.get_submodule(path).modules()) for path in units.difference(host_drawing)}
        layers = {path: inner for path, inner in layers.items() if all(map(_is_of_torch, inner))}
        simple = frozenset(path for path, m in modules.items() if path and not any(True for _ in m.children()))
        composite = frozenset((*drawing, *outside)) - simple
        late = units.difference(drawing)
        host = frozenset(("", *host_drawing, *units)).difference(layers)
        calls = {
            id(m): DrawingCall(
                path, path in simple, path in simple | late, path in composite, path in host, layers.get(path, ())
            )
            for path, m in modules.items()
        }
        return cls(calls, composite, frozenset(map(id, module.modules())), bool(drawing or host_drawing))


class _Scope:
    """One call of a module: its path, the how-manieth call it is, and the drawing functions that it called so far."""

    __slots__ = ("_entered", "functions", "occurrence", "path", "regions", "seeds_functions")

    def __init__(self, path: str, occurrence: int, seeds_functions: bool) -> None:
        self.path = path
        self.occurrence = occurrence
        self.seeds_functions = seeds_functions
        self.functions = 0
        self.regions = 0
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """The rest of the call is within this context."""
        context.__enter__()
        self._entered.append(context)

    def leave(self) -> None:
        """The call has ended."""
        while self._entered:
            self._entered.pop().__exit__(None, None, None)

    def region(self) -> _Scope:
        """What is checkpointed in one piece; where the call is split, not every stage executes it, so it counts alone.

        Every process asks for it at the same point of the call.
        """
        if self is _QUIET:
            return _QUIET
        self.regions += 1
        return _Scope(f"{self.path}<{self.regions}>", self.occurrence, self.seeds_functions)

    def copy(self) -> _Scope:
        """The same call as far as it has come, within no context."""
        if self is _QUIET:
            return _QUIET
        copied = _Scope(self.path, self.occurrence, self.seeds_functions)
        copied.functions, copied.regions = self.functions, self.regions
        return copied


_QUIET = _Scope("", 0, False)
_NOTHING = contextlib.nullcontext()


class Draws(CallWatcher):
    """Seeds the draws of one execution of a step, and remembers how far it has come."""

    def __init__(self, drawing: Drawing, key: RandomKey, device: torch.device) -> None:
        self.only: Container[int] | None = drawing.calls
        self._drawing = drawing
        self._key = key
        self._device = device
        self._counts: Counter[str] = Counter()
        self._scopes = [_Scope("<step>", 0, True)]
        self._within = False  # a unit, some of whose functions draw
        self._functions: _Functions | None = None  # if they are seen

    # -- calls of modules ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        call = self._drawing.calls.get(id(module))
        if call is None:
            if id(module) in self._drawing.known:
                self._scopes.append(_QUIET)
            return
        path = call.path
        occurrence = self._counts[path]
        self._counts[path] = occurrence + 1
        if call.is_seeded:
            seed_all(self._key.derive(path, occurrence), self._device)
        if call.is_simple and not (call.on_host or call.layers):
            self._scopes.append(_QUIET)
            return
        scope = _Scope(path, occurrence, not call.is_simple)
        self._scopes.append(scope)
        if call.on_host or (call.layers and any(map(_is_hooked, call.layers))):
            scope.enter(host_stream(self._key.derive(path, occurrence)))
        if call.is_composite and self._within and self._functions is None:
            scope.enter(_Functions(self))

    def leave(self, module: nn.Module) -> None:
        if id(module) in self._drawing.known:
            scope = self._scopes.pop()
            if scope is not _QUIET:
                scope.leave()

    def skip(self, calls: Sequence[str]) -> None:
        """These calls happened on another stage."""
        self._counts.update(calls)

    @property
    def seed(self) -> int:
        """Of a stream for all that the call draws which has begun."""
        scope = self._scopes[-1]
        return self._key.derive(scope.path, scope.occurrence)

    def begin_stream(self, seed: int) -> None:
        """What is drawn now comes from a new stream."""
        seed_all(seed, self._device)

    # -- functions ----------------------------------------------------------------------------------------------------

    def function(self, name: str) -> None:
        """A torch function is about to be called, here or (as glue of an earlier stage) elsewhere."""
        if name in DRAWING_FUNCTIONS or name.endswith(".apply"):
            self.drawing_function()

    def drawing_function(self) -> None:
        """The same of one that draws."""
        scope = self._scopes[-1]
        if scope.seeds_functions:
            seed_all(self._key.derive(scope.path, scope.occurrence, 1 + scope.functions), self._device)
            scope.functions += 1

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._functions is not None:
            self.drawing_function()
        self._scopes.append(_QUIET)
        try:
            return run(*args, **kwargs)
        finally:
            self._scopes.pop()

    def functions(self, path: str, calls: Collection[str]) -> contextlib.AbstractContextManager[Any]:
        """Within this context a unit runs, of which functions are seen where they may draw.

        Args:
            path: of the unit; "": code of the step itself.
            calls: within it that drew when the step was captured.
        """
        if path in self._drawing.composite:
            return _Functions(self)
        return _NOTHING if self._drawing.composite.isdisjoint(calls) else self._within_unit()

    @contextlib.contextmanager
    def _within_unit(self) -> Iterator[None]:
        self._within = True
        try:
            yield
        finally:
            self._within = False

    # -- what backwards call again ------------------------------------------------------------------------------------

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        counts, calls = self._counts.copy(), 0
        within = [*self._scopes, self._scopes[-1].region()] if calls_before else self._scopes
        scopes = [scope.copy() for scope in within]

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
            # what the checkpoint has put into the generators is for draws that nobody has seen
            with restored(self._device), watching(again), _Functions(again):
                return function(*args, **kwargs)

        return call


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _Functions(TorchFunctionMode):
    """Within this context functions are seen before they run, and all modules: theirs are none of their callers'."""

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
    name = function_name(func)
    return name in DRAWING_FUNCTIONS or name.endswith(".apply")

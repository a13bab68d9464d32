"""Draw in a plain step the random numbers that a pipeline promises to draw.

The promise: what a module draws is a function of (seed, iteration, pipeline, micro-batch, module, occurrence). For
drawing functions that a composite module or the step itself calls, it also depends on the number of such calls before.
This holds for code outside of units, and within units for modules that drew when the step was captured. Everything else
in a unit draws from one stream of that unit, seeded by the same rule. A module that seeds torch's generators draws from
these seeds. Code outside of units has one stream of Python's and NumPy's generators, and calls of the root have others
if anything drew from them when the step was captured. These rules are implemented here a second time, independently of
the stages, so that a mistake in the stages shows.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.random_skips import may_draw
from lightning_avgpipe.capture.tracer import CallWatcher, function_name, watching
from lightning_avgpipe.engine.randomness import DRAWING_FUNCTIONS
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import generators, host_stream, seeds_of

_Call = tuple[str, int]  # path of a module, and the number of calls of it before this one


@dataclass(frozen=True)
class Captured:
    """The modules that drew random numbers when the step was captured, by path.

    Attributes:
        units: all units.
        drew: modules that drew from torch's generators, or may do so although the captured run left them out by chance.
        drew_on_host: modules that drew from the generators of Python and NumPy.
        seeding: modules that seeded torch's generators.
        within: unit -> for each call of it, the modules that drew in it.
    """

    units: frozenset[str]
    drew: frozenset[str]
    drew_on_host: frozenset[str]
    seeding: frozenset[str]
    within: Mapping[str, Sequence[frozenset[str]]]

    @classmethod
    def of(cls, graph: CallGraph, module: nn.Module) -> Captured:
        """Return the modules that drew according to the graph of a module's step."""
        drew = may_draw(graph, module)
        within: dict[str, list[frozenset[str]]] = defaultdict(list)
        for node in graph.nodes:
            if node.kind == "call":
                within[node.name].append(drew.intersection(node.drawn))
        return cls(frozenset(graph.units), drew, graph.host_drawing, graph.seeding, within)

    def seen(self, unit: str, occurrence: int) -> frozenset[str]:
        """Return the modules that drew in a call of a unit, or may have."""
        calls = self.within.get(unit, ())
        return (calls[occurrence] if occurrence < len(calls) else frozenset()) | self.drew.intersection((unit,))


class _Frame(NamedTuple):
    """A call that has begun and not ended.

    Attributes:
        call: the call whose random numbers are seeded; None: what runs now has been seeded, or draws from its unit's
            stream.
        composite: whether functions that it calls are seeded.
        unit: whether it is within a unit.
        seen: whether drawing functions that it calls are intercepted.
    """

    call: _Call | None
    composite: bool = True
    unit: bool = False
    seen: bool = True


@contextmanager
def drawing_as_promised(
    module: nn.Module, captured: Captured, key: tuple[int, int, int, int], device: torch.device
) -> Iterator[None]:
    """Let a step draw, within this context, the numbers that it draws in a pipeline. Generators are not restored.

    Args:
        module: root module.
        captured: modules that drew when the step was captured.
        key: seed, iteration, number of the pipeline among all groups, micro-batch.
        device: device of the computation.
    """
    seeds = _Seeds(key, device)
    draws = _PlainDraws(module, captured, seeds)
    seeds.begin("step")
    with host_stream(seeds.number("host")), watching(draws), draws:
        yield


@dataclass(frozen=True)
class _Seeds:
    """The seeds of one micro-batch, one for each call that draws.

    Attributes:
        key: seed, iteration, number of the pipeline among all groups, micro-batch.
        device: device of the computation.
    """

    key: tuple[int, int, int, int]
    device: torch.device

    def number(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        text = "/".join(map(str, (*self.key, name, occurrence, function)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def begin(self, name: str, occurrence: int = 0, function: int = 0) -> None:
        """Seed torch's generators for a call."""
        for generator in generators(self.device):
            generator.manual_seed(self.number(name, occurrence, function))


class _PlainDraws(CallWatcher, TorchFunctionMode):
    """Seeds the generators when units, modules without children, and drawing functions are called."""

    def __init__(self, module: nn.Module, captured: Captured, seeds: _Seeds) -> None:
        super().__init__()
        self._module = module
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._composite = {path for path, m in module.named_modules() if not path or any(True for _ in m.children())}
        self._captured = captured
        self._seeds = seeds
        self._calls: Counter[str] = Counter()
        self._functions: Counter[_Call] = Counter()
        self._regions: Counter[_Call] = Counter()
        self._stack = [_Frame(("<step>", 0))]
        self._host: list[Any] = []
        self._seeding = 0  # depth of the stack when a call began in which user code may seed; 0: there is none
        self._given: tuple[int, ...] = ()  # seeds that the generators have if user code did not seed them in that call
        self._has_seeded = False

    def enter(self, module: nn.Module) -> bool:
        path, above, known = self._paths.get(id(module)), self._stack[-1], self._captured
        if path in known.seeding and not self._seeding:
            self._seeding, self._given = len(self._stack), seeds_of(self._seeds.device)
        if path is None:  # a module that the step has constructed: its draws count as its caller's
            self._stack.append(above)
            self._host.append(nullcontext())
        else:
            call = path, self._calls[path]
            self._calls[path] += 1
            is_unit = path in known.units
            draws = not above.unit or path in known.drew or path in known.drew_on_host
            seen = not self._composite.isdisjoint(known.seen(*call)) if is_unit else above.seen
            self._stack.append(
                _Frame(call if is_unit or draws else None, path in self._composite, above.unit or is_unit, seen)
            )
            on_host = is_unit or path in known.drew_on_host or (not path and bool(known.drew_on_host))
            self._host.append(host_stream(self._seeds.number(*call)) if on_host else nullcontext())
            if is_unit or (draws and path not in self._composite):
                self._begin(*call)
        self._host[-1].__enter__()
        return True

    def leave(self, module: nn.Module) -> None:
        self._stack.pop()
        self._host.pop().__exit__(None, None, None)
        if len(self._stack) == self._seeding:
            self._seeding, self._has_seeded = 0, False

    def _begin(self, name: str, occurrence: int = 0, function: int = 0) -> None:
        device = self._seeds.device
        if self._seeding and seeds_of(device) != self._given:
            self._has_seeded = True
        if not self._has_seeded:
            self._seeds.begin(name, occurrence, function)
            self._given = seeds_of(device)

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._function()
        self._stack.append(_Frame(None))
        try:
            with replaced(self, "only", ()):
                return run(*args, **kwargs)
        finally:
            self._stack.pop()

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        """Return a function that draws the same numbers each time that activation checkpointing runs it."""
        inside = list(self._stack)
        if calls_before:  # a checkpointed region that is not traced counts its drawing functions separately
            inside.append(self._region(self._stack[-1]))
        state = self._calls.copy(), self._functions.copy()
        seeding = self._seeding, self._has_seeded
        calls = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= calls_before:
                self._stack.append(inside[-1])
                try:
                    return function(*args, **kwargs)
                finally:
                    self._stack.pop()
            again = _PlainDraws(self._module, self._captured, self._seeds)
            again._calls, again._functions, again._stack = state[0].copy(), state[1].copy(), list(inside)
            again._seeding, again._has_seeded = seeding
            again._given = seeds_of(self._seeds.device)
            with watching(again), again:
                return function(*args, **kwargs)

        return call

    def _region(self, frame: _Frame) -> _Frame:
        call = frame.call
        if call is None:
            return frame
        self._regions[call] += 1
        return frame._replace(call=(f"{call[0]}<{self._regions[call]}>", call[1]))

    def _function(self) -> None:
        call, composite, *_ = self._stack[-1]
        if call is not None and composite:
            self._functions[call] += 1
            self._begin(*call, self._functions[call])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if self._stack[-1].seen and (name in DRAWING_FUNCTIONS or name.endswith(".apply")):
            self._function()
        return func(*args, **(kwargs or {}))

"""The random numbers that a pipeline promises, drawn in a step that nobody follows.

The promise: what a module draws is a function of (seed, iteration, pipeline, micro-batch, module, occurrence), and for
functions that a composite module or the step itself calls, of how many of them that call has made before. So it is for
code outside of units, and within them for modules that drew when the step was captured; for all else in it a unit has a
stream, by the same rule. It is spelt out here once more, so that a mistake in how stages keep it shows.
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
from lightning_avgpipe.capture.tracer import CallWatcher, function_name, watching
from lightning_avgpipe.capture.ways import may_draw
from lightning_avgpipe.engine.randomness import DRAWING_FUNCTIONS
from lightning_avgpipe.utils.random_streams import generators, host_stream

_Call = tuple[str, int]  # of a module: its path, and the how-manieth call it is


@dataclass(frozen=True)
class Captured:
    """Who drew when the step was captured, by their paths.

    Attributes:
        units: all of them.
        drew: modules that drew from torch's generators, or that chance has left out.
        drew_on_host: modules that drew from those of Python and NumPy.
        within: unit -> for each call, who drew in it.
    """

    units: frozenset[str]
    drew: frozenset[str]
    drew_on_host: frozenset[str]
    within: Mapping[str, Sequence[frozenset[str]]]

    @classmethod
    def of(cls, graph: CallGraph, module: nn.Module) -> Captured:
        """As a graph of a module's step knows it."""
        drew = may_draw(graph, module)
        within: dict[str, list[frozenset[str]]] = defaultdict(list)
        for node in graph.nodes:
            if node.kind == "call":
                within[node.name].append(drew.intersection(node.drawn))
        return cls(frozenset(graph.units), drew, graph.host_drawing, within)

    def seen(self, unit: str, occurrence: int) -> frozenset[str]:
        """Who drew in a call of a unit, or may have."""
        calls = self.within.get(unit, ())
        return (calls[occurrence] if occurrence < len(calls) else frozenset()) | self.drew.intersection((unit,))


class _Frame(NamedTuple):
    """A call that goes on.

    Attributes:
        call: that draws; None: what runs now has been seeded, or goes on with the stream of its unit.
        composite: whether functions that it calls are seeded.
        unit: whether it is in one.
        seen: whether functions are looked at.
    """

    call: _Call | None
    composite: bool = True
    unit: bool = False
    seen: bool = True


@contextmanager
def drawing_as_promised(
    module: nn.Module, captured: Captured, key: tuple[int, int, int, int], device: torch.device
) -> Iterator[None]:
    """Within this context a step draws what it draws in a pipeline. The generators are not put back.

    Args:
        module: the root.
        captured: who is known to draw.
        key: seed, iteration, pipeline of all groups, micro-batch.
        device: where it computes.
    """
    seeds = _Seeds(key, device)
    draws = _PlainDraws(module, captured, seeds)
    seeds.begin("step")
    with host_stream(seeds.number("host")), watching(draws), draws:
        yield


@dataclass(frozen=True)
class _Seeds:
    """Of one micro-batch: a number for whatever draws.

    Attributes:
        key: seed, iteration, pipeline of all groups, micro-batch.
        device: where it computes.
    """

    key: tuple[int, int, int, int]
    device: torch.device

    def number(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        text = "/".join(map(str, (*self.key, name, occurrence, function)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def begin(self, name: str, occurrence: int = 0, function: int = 0) -> None:
        """Let torch's generators begin with it."""
        for generator in generators(self.device):
            generator.manual_seed(self.number(name, occurrence, function))


class _PlainDraws(CallWatcher, TorchFunctionMode):
    """Seeds modules without children, and units, when they are called, and drawing functions that others call."""

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

    def enter(self, module: nn.Module) -> None:
        path, above, known = self._paths.get(id(module)), self._stack[-1], self._captured
        if path is None:  # made by the step: whoever calls it draws
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
            on_host = not path or is_unit or path in known.drew_on_host
            self._host.append(host_stream(self._seeds.number(*call)) if on_host else nullcontext())
            if (draws and path not in self._composite) or (is_unit and path not in known.drew):
                self._seeds.begin(*call)
        self._host[-1].__enter__()

    def leave(self, module: nn.Module) -> None:
        self._stack.pop()
        self._host.pop().__exit__(None, None, None)

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._function()
        self._stack.append(_Frame(None))
        try:
            return run(*args, **kwargs)
        finally:
            self._stack.pop()

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        """What a checkpoint runs again draws again what it drew."""
        inside = list(self._stack)
        if calls_before:  # in one piece: it has a count of its own
            inside.append(self._region(self._stack[-1]))
        state = self._calls.copy(), self._functions.copy()
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
            self._seeds.begin(*call, self._functions[call])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if self._stack[-1].seen and (name in DRAWING_FUNCTIONS or name.endswith(".apply")):
            self._function()
        return func(*args, **(kwargs or {}))

"""The random numbers that a pipeline promises, drawn in a step that nobody follows.

The promise: what a module draws is a function of (seed, iteration, pipeline, micro-batch, module, occurrence), and for
functions that a composite module or the step itself calls, of how many of them that call has made before. It is spelt
out here once more, so that a mistake in how stages keep it shows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.tracer import CallWatcher, function_name, watching
from lightning_avgpipe.engine.randomness import DRAWING_FUNCTIONS
from lightning_avgpipe.utils.random_streams import generators, host_stream

_Call = tuple[str, int]  # of a module: its path, and the how-manieth call it is


@contextmanager
def drawing_as_promised(module: nn.Module, key: tuple[int, int, int, int], device: torch.device) -> Iterator[None]:
    """Within this context a step draws what it draws in a pipeline. The generators are not put back.

    Args:
        module: the root; a call of any of its modules is one that may draw.
        key: seed, iteration, pipeline of all groups, micro-batch.
        device: where it computes.
    """
    draws = _PlainDraws({id(m): path for path, m in module.named_modules()}, key, device)
    draws.seed("step")
    with host_stream(draws.number("host")), watching(draws), draws:
        yield


class _PlainDraws(CallWatcher, TorchFunctionMode):
    """Seeds every module without children when it is called, and every drawing function that others call."""

    def __init__(self, paths: Mapping[int, str], key: tuple[int, int, int, int], device: torch.device) -> None:
        super().__init__()
        self._paths = paths
        self._key = key
        self._device = device
        self._calls: Counter[str] = Counter()
        self._functions: Counter[_Call] = Counter()
        self._regions: Counter[_Call] = Counter()
        self._stack: list[_Call | None] = [("<step>", 0)]  # None: what runs now has been seeded
        self._host: list[Any] = []

    def number(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        text = "/".join(map(str, (*self._key, name, occurrence, function)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def seed(self, name: str, occurrence: int = 0, function: int = 0) -> None:
        for generator in generators(self._device):
            generator.manual_seed(self.number(name, occurrence, function))

    def enter(self, module: nn.Module) -> None:
        path = self._paths.get(id(module))
        if path is None:  # made by the step: whoever calls it draws
            self._stack.append(self._stack[-1])
            self._host.append(nullcontext())
        else:
            call = path, self._calls[path]
            self._calls[path] += 1
            self._host.append(host_stream(self.number(*call)))
            alone = next(module.children(), None) is None
            self._stack.append(None if alone else call)
            if alone:
                self.seed(*call)
        self._host[-1].__enter__()

    def leave(self, module: nn.Module) -> None:
        self._stack.pop()
        self._host.pop().__exit__(None, None, None)

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._function()
        self._stack.append(None)
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
            again = _PlainDraws(self._paths, self._key, self._device)
            again._calls, again._functions, again._stack = state[0].copy(), state[1].copy(), list(inside)
            with watching(again), again:
                return function(*args, **kwargs)

        return call

    def _region(self, call: _Call | None) -> _Call | None:
        if call is None:
            return None
        self._regions[call] += 1
        return f"{call[0]}<{self._regions[call]}>", call[1]

    def _function(self) -> None:
        call = self._stack[-1]
        if call is not None:
            self._functions[call] += 1
            self.seed(*call, self._functions[call])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if name in DRAWING_FUNCTIONS or name.endswith(".apply"):
            self._function()
        return func(*args, **(kwargs or {}))

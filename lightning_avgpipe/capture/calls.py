"""Calls of modules that are no units: noted while a step is captured, so that it is known what lies inside of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lightning_avgpipe.capture.graph import Opened
from lightning_avgpipe.capture.random_use import DrawWatch
from lightning_avgpipe.capture.tracer import CallWatcher


class Calls(CallWatcher):
    """Passes all calls on to the watch for draws.

    Args:
        watch: for draws.
        is_outside: whether a module, which is called now, is no unit and in no unit.
        position: how many nodes there are.

    Attributes:
        watch: as given.
        ended: the calls that have ended.
    """

    def __init__(self, watch: DrawWatch, is_outside: Callable[[nn.Module], bool], position: Callable[[], int]) -> None:
        self.watch = watch
        self._is_outside = is_outside
        self._position = position
        self._open: list[Opened | None] = []
        self.ended: list[Opened] = []

    def enter(self, module: nn.Module) -> None:
        path, begin = self.watch.path(module), self._position()
        self._open.append(Opened(path, begin, begin, False) if path and self._is_outside(module) else None)
        self.watch.enter(module)

    def leave(self, module: nn.Module) -> None:
        self.watch.leave(module)
        call = self._open.pop()
        if call is not None:
            self.ended.append(replace(call, end=self._position()))

    def observe(self) -> None:
        """Something is observed, by all that have not ended."""
        self._open = [None if call is None else replace(call, observes=True) for call in self._open]

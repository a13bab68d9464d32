"""Watch the outermost module calls in a region that is checkpointed in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.random_use import DrawWatch
from lightning_avgpipe.capture.tracer import CallWatcher


class Outermost(CallWatcher):
    """A watcher that passes calls on to another, and moves the parameters of outermost modules to the device.

    Attributes:
        modules: the outermost modules, in order of their calls.
        state: their parameters and buffers as before each call.
    """

    def __init__(
        self,
        watch: DrawWatch,
        visit: Callable[[nn.Module], Any],
        state: Callable[[str], list[tuple[str, Tensor, Tensor]]],
    ) -> None:
        self._watch = watch
        self._state = state
        self._visit = visit
        self._visits: list[Any] = []
        self._depth = 0
        self.modules: list[nn.Module] = []
        self.state: list[tuple[str, Tensor, Tensor]] = []

    def enter(self, module: nn.Module) -> None:
        if self._depth == 0:
            self.modules.append(module)
            self._visits.append(self._visit(module))
            self._visits[-1].__enter__()
            self.state += self._state(self._watch.path(module))
        self._depth += 1
        self._watch.enter(module)

    def leave(self, module: nn.Module) -> None:
        self._watch.leave(module)
        self._depth -= 1
        if self._depth == 0:
            self._visits.pop().__exit__(None, None, None)

"""Note, while a step is captured, which nodes lie inside of the calls of modules that are not units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lightning_avgpipe.capture.graph import OpenedCall
from lightning_avgpipe.capture.random_use import DrawWatch
from lightning_avgpipe.capture.tracer import CallWatcher
from lightning_avgpipe.errors import SeedingError
from lightning_avgpipe.utils.source import source_line


class Calls(CallWatcher):
    """A watcher that passes all calls on to the watch for draws, and refuses seeds outside of units.

    Every stage runs the code between units, and units draw from random streams of their own. So only a unit may seed,
    for its own draws.

    Args:
        watch: watch for draws of random numbers.
        is_outside: return whether a module that is being called is neither a unit nor inside of one.
        position: return the number of nodes so far.

    Attributes:
        watch: as given.
        ended: calls that have ended, in order.
    """

    def __init__(self, watch: DrawWatch, is_outside: Callable[[nn.Module], bool], position: Callable[[], int]) -> None:
        self.watch = watch
        self._is_outside = is_outside
        self._position = position
        self._open: list[OpenedCall | None] = []
        self.ended: list[OpenedCall] = []

    def enter(self, module: nn.Module) -> None:
        path, begin = self.watch.path(module), self._position()
        self._open.append(OpenedCall(path, begin, begin, False) if path and self._is_outside(module) else None)
        self.watch.enter(module)

    def leave(self, module: nn.Module) -> None:
        self.watch.leave(module)
        call = self._open.pop()
        if call is not None:
            self.ended.append(replace(call, end=self._position()))

    def observe(self) -> None:
        """Note that ``self.log`` or a metric is called within all calls that have not ended."""
        self._open = [None if call is None else replace(call, observes=True) for call in self._open]

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def seeds(self, function: str) -> None:
        """Note that the step calls a function of torch that seeds.

        Raises:
            SeedingError: the call is outside of units.
        """
        if self.watch.unit is None:
            raise self._refused(f"at {source_line()} (torch.{function})")
        self.watch.seeds(function)

    def check_seeds(self) -> None:
        """Check that code outside of units has not seeded torch's generators by their own methods.

        Raises:
            SeedingError: it has seeded one.
        """
        if self.watch.is_seeded():
            where = f"before it comes to {source_line()} (manual_seed of torch.default_generator, or the like)"
            raise self._refused(where)

    def _refused(self, where: str) -> SeedingError:
        innermost = next((call.path for call in reversed(self._open) if call is not None), "")
        return SeedingError(
            f"the step seeds torch's random numbers {where} between submodules, while stages draw from streams of each "
            "module and micro-batch; draw from a torch.Generator of your own, seed in the forward of a submodule what "
            "it draws, or seed before training",
            innermost,
        )

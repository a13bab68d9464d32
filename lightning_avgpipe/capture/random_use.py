"""Find out, while a step is captured, which modules draw random numbers or seed, and which nodes their calls hold."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_avgpipe.capture.graph import OpenedCall
from lightning_avgpipe.capture.tracer import CallWatcher
from lightning_avgpipe.errors import SeedingError
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import HostState, generators, stream_seed
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import untraced


def random_bits(device: torch.device | None) -> tuple[bytes, ...]:
    """Return the state of torch's generators for units and glue, without a tensor operation, which would be watched."""
    with untraced():
        states = [generator.get_state() for generator in generators(device or torch.device("cpu"))]
        return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)


def watching_seeds(note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Watch ``torch.manual_seed``, ``torch.seed`` and ``torch.set_rng_state`` within this context.

    The name under which the step has imported them does not matter: all look up torch's generator of the host in one
    place.

    Args:
        note: is called with the name of such a function before it runs.
    """
    return replaced(torch.random, "default_generator", _Watched(note))


class _Watched:
    """A stand-in for torch's default generator that reports seeds, but not torch's own restores of the state."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(2).f_globals["__name__"]
        if name in ("manual_seed", "seed") or (name == "set_state" and not caller.startswith("torch.")):
            self._note({"set_state": "set_rng_state"}.get(name, name))
        return getattr(torch.default_generator, name)


class DrawWatch(CallWatcher):
    """A watcher that notes which modules draw random numbers themselves, not only through their children.

    Between two events (a call begins, a call ends) only the module on top of the stack runs. So if a generator has
    moved, this module has drawn.

    Args:
        module: root module; its own code has the path "".
        device: device on which the step computes.

    Attributes:
        calls: paths of all calls so far, in order.
        drawing: paths of modules that draw from torch's generators; dropout layers are among them even in evaluation
            mode.
        host_drawing: paths of modules that draw from the generators of Python or NumPy.
        unit: path of the running unit; None between units.
        seeding: paths of modules that seed torch's generators themselves while a unit runs.
        from_entropy: whether one of them may seed with an unpredictable number (``torch.seed``).
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._device = device
        self._stack = [""]
        self._state = random_bits(device)
        self._generators = generators(device or torch.device("cpu"))
        self._seeds = self._seeds_now()
        self._host_state = HostState.now()
        self.calls: list[str] = []
        self.drawing = {path for path, m in module.named_modules() if isinstance(m, _DropoutNd)}
        self.host_drawing: set[str] = set()
        self.unit: str | None = None
        self.seeding: set[str] = set()
        self.from_entropy = False

    def enter(self, module: nn.Module) -> None:
        self.look()
        path = self._paths.get(id(module))
        if path is not None:
            self.calls.append(path)
        self._stack.append(self._stack[-1] if path is None else path)  # what the step makes draws for its caller

    def leave(self, module: nn.Module) -> None:
        self.look()
        self._stack.pop()

    def path(self, module: nn.Module) -> str:
        """Return the path of a module below the root; "" if it has none."""
        return self._paths.get(id(module), "")

    def bits(self) -> tuple[bytes, ...]:
        """Return the state of torch's generators that units and glue draw from."""
        return random_bits(self._device)

    @contextlib.contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Run a unit within this context."""
        self.unit = unit
        try:
            yield
            self.look()
        finally:
            self.unit = None

    def seeds(self, function: str) -> None:
        """Note that a module of the running unit calls a function of torch that seeds."""
        self.seeding.add(self._stack[-1])
        self.drawing.add(self._stack[-1])
        self.from_entropy |= function == "seed"

    def is_seeded(self) -> bool:
        """Return whether torch's generators have been seeded."""
        now = self._seeds_now()
        return now not in (self._seeds, (stream_seed(),) * len(now))

    def _seeds_now(self) -> tuple[int, ...]:
        return tuple(generator.initial_seed() for generator in self._generators)

    def draws_on_host(self, unit: str) -> bool:
        """Return whether a unit, or a module inside of it, has drawn from the generators of Python or NumPy."""
        return any(f"{path}.".startswith(f"{unit}.") for path in self.host_drawing)

    def look(self) -> None:
        """Note draws and seeds since the last event."""
        state, on_host = self.bits(), HostState.now()
        if state != self._state:
            self.drawing.add(self._stack[-1])
        if on_host != self._host_state:
            self.host_drawing.add(self._stack[-1])
        self._state, self._host_state = state, on_host
        if self.unit is not None and self.is_seeded():
            if self._stack[-1] not in self.seeding:  # by a method of a generator, which watching_seeds misses
                self.seeds("seed")
            for generator, seed in zip(self._generators, self._seeds, strict=True):  # so that the next seed is noticed
                generator.manual_seed(seed)
            self._state = self.bits()


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

"""Watch module calls while a step is captured: which modules draw random numbers or seed, and which nodes they run."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_avgpipe.capture.flop_counter import Flops
from lightning_avgpipe.capture.graph import FollowedCall
from lightning_avgpipe.capture.tracer import CallWatcher, StepTracer
from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.errors import OnlyInUnitsError
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import HostState, generators, seeds_of, stream_seed
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import untraced


def watching_seeds(note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Watch the torch functions that seed the random generator, or get or set its state, within this context.

    It does not matter how the step imported them: all of them look up ``torch.random.default_generator``.

    Args:
        note: is called with the name of such a function before it runs.
    """
    return replaced(torch.random, "default_generator", _WatchedGenerator(note))


_STATE_FUNCTIONS = {"get_state": "get_rng_state", "set_state": "set_rng_state"}  # generator's method: torch's function


class _WatchedGenerator:
    """A stand-in for torch's default generator that reports seeding, and access to its state from outside of torch."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(2).f_globals["__name__"]
        if name in ("manual_seed", "seed") or (name in _STATE_FUNCTIONS and not caller.startswith("torch.")):
            self._note(_STATE_FUNCTIONS.get(name, name))
        return getattr(torch.default_generator, name)


class _Call(NamedTuple):
    """A call that has not ended.

    Attributes:
        path: path of the module for which draws in this call count.
        followed: position of the call in the graph, if it is followed.
        around: context manager that is exited when the call ends.
        flops: operations that were counted for the running unit before the call.
    """

    path: str
    followed: FollowedCall | None
    around: AbstractContextManager[Any]
    flops: float = 0.0


_NOTHING = contextlib.nullcontext()


class Calls(CallWatcher):
    """A watcher that notes which modules draw random numbers or seed, and which nodes the followed calls execute.

    Between two events (a call begins, a call ends) only the module on top of the stack runs. So if the state of a
    generator has changed, the code of this module has drawn, not that of its children.

    Every stage runs the code between units, and each unit draws from a random stream of its own. Therefore only code in
    a unit may seed, and the seed affects only the draws of this unit.

    Args:
        module: root module; its own code has the path "".
        device: device on which the step computes.
        position: returns the number of nodes so far.

    Attributes:
        calls: paths of all calls so far, in order.
        ended: followed calls that have ended, in order.
        drawing: paths of modules that draw from torch's generators; dropout layers are among them even in evaluation
            mode.
        host_drawing: paths of modules that draw from the generators of Python or NumPy.
        unit: path of the running unit; None between units.
        seeding: paths of modules that seed torch's generators themselves while a unit runs, or get or set their state.
        from_entropy: whether one of them may seed with an unpredictable number (``torch.seed``).
        flops: counter of the running unit's operations.
        inner_flops: operations of the modules within units, by path.
    """

    def __init__(self, module: nn.Module, device: torch.device | None, position: Callable[[], int]) -> None:
        self._position = position
        self._modules = dict(module.named_modules())
        self._paths = {id(m): path for path, m in self._modules.items()}
        self._stack = [_Call("", None, _NOTHING)]
        self._outermost: tuple[int, Callable[[nn.Module], AbstractContextManager[Any]]] | None = None
        self._device = device or torch.device("cpu")
        self._state, self._host_state, self._seeds = self.generator_states(), HostState.now(), seeds_of(self._device)
        self.calls: list[str] = []
        self.ended: list[FollowedCall] = []
        self.drawing = {path for path, m in module.named_modules() if isinstance(m, _DropoutNd)}
        self.host_drawing: set[str] = set()
        self.unit: str | None = None
        self.seeding: set[str] = set()
        self.from_entropy = False
        self.flops = Flops()
        self.inner_flops: dict[str, float] = defaultdict(float)

    def enter(self, module: nn.Module) -> bool:
        around: AbstractContextManager[Any] = _NOTHING
        if self._outermost is not None and self._outermost[0] == len(self._stack):
            around = self._outermost[1](module)
        around.__enter__()
        path, begin = self._paths.get(id(module)), self._position()
        tracer = StepTracer.current()
        is_followed = path and tracer is not None and tracer.unit(module) is None  # neither a unit nor inside of one
        followed = FollowedCall(path, begin, begin, False) if path and is_followed else None
        self.look()
        if path is not None:
            self.calls.append(path)
        # draws of a module that the step makes count for its caller
        flops = 0.0 if self.unit is None else self.flops.total
        self._stack.append(_Call(self._stack[-1].path if path is None else path, followed, around, flops))
        return True

    def leave(self, module: nn.Module) -> None:
        self.look()
        call = self._stack.pop()
        if call.followed is not None:
            self.ended.append(replace(call.followed, end=self._position()))
        elif self.unit is not None and id(module) in self._paths:  # other modules count for their caller
            self.inner_flops[call.path] += self.flops.total - call.flops
        call.around.__exit__(None, None, None)

    def observe(self) -> None:
        """Note that ``self.log`` or a metric is called inside all calls that have not ended."""
        self._stack = [
            call if call.followed is None else call._replace(followed=replace(call.followed, observes=True))
            for call in self._stack
        ]

    def path(self, module: nn.Module) -> str:
        """Return the path of a module below the root; "" if it has none."""
        return self._paths.get(id(module), "")

    @contextlib.contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Note draws and seeds within this context as those of a running unit."""
        with replaced(self, "unit", unit):
            yield
            self.look()

    def within_region(self, around: Callable[[nn.Module], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Enter ``around(module)`` for each outermost module that a region, checkpointed in one piece, calls here."""
        return replaced(self, "_outermost", (len(self._stack), around))

    # -- draws ---------------------------------------------------------------------------------------------------------

    def generator_states(self) -> tuple[bytes, ...]:
        """Return the states of torch's generators, without a tensor operation, which would be watched."""
        with untraced():
            states = [generator.get_state() for generator in generators(self._device)]
            return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)

    def look(self) -> None:
        """Note draws and seeds since the last event."""
        path, state, on_host = self._stack[-1].path, self.generator_states(), HostState.now()
        if state != self._state:
            self.drawing.add(path)
        if on_host != self._host_state:
            self.host_drawing.add(path)
        self._state, self._host_state = state, on_host
        if self.unit is not None and self._is_seeded():
            if path not in self.seeding:  # by a method of a generator, which watching_seeds misses
                self.note_seed("seed")
            # so that the next seed is noticed
            for generator, seed in zip(generators(self._device), self._seeds, strict=True):
                generator.manual_seed(seed)
            self._state = self.generator_states()

    def check_calls_in(self, function: str, since: int, given: Sequence[Tensor]) -> None:
        """Check that a function called no module whose weights it was not given: they would belong to no stage.

        For example, a reversible network calls its layers in the forward and backward of an autograd function.

        Args:
            function: name of the function that was called between units, for messages.
            since: number of module calls before it.
            given: tensors that it was given.
        Raises:
            OnlyInUnitsError: it called such a module.
        """
        known = set(map(id, given))
        for path in self.calls[since:]:
            if not known.issuperset(map(id, tensors_of(self._modules[path]))):
                raise self._only_in_units(
                    f"{function} at {source_line()} calls '{path}' itself, so that no stage would have its weights; do "
                    f"so in the forward of a submodule that has '{path}' below it",
                    f"calls submodules in {function}",
                )

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def note_seed(self, function: str) -> None:
        """Note that the step calls a torch function that seeds, or gets or sets the state of the generator.

        Raises:
            OnlyInUnitsError: the call is outside of units, and does more than to get the state.
        """
        if self.unit is None:
            if function == "get_rng_state":
                return
            raise self._refused(f"at {source_line()} (torch.{function})")
        self.seeding.add(self._stack[-1].path)
        self.drawing.add(self._stack[-1].path)
        self.from_entropy |= function == "seed"

    def check_seeds(self) -> None:
        """Check that code outside of units has not seeded torch's generators by their own methods.

        Raises:
            OnlyInUnitsError: it has seeded one.
        """
        if self._is_seeded():
            where = f"before it comes to {source_line()} (manual_seed of torch.default_generator, or the like)"
            raise self._refused(where)

    def _is_seeded(self) -> bool:
        now = seeds_of(self._device)
        return now not in (self._seeds, (stream_seed(),) * len(now))

    def _refused(self, where: str) -> OnlyInUnitsError:
        return self._only_in_units(
            f"the step seeds torch's random numbers {where} between submodules, while stages draw from streams of each "
            "module and micro-batch; draw from a torch.Generator of your own, seed in the forward of a submodule what "
            "it draws, or seed before training",
            "seeds torch's random numbers",
        )

    def _only_in_units(self, message: str, does: str) -> OnlyInUnitsError:
        """Return the error for what only units may do; it names the innermost followed module that did it."""
        innermost = next((call.followed.path for call in reversed(self._stack) if call.followed is not None), "")
        return OnlyInUnitsError(message, innermost, does)

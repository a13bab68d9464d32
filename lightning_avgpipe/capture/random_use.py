"""Who draws random numbers: found out while a step is captured, call by call, also inside units."""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_avgpipe.capture.tracer import CallWatcher
from lightning_avgpipe.utils.host_random import host_state
from lightning_avgpipe.utils.random_streams import generators
from lightning_avgpipe.utils.torch_compat import untraced


def random_bits(device: torch.device | None) -> tuple[bytes, ...]:
    """State of torch's generators that units and glue draw from; without an operation, since those are watched."""
    with untraced():
        states = [generator.get_state() for generator in generators(device or torch.device("cpu"))]
        return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)


class DrawWatch(CallWatcher):
    """Notes which modules draw themselves, not only through their children.

    Between two events (a call begins, a call ends) only the module on top of the stack runs, so if a generator has
    moved, it was this one.

    Args:
        module: the root; its own code has the path "".
        device: where the step computes.

    Attributes:
        calls: paths of all calls so far, in order.
        drawing: paths of modules that draw from torch's generators; dropout layers are among them even when they are
            in evaluation mode now.
        host_drawing: paths of modules that draw from the generators of Python and NumPy.
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._device = device
        self._stack = [""]
        self._state = random_bits(device)
        self._host_state = host_state()
        self.calls: list[str] = []
        self.drawing = {path for path, m in module.named_modules() if isinstance(m, _DropoutNd)}
        self.host_drawing: set[str] = set()

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
        """Where a module lies; "" if it is none of the root's."""
        return self._paths.get(id(module), "")

    def bits(self) -> tuple[bytes, ...]:
        """State of torch's generators that units and glue draw from."""
        return random_bits(self._device)

    def draws_on_host(self, unit: str) -> bool:
        """Whether a module, or one inside of it, has drawn from the generators of Python or NumPy."""
        return any(f"{path}.".startswith(f"{unit}.") for path in self.host_drawing)

    def look(self) -> None:
        """See whether generators have moved since the last event."""
        state, on_host = self.bits(), host_state()
        if state != self._state:
            self.drawing.add(self._stack[-1])
        if on_host != self._host_state:
            self.host_drawing.add(self._stack[-1])
        self._state, self._host_state = state, on_host

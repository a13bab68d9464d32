"""Divisible modules: capture of their steps unit by unit, and opening of their units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.units import is_container
from lightning_avgpipe.errors import OnlyInUnitsError, PartitionError
from lightning_avgpipe.utils.names import close_to, is_within, joined

# Modules that use their children without calling them, or all of their parameters at once.
_ATOMS: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "is one operation",
    nn.RNNBase: "is one operation for all of its layers; chain several with num_layers=1",
    torch.jit.ScriptModule: "is a TorchScript module, which cannot be followed inside; script its parts one by one",
}


class Step(NamedTuple):
    """A step function: its name, the function that runs it, and the arguments of one micro-batch."""

    name: str
    run: Callable[..., Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Divisible:
    """A module that is to be divided into stages.

    Attributes:
        module: module whose steps are captured.
        device: device on which captures compute; None: the device of the parameters.
        observers: modules that only read values, such as metrics.
    """

    module: nn.Module
    device: torch.device | None = None
    observers: Collection[nn.Module] = ()
    # modules that must be units -> what their own code does that only a unit may do
    _units: dict[str, str] = field(default_factory=dict, init=False, compare=False)
    _changing: set[int] = field(default_factory=set, init=False, compare=False)  # ids of objects that steps change

    @property
    def place(self) -> torch.device:
        """The device on which nodes are timed."""
        return self.device or torch.device("cpu")

    @property
    def nbytes(self) -> dict[str, int]:
        """The bytes of each parameter by its full name."""
        return {name: p.numel() * p.element_size() for name, p in self.module.named_parameters()}

    def capture(self, step: Step, units: Sequence[str] | None = None) -> CallGraph:
        """Capture the call graph of a step at the granularity of these units; None: of the coarsest units.

        A module becomes a unit if its own code does what only units may do, such as seeding torch's random number
        generators.
        """
        units = self.units() if units is None else units
        while True:
            try:
                return capture(*step, self.module, units, self.device, self.observers, self._changing)
            except OnlyInUnitsError as error:
                if not error.module or error.module in self._units:
                    raise
                self._units[error.module] = error.does
                units = (*(unit for unit in units if not is_within(unit, error.module)), error.module)

    # -- units --------------------------------------------------------------------------------------------------------

    def units(self) -> tuple[str, ...]:
        """Return the paths of the coarsest units: the children of the module, with containers opened."""
        return tuple(self._below(""))

    def split(self, units: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Return the units, opened until a unit begins at each of the names.

        Raises:
            PartitionError: a name is not that of a submodule. The message says which names come close.
        """
        known = {name for name, _ in self.module.named_modules() if name}
        for point in names:
            if point not in known:
                what = f"split point {point!r} is not a submodule of {type(self.module).__name__}"
                raise PartitionError(f"{what}; {close_to(point, known)}")
            while above := [unit for unit in units if point.startswith(f"{unit}.") and self.opens(unit)]:
                units = self.refine(units, above)
            if not any(is_within(unit, point) or is_within(point, unit) for unit in units):
                units = (*units, point)  # a module that the step of the given units does not call
        return tuple(units)

    def refine(self, units: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
        """Return units with the chosen ones replaced by their children; units that cannot be opened stay."""
        refined: list[str] = []
        for path in units:
            refined.extend(self._below(path) if path in chosen and self.opens(path) else [path])
        return tuple(dict.fromkeys(refined))

    def opens(self, unit: str) -> bool:
        """Return whether a unit can be replaced by its children."""
        return self._why_whole(unit) is None

    def _why_whole(self, unit: str) -> str | None:
        module = self.module.get_submodule(unit)
        if unit in self._units:
            return self._units[unit]
        if not any(True for _ in self._below(unit)) and not isinstance(module, nn.RNNBase):
            return "has no submodules"
        return next((reason for kind, reason in _ATOMS.items() if isinstance(module, kind)), None)

    def _below(self, path: str) -> Iterator[str]:
        for name, child in self.module.get_submodule(path).named_children():
            if any(child is other for other in self.observers):
                continue
            full = joined(path, name)
            yield from self._below(full) if is_container(child) else (full,)

    def whole(self, units: Sequence[str]) -> dict[str, str]:
        """Return for each unit that cannot be opened the reason."""
        reasons = ((unit, self._why_whole(unit)) for unit in units)
        return {unit: reason for unit, reason in reasons if reason is not None}

"""Divisible modules: their steps are captured unit by unit, and their units can be opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.units import is_container
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.utils.names import close_to, is_within, joined

# These use their children where nobody sees it, or all of their parameters at once.
_ATOMS: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "is one operation",
    nn.RNNBase: "is one operation for all of its layers; chain several with num_layers=1",
    torch.jit.ScriptModule: "is a TorchScript module, in which nobody can follow; script its parts one by one",
}


class Step(NamedTuple):
    """A step function: its name, what executes it, and the arguments of one micro-batch."""

    name: str
    run: Callable[..., Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Divisible:
    """A module that is to be divided.

    Attributes:
        module: whose steps are captured.
        device: where captures compute; None: where the parameters are.
        observers: modules that only look at values (metrics).
    """

    module: nn.Module
    device: torch.device | None = None
    observers: Collection[nn.Module] = ()

    @property
    def place(self) -> torch.device:
        """Where nodes are timed."""
        return self.device or torch.device("cpu")

    @property
    def nbytes(self) -> dict[str, int]:
        """Of each parameter."""
        return {name: p.numel() * p.element_size() for name, p in self.module.named_parameters()}

    def capture(self, step: Step, units: Sequence[str] | None = None) -> CallGraph:
        """The call graph of a step, at the granularity of these units, or of the coarsest."""
        return capture(*step, self.module, self.units() if units is None else units, self.device, self.observers)

    # -- units --------------------------------------------------------------------------------------------------------

    def units(self) -> tuple[str, ...]:
        """Paths of the coarsest ones: the children of the module, with containers opened."""
        return tuple(self._below(""))

    def split(self, units: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Finer units, of which one begins at each of these names.

        Raises:
            PartitionError: a name is that of no submodule; says which names come close.
        """
        known = {name for name, _ in self.module.named_modules() if name}
        for point in names:
            if point not in known:
                what = f"split point {point!r} is no submodule of {type(self.module).__name__}"
                raise PartitionError(f"{what}; {close_to(point, known)}")
            while above := [unit for unit in units if point.startswith(f"{unit}.") and self.opens(unit)]:
                units = self.refine(units, above)
            if not any(is_within(unit, point) or is_within(point, unit) for unit in units):
                units = (*units, point)  # none of the units that an earlier step called
        return tuple(units)

    def refine(self, units: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
        """The same units, with the chosen ones replaced by their children; one without children stays."""
        refined: list[str] = []
        for path in units:
            refined.extend(self._below(path) if path in chosen and self.opens(path) else [path])
        return tuple(dict.fromkeys(refined))

    def opens(self, unit: str) -> bool:
        """Whether it has children that it could be replaced by."""
        return self._why_whole(unit) is None

    def _why_whole(self, unit: str) -> str | None:
        module = self.module.get_submodule(unit)
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
        """Unit -> why it cannot be opened."""
        reasons = ((unit, self._why_whole(unit)) for unit in units)
        return {unit: reason for unit, reason in reasons if reason is not None}

    def half_frozen(self, units: Sequence[str]) -> list[str]:
        """Units that can be opened, and have trained and frozen parameters."""
        flags = {unit: {p.requires_grad for p in self.module.get_submodule(unit).parameters()} for unit in units}
        return [unit for unit in units if len(flags[unit]) > 1 and self.opens(unit)]

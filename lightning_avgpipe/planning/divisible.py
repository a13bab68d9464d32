"""Divisible modules: their steps are captured unit by unit, and their units can be opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.coarsening import Closing, closing
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.units import divisible, initial_units, refine, split_units, why_whole


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
        """The coarsest ones."""
        return initial_units(self.module, self.observers)

    def split(self, units: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Finer units, of which one begins at each of these names; see :func:`split_units`."""
        return split_units(self.module, units, names, self.observers)

    def refine(self, units: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
        """The same units, with these opened."""
        return refine(self.module, units, chosen, self.observers)

    def opens(self, unit: str) -> bool:
        """Whether it can be opened."""
        return divisible(self.module, unit, self.observers)

    def whole(self, units: Sequence[str]) -> dict[str, str]:
        """Unit -> why it cannot be opened."""
        reasons = ((unit, why_whole(self.module, unit, self.observers)) for unit in units)
        return {unit: reason for unit, reason in reasons if reason is not None}

    def half_frozen(self, units: Sequence[str]) -> list[str]:
        """Units that can be opened, and have trained and frozen parameters."""
        flags = {unit: {p.requires_grad for p in self.module.get_submodule(unit).parameters()} for unit in units}
        return [unit for unit in units if len(flags[unit]) > 1 and self.opens(unit)]

    def closing(self, graph: CallGraph, cuts: Sequence[int], keep: Collection[str]) -> Closing | None:
        """What can be closed again; see :func:`closing`."""
        return closing(self.module, graph, cuts, keep, self.observers)

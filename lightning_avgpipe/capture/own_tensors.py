"""Find tensors that a unit makes in one call and keeps in its attributes for a later call of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import Pin
from lightning_avgpipe.capture.unit_operations import Provenance


class TensorRead(NamedTuple):
    """A read of a tensor that the reading unit made in an earlier call.

    The fields are: the node that made the tensor, the node that reads it, its shape and its dtype.
    """

    maker: int
    reader: int
    shape: tuple[int, ...]
    dtype: str


class OwnTensors:
    """A record of the tensors that units keep for themselves in one step.

    Args:
        module: module whose submodules are units.
        provenance: record of the node in which each tensor of this step was made.
    """

    def __init__(self, module: nn.Module, provenance: Provenance) -> None:
        self._module = module
        self._provenance = provenance
        self._reads: dict[str, list[tuple[TensorRead, Pin]]] = defaultdict(list)  # by unit
        self._carried: set[str] = set()  # units that read tensors of the previous run
        self._earlier: Provenance | None = None
        self._before: dict[str, dict[tuple[str, str], Any]] = {}  # numbers in units' attributes after the previous run

    def __bool__(self) -> bool:
        return bool(self._reads)

    def add(self, unit: str, read: TensorRead, pin: Pin) -> None:
        """Note that a unit has read such a tensor, and the range where no cut may lie because of it."""
        self._reads[unit].append((read, pin))

    def look(self, unit: str, tensors: Sequence[Tensor]) -> None:
        """Note that a unit takes these tensors, if the previous run has made any of them."""
        if self._earlier is not None and any(self._earlier.birth(tensor) is not None for tensor in tensors):
            self._carried.add(unit)

    def follow(self, before: OwnTensors) -> None:
        """Take over the tensors of the previous run of the same step."""
        self._earlier = before._provenance
        self._before = {unit: self._numbers(unit) for unit in before._reads}

    def made_anew(self, again: OwnTensors) -> set[str]:
        """Return the units that, in a repeated step, made their tensors again and read none of the first run."""
        reads = {unit: [read for read, _ in found] for unit, found in self._reads.items()}
        alike = {unit for unit in reads if reads[unit] == [read for read, _ in again._reads.get(unit, ())]}
        return {unit for unit in alike - again._carried if again._before[unit] == again._numbers(unit)}

    def pins(self, without: Collection[str]) -> list[Pin]:
        """Return where the step cannot be cut because of units other than these."""
        return [pin for unit, reads in self._reads.items() if unit not in without for _, pin in reads]

    def _numbers(self, unit: str) -> dict[tuple[str, str], Any]:
        """Return the numbers in attributes of a unit, such as a counter that decides when a tensor is made anew."""
        modules = self._module.get_submodule(unit).named_modules()
        return {(path, n): held for path, m in modules for n, held in vars(m).items() if isinstance(held, (int, float))}

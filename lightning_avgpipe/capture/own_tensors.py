"""Own tensors: those that a unit makes in one call, and keeps in its attributes for another call of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import Pin
from lightning_avgpipe.capture.provenance import Provenance


class Read(NamedTuple):
    """Of such a tensor: the node that made it, the one that reads it, its shape and type."""

    maker: int
    reader: int
    shape: tuple[int, ...]
    dtype: str


class OwnTensors:
    """What units keep for themselves in one step.

    Args:
        module: whose submodules are units.
        provenance: of tensors that units make in this step.
    """

    def __init__(self, module: nn.Module, provenance: Provenance) -> None:
        self._module = module
        self._provenance = provenance
        self._reads: dict[str, list[tuple[Read, Pin]]] = defaultdict(list)  # by unit
        self._carried: set[str] = set()  # units that read what they have made in the step before
        self._earlier: Provenance | None = None
        self._before: dict[str, dict[tuple[str, str], Any]] = {}  # numbers in attributes of units, after that step

    def __bool__(self) -> bool:
        return bool(self._reads)

    def add(self, unit: str, read: Read, pin: Pin) -> None:
        """A unit has read such a tensor, for which there may be no cut."""
        self._reads[unit].append((read, pin))

    def look(self, unit: str, tensors: Sequence[Tensor]) -> None:
        """A unit takes these tensors, of whatever step."""
        if self._earlier is not None and any(self._earlier.birth(tensor) is not None for tensor in tensors):
            self._carried.add(unit)

    def follow(self, before: OwnTensors) -> None:
        """The same step ran before, with these."""
        self._earlier = before._provenance
        self._before = {unit: self._numbers(unit) for unit in before._reads}

    def made_anew(self, again: OwnTensors) -> set[str]:
        """Units that, when the step ran once more, read again what they read, and nothing that was made before."""
        reads = {unit: [read for read, _ in found] for unit, found in self._reads.items()}
        alike = {unit for unit in reads if reads[unit] == [read for read, _ in again._reads.get(unit, ())]}
        return {unit for unit in alike - again._carried if again._before[unit] == again._numbers(unit)}

    def pins(self, without: Collection[str]) -> list[Pin]:
        """Where the step cannot be cut because of all but these units."""
        return [pin for unit, reads in self._reads.items() if unit not in without for _, pin in reads]

    def _numbers(self, unit: str) -> dict[tuple[str, str], Any]:
        """Numbers in attributes of a unit, such as a counter on which it depends what is made anew."""
        modules = self._module.get_submodule(unit).named_modules()
        return {(path, n): held for path, m in modules for n, held in vars(m).items() if isinstance(held, (int, float))}

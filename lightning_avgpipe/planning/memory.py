"""Estimates of memory: how much each stage may use, and how much it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """The sizes and limits of memory that a partition depends on.

    Attributes:
        limit: bytes that each stage may use; infinite by default.
        weights: full name of each parameter or buffer -> its bytes, which cross a link once in an iteration if
            several stages use it; empty: this traffic is not counted.
        held: full name -> bytes that a stage which uses it holds for it: weight, gradient, optimizer state.
        in_flight: largest number of micro-batches in flight on each stage, shape ``(K,)``; empty: one on every stage.
        num_microbatches: M, number of micro-batches over which work that is done once in an iteration is spread.
        repeats: whether each stage repeats its forwards, shape ``(K,)``. Such a stage has one stash at a time, and
            keeps the values received for all micro-batches in flight. Empty: no stage repeats.
        versioned: full name -> bytes of each further weight version that a stage holds, or of optimizer states that are
            sharded over processes.
        versions: number of further versions, or fraction of the sharded states, on each stage, shape ``(K,)``; empty:
            none.
        stashed: largest number of micro-batches of which each stage has a stash, shape ``(K,)``; empty: all that are in
            flight.
        doubles: stages that also run the forwards of the stage before them.
        doubled: full name of each parameter or buffer -> bytes that the stages in ``doubles`` hold for it, if the stage
            before uses it.
    """

    limit: float = math.inf
    weights: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    num_microbatches: int = 1
    repeats: tuple[bool, ...] = ()
    versioned: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[float, ...] = ()
    stashed: tuple[int, ...] = ()
    doubles: frozenset[int] = frozenset()
    doubled: Mapping[str, int] = field(default_factory=dict)

    def flights(self, stage: int) -> int:
        """Return the number of micro-batches in flight on a stage."""
        return self.in_flight[stage] if self.in_flight else 1

    def further(self, stage: int) -> float:
        """Return how many weight versions a stage holds besides the current one, or its fraction of sharded states."""
        return self.versions[stage] if self.versions else 0

    def stashes(self, stage: int) -> int:
        """Return of how many micro-batches a stage has a stash at the same time."""
        if self.is_repeated(stage):
            return 1
        return self.stashed[stage] if self.stashed else self.flights(stage)

    def is_repeated(self, stage: int) -> bool:
        """Return whether a stage repeats its forwards."""
        return bool(self.repeats) and self.repeats[stage]


@dataclass(frozen=True)
class Need:
    """The estimated bytes that one stage needs.

    Attributes:
        held: bytes of weights, gradients and optimizer states.
        stash: bytes that all stashed micro-batches keep for their backwards.
        boundary: bytes of the values received for all micro-batches in flight.
    """

    held: int
    stash: int
    boundary: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.held + self.stash + self.boundary


def nbytes(number: float) -> str:
    """Format a number of bytes for messages, such as ``2.0 KiB``."""
    for suffix in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {suffix}" if suffix == "B" else f"{number:.1f} {suffix}"
        number /= 1024
    return f"{number:.1f} GiB"

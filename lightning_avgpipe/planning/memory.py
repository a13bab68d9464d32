"""Memory: what a stage may hold, and what it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """What a partition must know about memory.

    Attributes:
        limit: bytes that each stage may use; infinite by default.
        weights: full name of each parameter or buffer -> its bytes, which cross a link once in an iteration where
            several stages use it; empty: that is not counted.
        held: full name -> bytes that a stage which uses it holds for it: weight, gradient, optimizer state.
        in_flight: micro-batches that each stage stashes at most, shape ``(K,)``; empty: one on every stage.
        num_microbatches: M, over which work that is done once in an iteration is spread.
        versioned: full name -> bytes of each further version of it that a stage holds, or of optimizer states that are
            shared with other processes.
        versions: how many of them each stage holds, or which part, shape ``(K,)``; empty: none.
        repeats: of each stage whether it repeats its forwards, shape ``(K,)``; it then has one stash at a time, and
            keeps what it received for the micro-batches in flight. Empty: none does.
        stashed: micro-batches of which each stage has a stash at most, where others are in flight as well, shape
            ``(K,)``; empty: all in flight.
        doubles: stages that run the forwards of the stage before, too.
        doubled: full name of each parameter or buffer -> bytes that these hold for it.
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
        """Micro-batches in flight on a stage."""
        return self.in_flight[stage] if self.in_flight else 1

    def further(self, stage: int) -> float:
        """Versions of its weights that a stage holds beside those of now, or its part of shared states."""
        return self.versions[stage] if self.versions else 0

    def stashes(self, stage: int) -> int:
        """Micro-batches of which a stage has a stash at the same time."""
        if self.is_repeated(stage):
            return 1
        return self.stashed[stage] if self.stashed else self.flights(stage)

    def is_repeated(self, stage: int) -> bool:
        """Whether a stage repeats its forwards."""
        return bool(self.repeats) and self.repeats[stage]


@dataclass(frozen=True)
class Need:
    """Bytes that one stage needs, estimated.

    Attributes:
        held: weights, gradients and optimizer states.
        stash: what all micro-batches in flight keep for their backwards.
        boundary: values that these have received.
    """

    held: int
    stash: int
    boundary: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.stash + self.boundary


def nbytes(number: float) -> str:
    """Bytes for people: ``2.0 KiB``."""
    for suffix in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {suffix}" if suffix == "B" else f"{number:.1f} {suffix}"
        number /= 1024
    return f"{number:.1f} GiB"

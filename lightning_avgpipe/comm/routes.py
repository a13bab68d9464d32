"""Routes: what travels from which process to which, and which processes do something together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Edge:
    """One direction of the hop between two neighbouring stages, of one pipeline.

    Attributes:
        pipeline: n.
        hop: between the stages ``hop`` and ``hop + 1``.
        direction: values go forward, their gradients backward.
    """

    pipeline: int
    hop: int
    direction: Direction

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.hop if self.direction == "forward" else self.hop + 1

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.hop + 1 if self.direction == "forward" else self.hop

    def __str__(self) -> str:
        return f"{self.direction} {self.hop}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True)
class Route:
    """One way between two processes; messages of several routes do not wait for each other.

    Attributes:
        what: travels on it.
        source: rank among all that sends.
        target: rank among all that receives.
    """

    what: Edge | Literal["news", "reports", "relay", "batches"]
    source: int
    target: int

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Party:
    """Processes that do something together.

    Attributes:
        what: they are; parties of one kind meet on a connection of their own.
        ranks: of the members among all.
        on_host: whether all of it happens on the host; otherwise also between devices.
    """

    what: str
    ranks: tuple[int, ...]
    on_host: bool = True

"""Wiring: the channels between the stages of a pipeline, as far as they end in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_avgpipe.comm.channel import Inbox, LocalChannel, Outbox

if TYPE_CHECKING:
    from lightning_avgpipe.comm.mesh import Mesh

__all__ = ["DIRECTIONS", "Wiring", "channel_name", "wire"]

DIRECTIONS = ("forward", "backward")


class Wiring:
    """The channels of one stage: its ends of the hop before and of the hop after it."""

    def __init__(self) -> None:
        self.values: Inbox | None = None
        self.to_next: Outbox | None = None
        self.gradients: Inbox | None = None
        self.to_previous: Outbox | None = None


def channel_name(direction: str, hop: int, pipeline: int) -> str:
    """As ``forward 0``, or ``forward 0 of pipeline 1``."""
    return f"{direction} {hop}" + (f" of pipeline {pipeline}" if pipeline else "")


def wire(
    mesh: Mesh,
    pipeline: int,
    inbox: Callable[[str, int, int, int], Inbox],
    outbox: Callable[[str, int, int, int], Outbox],
) -> dict[tuple[int, int], Wiring]:
    """Connect the stages that a process hosts: (pipeline, stage) -> channels.

    Args:
        mesh: who hosts what.
        pipeline: n.
        inbox: opens the receiving end of a channel: its name, the lower and the upper end's rank, the peer's.
        outbox: opens the sending end.
    """
    made = {k: Wiring() for k in mesh.stages}
    for k in range(mesh.num_stages - 1):
        a, b = mesh.rank_of(k), mesh.rank_of(k + 1)
        forward, backward = (channel_name(direction, k, pipeline) for direction in DIRECTIONS)
        if a == b:
            if a == mesh.rank:
                values, gradients = LocalChannel(), LocalChannel()
                made[k].to_next, made[k + 1].values = values, values
                made[k + 1].to_previous, made[k].gradients = gradients, gradients
        elif mesh.rank == a:
            made[k].to_next = outbox(forward, a, b, b)
            made[k].gradients = inbox(backward, a, b, b)
        elif mesh.rank == b:
            made[k + 1].values = inbox(forward, a, b, a)
            made[k + 1].to_previous = outbox(backward, a, b, a)
    return {(pipeline, k): wiring for k, wiring in made.items()}

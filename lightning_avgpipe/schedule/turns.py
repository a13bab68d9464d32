"""Costs of stages with replicas, each on a device of its own, that take the micro-batches of their stage in turns.

::

    stage 0, replica 0   F0 F0 F2 F2 .. .. .. B0 B0 ..      a micro-batch takes the time of one device,
    stage 0, replica 1   F1 F1 F3 F3 .. ..                  and only replicas whose turns meet send to each other
    stage 1                    F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.kinds import FORWARD, Direction, Kind
from lightning_avgpipe.schedule.player import play
from lightning_avgpipe.schedule.recipes import build

Matrix = Sequence[Sequence[float]]
_ADVANCES = (0, 1, 2)  # the adaptive advance would find the fastest of these


def candidates(name: str, num_stages: int, num_microbatches: int) -> list[Schedule]:
    """Return the schedules of this name: several advances of advance forward propagation, otherwise only one."""
    advances = _ADVANCES if name == "advance_forward" else (0,)
    return [build(name, num_stages, num_microbatches, advance) for advance in advances]


@dataclass(frozen=True)
class ReplicatedStageCosts:
    """Stages whose replicas take whole micro-batches in turns; devices are numbered from the first stage on.

    Attributes:
        replicas: number of devices of each stage, shape ``(S,)``.
        forward_s: seconds of the forward of each stage, shape ``(S,)``.
        backward_s: seconds of the backward of each stage, shape ``(S,)``.
        bytes_forward: bytes of the activations of each hop, shape ``(S-1,)``.
        bytes_backward: bytes of the gradients of each hop, shape ``(S-1,)``.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``. Links of different pairs do not disturb
            each other.
        slowness: time of each device relative to one that is not slow, shape ``(V,)``; empty: none is slow.
        latency_s: further seconds until each message arrives, in which its link may carry others.
    """

    replicas: Sequence[int]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    bytes_forward: Sequence[float]
    bytes_backward: Sequence[float]
    bandwidth: Matrix
    slowness: Sequence[float] = ()
    latency_s: float = 0.0

    @property
    def num_stages(self) -> int:
        """The number S of stages."""
        return len(self.replicas)

    @property
    def _firsts(self) -> list[int]:
        """The first device of each stage, and the number of all devices."""
        return [0, *itertools.accumulate(self.replicas)]

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the only part of an action of a replica, which uses its device fully."""
        seconds = (self.forward_s if kind is FORWARD else self.backward_s)[stage]
        return ((seconds * (self.slowness[self._firsts[stage] + replica] if self.slowness else 1.0), 1.0),)

    def message_s(self, direction: Direction, hop: int, sender: int = 0, receiver: int = 0) -> tuple[float, float]:
        """Return the seconds of a message from one replica to another, and its latency."""
        here, there = (hop, hop + 1) if direction == "forward" else (hop + 1, hop)
        nbytes = (self.bytes_forward if direction == "forward" else self.bytes_backward)[hop]
        return nbytes / self.bandwidth[self._firsts[here] + sender][self._firsts[there] + receiver], self.latency_s

    def ends_s(self, schedule: Schedule) -> list[float]:
        """Return when each stage ends its last action, in seconds.

        Args:
            schedule: schedule for replicas, each of whose rows is in the order of micro-batches.
        """
        firsts = self._firsts
        lanes = play([schedule], self, [range(*ends) for ends in itertools.pairwise(firsts)]).lanes
        return [
            max(lane.spans[-1][1] for lane in lanes if lane.stage == k and lane.spans) for k in range(self.num_stages)
        ]

"""Costs: how long the actions of each stage and the messages of each hop take."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.kinds import (
    BACKWARD,
    DOUBLE_FORWARD,
    FORWARD,
    GRAPH,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Direction,
    Kind,
)
from lightning_avgpipe.schedule.timeline import Timeline

Pieces = tuple[tuple[float, float], ...]  # parts of an action: seconds, and the share of the device in use, 0..1


class CostModel(Protocol):
    """The costs that the simulator needs."""

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        ...

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the parts of an action, each with its seconds and its utilisation of the device."""
        ...

    def message_s(self, direction: Direction, hop: int, sender: int = 0, receiver: int = 0) -> tuple[float, float]:
        """Return the seconds for which a message occupies its link, and the seconds from then until it arrives.

        Args:
            direction: direction of the message.
            hop: number of the stage in front of the hop.
            sender: replica that sends the message.
            receiver: replica that receives it.
        """
        ...


@dataclass(frozen=True)
class StageCosts:
    """The seconds that the actions of each stage and the messages of each hop take, per micro-batch.

    Attributes:
        forward_s: seconds of a forward of each stage, shape ``(K,)``.
        backward_s: seconds of a backward of each stage, shape ``(K,)``.
        send_forward_s: seconds for which activations occupy the link of each hop, shape ``(K-1,)``.
        send_backward_s: seconds for which gradients occupy the link of each hop, shape ``(K-1,)``.
        latency_s: latency of each hop in seconds, in either direction, shape ``(K-1,)``.
        input_s: seconds of the half of a backward that computes the gradients of a stage's inputs, shape ``(K,)``;
            default: half of ``backward_s``, as for layers that multiply by matrices.
        weight_s: seconds of the half that computes the gradients of a stage's weights, shape ``(K,)``; default: the
            rest of ``backward_s``.
    Raises:
        ScheduleError: no stage, lengths that do not fit together, or a time that is negative or not finite.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    latency_s: Sequence[float]
    input_s: Sequence[float] = ()
    weight_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if num_stages == 0:
            raise ScheduleError("forward_s has no entries; give one per stage, at least one")
        if not self.input_s:
            object.__setattr__(self, "input_s", tuple(seconds / 2 for seconds in self.backward_s))
        if not self.weight_s:
            rest = (b - i for b, i in zip(self.backward_s, self.input_s, strict=False))
            object.__setattr__(self, "weight_s", tuple(rest))
        wanted = {kind.cost: num_stages for kind in KINDS} | dict.fromkeys(
            ("send_forward_s", "send_backward_s", "latency_s"), num_stages - 1
        )
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                raise ScheduleError(
                    f"{name} has {len(getattr(self, name))} entries, but needs {length}: forward_s has {num_stages}"
                )
        for name in wanted:
            if not all(0 <= seconds < math.inf for seconds in getattr(self, name)):
                raise ScheduleError(f"{name}={list(getattr(self, name))}: times must be finite and not negative")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float,
        backward_s: float,
        send_s: float = 0.0,
        latency_s: float = 0.0,
        input_s: float | None = None,
    ) -> StageCosts:
        """Make the costs of equal stages and hops; ``send_s`` is per hop and direction."""
        send, latency = (send_s,) * (num_stages - 1), (latency_s,) * (num_stages - 1)
        half = () if input_s is None else (input_s,) * num_stages
        return cls((forward_s,) * num_stages, (backward_s,) * num_stages, send, send, latency, half)

    @classmethod
    def measured(cls, timeline: Timeline) -> StageCosts:
        """Make costs from the medians of a timeline; 0 for what does not occur, such as messages within a device.

        Without split backwards in the timeline, each half takes half of a backward. Without whole backwards, a backward
        takes the sum of its halves.
        """
        stages, hops = range(timeline.num_stages), range(timeline.num_stages - 1)

        def action_s(kind: Kind) -> tuple[float, ...]:
            spans = [span for span in timeline.spans if span.action.kind is kind]
            return tuple(_median(s.end_s - s.begin_s for s in spans if s.stage == k) for k in stages)

        def send_s(direction: Direction) -> tuple[float, ...]:
            sent = [transfer for transfer in timeline.transfers if transfer.direction == direction]
            return tuple(_median(t.end_s - t.begin_s for t in sent if t.hop == hop) for hop in hops)

        latency_s = tuple(_median(t.arrival_s - t.end_s for t in timeline.transfers if t.hop == hop) for hop in hops)
        seconds = {kind: action_s(kind) for kind in KINDS}
        input_s, weight_s = seconds[INPUT_GRADIENT], seconds[WEIGHT_GRADIENT]
        halves = (input_s, weight_s) if any(input_s + weight_s) else ()
        whole = seconds[BACKWARD] if any(seconds[BACKWARD]) else tuple(map(sum, zip(input_s, weight_s, strict=True)))
        forward_s: list[float] = []
        for k in stages:
            further = max(0.0, seconds[DOUBLE_FORWARD][k] - forward_s[-1]) if k else 0.0
            forward_s.append(seconds[FORWARD][k] or seconds[GRAPH][k] or further)
        return cls(tuple(forward_s), whole, send_s("forward"), send_s("backward"), latency_s, *halves)

    def on(self, devices: Sequence[int]) -> StageCosts:
        """Return the costs for stages on these devices, shape ``(K,)``: messages within a device take no time."""
        apart = [here != there for here, there in itertools.pairwise(devices)]
        hops = {name: getattr(self, name) for name in ("send_forward_s", "send_backward_s", "latency_s")}
        return replace(self, **{n: [s * far for s, far in zip(of, apart, strict=True)] for n, of in hops.items()})

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.forward_s)

    @property
    def double_s(self) -> tuple[float, ...]:
        """The seconds of a forward of each stage together with the one before it, shape ``(K,)``."""
        return tuple(a + b for a, b in zip((0.0, *self.forward_s), self.forward_s, strict=False))

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the only part of an action, which uses its device fully; all replicas take the same time."""
        return ((getattr(self, kind.cost)[stage], 1.0),)

    def message_s(self, direction: Direction, hop: int, sender: int = 0, receiver: int = 0) -> tuple[float, float]:
        """Return the seconds for which a message occupies its link, and the seconds from then until it arrives."""
        send_s = self.send_forward_s if direction == "forward" else self.send_backward_s
        return send_s[hop], self.latency_s[hop]


def _median(seconds: Iterable[float]) -> float:
    found = list(seconds)
    return max(0.0, statistics.median(found)) if found else 0.0


def least_possible_s(costs: StageCosts, num_microbatches: int) -> float:
    """Return a lower bound for the time of an iteration with whole backwards, in seconds.

    Each stage waits for its first activation and does its work, and then its last gradient travels back to stage 0.

    ::

        stage 0 | F0                      B_
        stage 1 |    F0                B_
        stage 2 |       F0 ... M(f+b) B_       <- busy without a pause
    """
    before = least = 0.0  # seconds of one micro-batch to stage k and back
    for k, (forward_s, backward_s) in enumerate(zip(costs.forward_s, costs.backward_s, strict=True)):
        least = max(least, before + num_microbatches * (forward_s + backward_s))
        before += forward_s + backward_s
        if k < len(costs.latency_s):
            before += costs.send_forward_s[k] + costs.send_backward_s[k] + 2 * costs.latency_s[k]
    return least

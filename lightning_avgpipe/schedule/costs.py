"""Costs: how long the actions of each stage and the messages of each hop take."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, KINDS, Direction, Kind
from lightning_avgpipe.schedule.timeline import Timeline

Pieces = tuple[tuple[float, float], ...]  # parts of an action: seconds, and the share of the device in use, 0..1

_OF_HOPS = ("send_forward_s", "send_backward_s", "latency_s")  # costs that have an entry per hop


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
            hop: number of the stage before the hop.
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
        of_kinds: name of a further kind of action -> its seconds on each stage, shape ``(K,)``. The seconds of a kind
            that is missing follow from the other costs, see :attr:`Kind.seconds`.
    Raises:
        ScheduleError: no stage, lengths that do not fit together, or a time that is negative or not finite.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    latency_s: Sequence[float]
    of_kinds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if num_stages == 0:
            raise ScheduleError("forward_s has no entries; give one per stage, at least one")
        given = {name: getattr(self, name) for name in ("forward_s", "backward_s", *_OF_HOPS)} | dict(self.of_kinds)
        for name, seconds in given.items():
            length = num_stages - (name in _OF_HOPS)
            if len(seconds) != length:
                raise ScheduleError(
                    f"{name} has {len(seconds)} entries, but needs {length}: forward_s has {num_stages}"
                )
        for name, seconds in [*given.items(), *((kind.name, self._each(kind)) for kind in KINDS)]:
            if not all(0 <= each < math.inf for each in seconds):
                raise ScheduleError(f"{name}={list(seconds)}: times must be finite and not negative")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float,
        backward_s: float,
        send_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> StageCosts:
        """Make the costs of equal stages and hops; ``send_s`` is per hop and direction."""
        send, latency = (send_s,) * (num_stages - 1), (latency_s,) * (num_stages - 1)
        return cls((forward_s,) * num_stages, (backward_s,) * num_stages, send, send, latency)

    @classmethod
    def measured(cls, timeline: Timeline) -> StageCosts:
        """Make costs from the medians of a timeline; 0 for what does not occur, such as messages within a device.

        If the timeline has no backwards, a backward takes the sum of the kinds that replace it. If a stage runs no
        forwards, a forward takes the time of the kind that replaces it, minus the work of other stages in that.
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
        further = {k: s for k, s in seconds.items() if k not in (FORWARD, BACKWARD) and k.counts_as is None and any(s)}
        whole = seconds[BACKWARD]
        if not any(whole):
            whole = tuple(sum(s[k] for s in further.values()) for k in stages)
        of_kinds = {kind.name: s for kind, s in further.items()}
        found = cls(seconds[FORWARD], whole, send_s("forward"), send_s("backward"), latency_s, of_kinds)
        for k in stages:
            for kind in KINDS:
                if kind.counts_as is FORWARD and seconds[kind][k] and not found.forward_s[k]:
                    each = max(0.0, seconds[kind][k] - kind.seconds(found, k))
                    found = replace(found, forward_s=(*found.forward_s[:k], each, *found.forward_s[k + 1 :]))
        return found

    def on(self, devices: Sequence[int]) -> StageCosts:
        """Return the costs for stages on these devices, shape ``(K,)``: messages within a device take no time."""
        apart = [here != there for here, there in itertools.pairwise(devices)]
        hops: dict[str, Any] = {name: getattr(self, name) for name in _OF_HOPS}
        hops = {name: [s * far for s, far in zip(seconds, apart, strict=True)] for name, seconds in hops.items()}
        return replace(self, **hops)

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.forward_s)

    def seconds(self, kind: Kind, stage: int) -> float:
        """Return the seconds of an action of a stage."""
        given = self.of_kinds.get(kind.name)
        return kind.seconds(self, stage) if given is None else given[stage]

    def _each(self, kind: Kind) -> list[float]:
        return [self.seconds(kind, k) for k in range(self.num_stages)]

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the only part of an action, which uses its device fully; all replicas take the same time."""
        return ((self.seconds(kind, stage), 1.0),)

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

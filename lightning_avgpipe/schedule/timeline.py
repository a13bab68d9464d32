"""Timelines: when actions ran and messages travelled in one iteration or several, simulated or recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import Direction


@dataclass(frozen=True)
class Span:
    """One action of one stage of a pipeline, from ``begin_s`` to ``end_s``."""

    stage: int
    action: Action
    begin_s: float
    end_s: float
    pipeline: int = 0
    iteration: int = 0


@dataclass(frozen=True)
class Transfer:
    """One message, which occupies the link of a hop from ``begin_s`` to ``end_s`` and arrives at ``arrival_s``."""

    hop: int
    direction: Direction
    micro_batch: int
    begin_s: float
    end_s: float
    arrival_s: float
    pipeline: int = 0
    iteration: int = 0

    @property
    def source(self) -> int:
        """The stage that sends the message."""
        return self.hop if self.direction == "forward" else self.hop + 1


@dataclass(frozen=True)
class Activity:
    """An activity of a device besides actions: a wait for a message, a step of the optimizer, or averaging.

    Attributes:
        device: device, as in ``Timeline.replicas``.
        kind: ``"wait"``, ``"step"`` or ``"averaging"``.
        begin_s: start time in seconds.
        end_s: end time in seconds.
        note: what a wait waits for.
    """

    device: int
    kind: Literal["wait", "step", "averaging"]
    begin_s: float
    end_s: float
    note: str = ""


@dataclass(frozen=True)
class Timeline:
    """The times of all actions, messages and activities of one iteration, or of several without a drain between them.

    Attributes:
        num_stages: K, number of stages.
        spans: all actions; those of one stage are in the order of their ends.
        transfers: all messages between devices.
        peak_stash: largest number of stashed micro-batches, of all pipelines together, shape ``(K,)``.
        replicas: devices that take the micro-batches of each stage in turns, shape ``(K, any)``.
        activities: all other activities; none in a simulation.
    """

    num_stages: int
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    peak_stash: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    activities: tuple[Activity, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The devices, ordered by their first stage: the rows of a picture."""
        return tuple(dict.fromkeys(device for hosts in self.replicas for device in hosts))

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages of a device."""
        return tuple(k for k, hosts in enumerate(self.replicas) if device in hosts)

    def device_of(self, stage: int, micro_batch: int) -> int:
        """Return the device that runs a micro-batch of a stage."""
        hosts = self.replicas[stage]
        return hosts[micro_batch % len(hosts)]

    @cached_property
    def begin_s(self) -> float:
        """The start time of the first action, in seconds; 0 in a simulation."""
        return min((span.begin_s for span in self.spans), default=0.0)

    @cached_property
    def iteration_s(self) -> float:
        """The seconds from the start of the first action to the end of the last one, over all iterations."""
        return max((span.end_s for span in self.spans), default=0.0) - self.begin_s

    @cached_property
    def num_pipelines(self) -> int:
        """The number of pipelines N."""
        return 1 + max((span.pipeline for span in self.spans), default=0)

    @cached_property
    def _steady(self) -> tuple[float, float, int]:
        """The start and end of the iterations in the middle, or of the only one, and the number of these iterations."""
        last_ends: dict[int, float] = {}
        for span in self.spans:
            last_ends[span.iteration] = max(span.end_s, last_ends.get(span.iteration, 0.0))
        ends = [last_ends[t] for t in sorted(last_ends)]
        if len(ends) < 2:
            return self.begin_s, max(ends, default=self.begin_s), 1
        first = len(ends) // 4
        last = max(first + 1, len(ends) - 1 - first)
        return ends[first], ends[last], last - first

    @property
    def steady_s(self) -> float:
        """The mean seconds of an iteration, over the iterations in the middle of several without a drain."""
        begin_s, end_s, count = self._steady
        return (end_s - begin_s) / count

    @cached_property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in which no action runs, in the iterations of ``steady_s``, 0..1."""
        begin_s, end_s, _ = self._steady
        busy = sum(max(0.0, min(s.end_s, end_s) - max(s.begin_s, begin_s)) for s in self.spans)
        return 1.0 - busy / (len(self.rows) * (end_s - begin_s)) if end_s > begin_s else 0.0

    def schedule(self, pipeline: int = 0) -> Schedule:
        """Return the order in which the actions of a pipeline began in the first iteration."""
        here = (span for span in self.spans if (span.pipeline, span.iteration) == (pipeline, 0))
        ordered = sorted(here, key=lambda span: (span.begin_s, span.end_s))
        rows = tuple(tuple(span.action for span in ordered if span.stage == k) for k in range(self.num_stages))
        count = 1 + max((span.action.micro_batch for span in ordered), default=0)
        return Schedule("recorded", self.num_stages, count, rows)

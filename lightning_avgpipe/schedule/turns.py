"""Simulation of stages on devices of their own, some of which share a stage and take its micro-batches in turns.

::

    stage 0, replica 0   F0 F0 F2 F2 .. .. .. B0 B0 ..      a micro-batch takes the time of one device,
    stage 0, replica 1   F1 F1 F3 F3 .. ..                  and only replicas whose turns meet send to each other
    stage 1                    F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import in_turn
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import FORWARD, Direction
from lightning_avgpipe.schedule.rules import peak_stash
from lightning_avgpipe.schedule.timeline import Span, Timeline, Transfer

Matrix = Sequence[Sequence[float]]
_Spans = list[tuple[int, Action, float, float]]  # stage, action, begin and end in seconds
_Sent = list[tuple[int, Direction, int, float, float]]  # hop, direction, micro-batch, begin and end in seconds


@dataclass(frozen=True)
class SharedStages:
    """Stages whose replicas take whole micro-batches in turns; devices are numbered from the first stage on.

    Attributes:
        replicas: number of devices of each stage, shape ``(S,)``.
        forward_s: seconds of the forward of each stage, shape ``(S,)``.
        backward_s: seconds of the backward of each stage, shape ``(S,)``.
        bytes_forward: bytes of the activations of each hop, shape ``(S-1,)``.
        bytes_backward: bytes of the gradients of each hop, shape ``(S-1,)``.
        bandwidth: bytes per second between every two devices, shape ``(V, V)``. Links of different pairs do not disturb
            each other.
        slowness: time of each device in units of one that is not slow, shape ``(V,)``; empty: none is slow.
    """

    replicas: Sequence[int]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    bytes_forward: Sequence[float]
    bytes_backward: Sequence[float]
    bandwidth: Matrix
    slowness: Sequence[float] = ()

    def ends_s(self, schedule: Schedule) -> list[float]:
        """Return when each stage ends its last action, in seconds.

        Args:
            schedule: schedule for replicas, each of whose rows is in the order of micro-batches.
        """
        ends = [0.0] * len(self.replicas)
        for k, _, _, end_s in self._played(schedule)[0]:
            ends[k] = max(ends[k], end_s)
        return ends

    def timeline(self, schedule: Schedule, devices: Sequence[Sequence[int]] = ()) -> Timeline:
        """Return the timeline of all replicas.

        Args:
            schedule: as for :meth:`ends_s`.
            devices: numbers of the devices of each stage in the timeline; default: as they are numbered here.
        """
        spans, sent = self._played(schedule)
        hosts = tuple(map(tuple, devices)) or tuple(
            tuple(range(first, first + count)) for first, count in zip(self._firsts, self.replicas, strict=True)
        )
        rows = [in_turn(row, 0, count) for row, count in zip(schedule.rows, self.replicas, strict=True)]
        return Timeline(
            len(self.replicas),
            tuple(Span(*span) for span in sorted(spans, key=lambda span: (span[0], span[3]))),
            tuple(Transfer(hop, direction, i, begin, end, end) for hop, direction, i, begin, end in sent),
            tuple(peak_stash(rows)), replicas=hosts,
        )  # fmt: skip

    @property
    def _firsts(self) -> list[int]:
        """The first device of each stage."""
        return [0, *itertools.accumulate(self.replicas[:-1])]

    def _played(self, schedule: Schedule) -> tuple[_Spans, _Sent]:
        """Return all actions and messages."""
        firsts, last = self._firsts, len(self.replicas) - 1
        lanes = [
            (k, firsts[k] + j, deque(in_turn(schedule.rows[k], j, count)))
            for k, count in enumerate(self.replicas)
            for j in range(count)
        ]
        free: dict[int, float] = {device: 0.0 for _, device, _ in lanes}
        links: dict[tuple[int, int], float] = {}
        arrived: dict[tuple[bool, int, int], float] = {(True, 0, i): 0.0 for i in range(schedule.num_microbatches)}
        arrived |= {(False, last, i): 0.0 for i in range(schedule.num_microbatches)}
        spans: _Spans = []
        sent: _Sent = []
        moved = True
        while moved:
            moved = False
            for k, device, row in lanes:
                while row and (key := (row[0].kind is FORWARD, k, row[0].micro_batch)) in arrived:
                    action = row.popleft()
                    forward, i = key[0], action.micro_batch
                    begin_s = max(free[device], arrived[key])
                    seconds = (self.forward_s if forward else self.backward_s)[k]
                    free[device] = begin_s + seconds * (self.slowness[device] if self.slowness else 1.0)
                    spans.append((k, action, begin_s, free[device]))
                    moved, to = True, k + 1 if forward else k - 1
                    if 0 <= to <= last:
                        peer = firsts[to] + i % self.replicas[to]
                        sizes, hop = (self.bytes_forward, k) if forward else (self.bytes_backward, to)
                        begin_s = max(links.get((device, peer), 0.0), free[device])
                        end_s = begin_s + sizes[hop] / self.bandwidth[device][peer]
                        arrived[forward, to, i] = links[device, peer] = end_s
                        sent.append((hop, "forward" if forward else "backward", i, begin_s, end_s))
        return spans, sent


def replayed_in_turns(timeline: Timeline) -> Timeline:
    """Simulate the schedule of a recorded timeline of one pipeline with the median times of its actions."""
    costs, counts = StageCosts.measured(timeline), [len(hosts) for hosts in timeline.replicas]
    speeds = [[1.0] * sum(counts)] * sum(counts)  # 1 byte/s, so that bytes are seconds
    there, back = costs.send_forward_s, costs.send_backward_s
    stages = SharedStages(counts, costs.forward_s, costs.backward_s, there, back, speeds)
    return stages.timeline(timeline.schedule(), timeline.replicas)

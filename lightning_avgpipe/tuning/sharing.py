"""Several pipelines on shared devices and links, simulated: how long an iteration takes.

The model is that of ``schedule.simulator``, with N lanes per stage on the devices of ``lanes``. A message queues behind
those of all pipelines on its link. What happens at the same instant has happened before a device decides what to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.tuning.lanes import Device, InTurns, Lane, Link, Pieces, SideBySide
from lightning_avgpipe.tuning.profile import Curve
from lightning_avgpipe.tuning.scaling import Load, Loads

__all__ = ["iteration_s"]

_PIECES = 8  # of a curve, at most; more take time and change little


def iteration_s(
    schedule: Schedule, num_pipelines: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """Seconds until the last action of N pipelines has ended.

    Args:
        schedule: of each pipeline.
        num_pipelines: N; all begin at once.
        loads: of one micro-batch on each stage and hop.
        devices: of each stage, shape ``(K,)``.
        in_turns: whether a device runs one action at a time.
    """
    return _run(_lanes(schedule, num_pipelines, loads, devices, in_turns))


def _run(lanes: Sequence[Lane]) -> float:
    now, queue = 0.0, _Queue()
    for lane in lanes:
        queue.wake(lane, now)
    while queue.events:
        now = queue.events[0][0]
        changed: dict[Device, None] = {}  # in order
        while queue.events and queue.events[0][0] == now:
            _, _, who, version = heapq.heappop(queue.events)
            if isinstance(who, Lane):
                action = who.row[who.position]
                assert action is not None
                who.device.add(who, action)
                changed[who.device] = None
            elif version == who.version:
                for lane in who.ended(now):
                    queue.end(lane, now)
                changed[who] = None
        for device in changed:
            due = device.go_on(now)
            if due is not None:
                queue.push(due, device, device.version)
    return now


class _Queue:
    """What is known to happen."""

    def __init__(self) -> None:
        # time, serial number (so that nothing else is compared), device and its version, or lane that may go on
        self.events: list[tuple[float, int, Device | Lane, int]] = []
        self.serial = 0

    def push(self, time: float, who: Device | Lane, version: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, who, version))

    def wake(self, lane: Lane, now: float) -> None:
        """Let a lane go on as soon as the input of its next action is there, if that is known."""
        action = lane.row[lane.position]
        if action in lane.arrivals:
            self.push(max(now, lane.arrivals[action]), lane, 0)

    def end(self, lane: Lane, now: float) -> None:
        """Send what an action gave, and see when the next one may begin."""
        action = lane.row[lane.position]
        assert action is not None
        lane.position += 1
        if action.kind in lane.receivers:
            receiver, link = lane.receivers[action.kind]
            receiver.arrivals[action] = arrival = link.send(now)
            if receiver.row[receiver.position] == action:
                self.push(arrival, receiver, 0)
        self.wake(lane, now)


def _lanes(
    schedule: Schedule, num_pipelines: int, loads: Loads, devices: Sequence[int], in_turns: bool
) -> list[Lane]:
    """Connected, and with the inputs that no message brings."""
    stages, last = range(schedule.num_stages), schedule.num_stages - 1
    full = _full(num_pipelines, loads, devices)
    pieces = [
        {kind: _pieces(load, not in_turns and device in full) for kind, load in (("F", f), ("B", b))}
        for f, b, device in zip(loads.forward, loads.backward, devices, strict=True)
    ]
    forward = [Link(loads.values_s[hop], loads.latency_s[hop][0]) for hop in range(last)]
    backward = [Link(loads.gradients_s[hop], loads.latency_s[hop][1]) for hop in range(last)]
    by_number: dict[int, Device] = {d: InTurns() if in_turns else SideBySide() for d in devices}
    found: list[Lane] = []
    for n in range(num_pipelines):
        row = schedule.rows
        lanes = [Lane(row[k], n * len(stages) + k, by_number[devices[k]], pieces[k]) for k in stages]
        lanes[0].arrivals = {action: 0.0 for action in row[0] if action.kind == "F"}
        lanes[last].arrivals |= {action: 0.0 for action in row[last] if action.kind == "B"}
        for hop in range(last):
            lanes[hop].receivers["F"] = lanes[hop + 1], forward[hop]
            lanes[hop + 1].receivers["B"] = lanes[hop], backward[hop]
        found += lanes
    return found


def _full(num_pipelines: int, loads: Loads, devices: Sequence[int]) -> set[int]:
    """Devices that may have to slow their lanes down."""
    most: dict[int, float] = {}
    for device, *both in zip(devices, loads.forward, loads.backward, strict=True):
        peak = max(used for load in both for used in load.curve.utilisation)
        most[device] = most.get(device, 0.0) + num_pipelines * peak
    return {device for device, demand in most.items() if demand > 1.0}


def _pieces(load: Load, of_matter: bool) -> Pieces:
    """Seconds and utilisation; a long curve becomes few pieces of equal length with the same work.

    Args:
        of_matter: whether utilisations are; otherwise there is one piece.
    """
    curve = load.curve
    if not of_matter or curve.total_s == 0:
        return ((curve.total_s, 0.0),)
    if len(curve.seconds) <= _PIECES:
        return tuple(zip(curve.seconds, curve.utilisation, strict=True))
    length = curve.total_s / _PIECES
    return tuple((length, min(1.0, work / length)) for work in _work_per_slice(curve, length))


def _work_per_slice(curve: Curve, length: float) -> list[float]:
    work = [0.0] * _PIECES
    begin = 0.0
    for seconds, utilisation in zip(curve.seconds, curve.utilisation, strict=True):
        end = begin + seconds
        for i in range(_PIECES):
            overlap = min(end, (i + 1) * length) - max(begin, i * length)
            work[i] += max(0.0, overlap) * utilisation
        begin = end
    return work

"""Several pipelines on shared devices and links, simulated: how long an iteration takes.

The model is that of ``schedule.simulator``, with N lanes per stage on the devices of ``lanes``. A message queues behind
those of all pipelines on its link. What happens at the same instant has happened before a device decides what to do.

Once everything happens again after a period, every further micro-batch adds a period and need not be played::

    stage 0 | F0 F1  F2 B0  F3 B1  F4 B2  F5 B3 | B4 B5
                            |--P--|--P--|--P--|         on every stage of every pipeline
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.tuning.lanes import Device, InTurns, Lane, Link, Pieces, SideBySide
from lightning_avgpipe.tuning.profile import Curve
from lightning_avgpipe.tuning.scaling import Load, Loads
from lightning_avgpipe.tuning.setting import Setting

__all__ = ["iteration_s", "steady_iteration_s"]

_PIECES = 8  # of a curve, at most; more take time and change little
_EVEN = 4  # backwards of a lane that tell whether its pace is even
_ROUNDING = 1e-9  # of a period


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
    return _Simulation(_lanes(schedule, num_pipelines, loads, devices, in_turns)).run()


def steady_iteration_s(
    setting: Setting, num_stages: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """``iteration_s`` of a setting; from when on its pace is even, micro-batches are counted instead of played."""
    m = setting.num_microbatches
    schedule = build(setting.schedule, num_stages, m, setting.advance)
    lanes = _lanes(schedule, setting.num_pipelines, loads, devices, in_turns)
    simulation = _Simulation(lanes)
    for done in range(_EVEN, m - schedule.warm_up[0], _EVEN):
        now = simulation.run(done)
        begun = 1 + max(len(lane.ends["F"]) for lane in lanes[::num_stages])
        period = _period(lanes, now)
        if period is not None and begun < m:
            rest = build(setting.schedule, num_stages, begun, setting.advance)  # which began in the same way
            for k, lane in enumerate(lanes):
                lane.row = (*rest.rows[k % num_stages], None)
            return simulation.run() + (m - begun) * period
    return simulation.run()


def _period(lanes: Sequence[Lane], now: float) -> float | None:
    """Seconds after which everything has happened again, and again; None if it has not."""
    period = lanes[0].ends["B"][-1] - lanes[0].ends["B"][-2]
    for lane in lanes:
        for ends in lane.ends.values():
            if len(ends) <= _EVEN or ends[-1] < now - 2 * period:
                return None
            for before, after in itertools.pairwise(ends[-_EVEN:]):
                if abs(after - before - period) > _ROUNDING * period:
                    return None
    return period


class _Simulation:
    """What is known to happen to some lanes."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes, self.now = lanes, 0.0
        # time, serial number (so that nothing else is compared), device and its version, or lane that may go on
        self.events: list[tuple[float, int, Device | Lane, int]] = []
        self.serial = 0
        for lane in lanes:
            self._wake(lane)

    def run(self, backwards: int | None = None) -> float:
        """Play on until the first lane has ended so many backwards, or to the end; returns when that is, in seconds."""
        events, done = self.events, self.lanes[0].ends["B"]
        while events and len(done) != backwards:
            now = self.now = events[0][0]
            changed: dict[Device, None] = {}  # in order
            while events and events[0][0] == now:
                _, _, who, version = heapq.heappop(events)
                if isinstance(who, Lane):
                    action = who.row[who.position]
                    assert action is not None
                    who.device.add(who, action)
                    changed[who.device] = None
                elif version == who.version:
                    for lane in who.ended(now):
                        self._end(lane)
                    changed[who] = None
            for device in changed:
                due = device.go_on(now)
                if due is not None:
                    self._push(due, device, device.version)
        return self.now

    def _push(self, time: float, who: Device | Lane, version: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, who, version))

    def _wake(self, lane: Lane) -> None:
        """Let a lane go on as soon as the input of its next action is there, if that is known."""
        action = lane.row[lane.position]
        if action in lane.arrivals:
            self._push(max(self.now, lane.arrivals[action]), lane, 0)

    def _end(self, lane: Lane) -> None:
        """Send what an action gave, and see when the next one may begin."""
        action = lane.row[lane.position]
        assert action is not None
        lane.position += 1
        lane.ends[action.kind].append(self.now)
        if action.kind in lane.receivers:
            receiver, link = lane.receivers[action.kind]
            receiver.arrivals[action] = arrival = link.send(self.now)
            if receiver.row[receiver.position] == action:
                self._push(arrival, receiver, 0)
        self._wake(lane)


def _lanes(schedule: Schedule, num_pipelines: int, loads: Loads, devices: Sequence[int], in_turns: bool) -> list[Lane]:
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

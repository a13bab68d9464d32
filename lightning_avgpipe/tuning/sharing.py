"""Several pipelines on shared devices and links, simulated: how long an iteration takes.

The model is that of ``schedule.simulator``, with N lanes per stage. A message queues behind those of all pipelines on
its link. A device serves its lanes side by side: while their utilisations sum to more than 1, all of them are slowed
down by that sum. Or it serves them in turns: backwards first, then the lowest micro-batch, as the executor does.

As all lanes of a device are slowed down alike, each device has a clock of its own, which runs at the speed of its
lanes: a lane's piece ends at a time on that clock that nobody who comes or goes later can change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from lightning_avgpipe.schedule import Action, Schedule
from lightning_avgpipe.tuning.profile import Curve
from lightning_avgpipe.tuning.scaling import Load, Loads

__all__ = ["iteration_s"]

_PIECES = 8  # of a curve, at most; more take time and change little
_ROUNDING = 1e-12


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
    return _Simulation(schedule, num_pipelines, loads, devices, in_turns).run()


class _Lane:
    """One stage of one pipeline."""

    __slots__ = ("arrivals", "device", "number", "piece", "pieces", "position", "stage", "until", "utilisation")

    def __init__(self, stage: int, number: int, device: _Device) -> None:
        self.stage, self.number, self.device = stage, number, device
        self.position = 0
        self.arrivals: dict[Action, float] = {}
        self.pieces: tuple[tuple[float, float], ...] = ()
        self.piece = 0
        self.until = 0.0  # end of the piece on the device's clock
        self.utilisation = 0.0


class _Device:
    """Its lanes that run, those that wait for their turn, and its clock."""

    __slots__ = ("clock", "running", "slowness", "updated", "version", "waiting")

    def __init__(self) -> None:
        self.running: list[_Lane] = []
        self.waiting: list[_Lane] = []
        self.clock = self.updated = 0.0
        self.slowness = 1.0
        self.version = 0

    def move(self, now: float) -> None:
        """Set the clock to what it shows now."""
        self.clock += (now - self.updated) / self.slowness
        self.updated = now


class _Simulation:
    def __init__(
        self, schedule: Schedule, num_pipelines: int, loads: Loads, devices: Sequence[int], in_turns: bool
    ) -> None:
        self.rows, self.last = schedule.rows, schedule.num_stages - 1
        self.loads, self.in_turns = loads, in_turns
        self.pieces = {
            "F": [_pieces(load) for load in loads.forward],
            "B": [_pieces(load) for load in loads.backward],
        }
        by_number = {number: _Device() for number in devices}
        self.lanes = [
            [_Lane(k, n, by_number[devices[k]]) for k in range(schedule.num_stages)] for n in range(num_pipelines)
        ]
        self.link_free: dict[tuple[str, int], float] = {}
        # time, serial number (so that nothing else is compared), device and its version, or lane that wakes up
        self.events: list[tuple[float, int, _Device | _Lane, int]] = []
        self.serial = 0

    def run(self) -> float:
        now = 0.0
        for lanes in self.lanes:
            self._push(0.0, lanes[0], 0)  # the others wait for their first message
        while self.events:
            time, _, who, version = heapq.heappop(self.events)
            if isinstance(who, _Lane):
                self._begin(who, time)
            elif version == who.version:
                self._continue(who, time)
            else:
                continue
            now = time
        return now

    def _push(self, time: float, who: _Device | _Lane, version: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, who, version))

    def _begin(self, lane: _Lane, now: float) -> None:
        """Run a lane whose input is there, or let it wait for its turn."""
        device = lane.device
        if self.in_turns and device.running:
            device.waiting.append(lane)
            return
        device.move(now)
        self._run(lane)
        self._plan(device, now)

    def _run(self, lane: _Lane) -> None:
        action = self.rows[lane.stage][lane.position]
        lane.pieces, lane.piece = self.pieces[action.kind][lane.stage], 0
        seconds, lane.utilisation = lane.pieces[0]
        lane.until = lane.device.clock + seconds
        lane.device.running.append(lane)

    def _continue(self, device: _Device, now: float) -> None:
        """Some lanes of a device have come to the end of a piece."""
        device.move(now)
        due = min(lane.until for lane in device.running) * (1 + _ROUNDING)
        for lane in [lane for lane in device.running if lane.until <= due]:
            lane.piece += 1
            if lane.piece < len(lane.pieces):
                seconds, lane.utilisation = lane.pieces[lane.piece]
                lane.until += seconds
            else:
                device.running.remove(lane)
                self._end(lane, now)
        if device.waiting and not device.running:
            lane = min(device.waiting, key=self._urgency)
            device.waiting.remove(lane)
            self._run(lane)
        self._plan(device, now)

    def _plan(self, device: _Device, now: float) -> None:
        device.version += 1
        if device.running:
            device.slowness = max(1.0, sum([lane.utilisation for lane in device.running]))
            due = min([lane.until for lane in device.running])
            self._push(now + max(0.0, due - device.clock) * device.slowness, device, device.version)
        else:
            device.slowness = 1.0

    def _end(self, lane: _Lane, now: float) -> None:
        """Send what an action gave, and see when the next one may begin."""
        action = self.rows[lane.stage][lane.position]
        lane.position += 1
        self._wake(lane, now)
        neighbour = lane.stage + (1 if action.kind == "F" else -1)
        if 0 <= neighbour <= self.last:
            receiver = self.lanes[lane.number][neighbour]
            receiver.arrivals[action] = self._send(lane.stage, action, now)
            if receiver not in receiver.device.running and self._next(receiver) == action:
                self._push(receiver.arrivals[action], receiver, 0)

    def _wake(self, lane: _Lane, now: float) -> None:
        action = self._next(lane)
        if action is None:
            return
        alone = lane.stage == (0 if action.kind == "F" else self.last)
        arrival = now if alone else lane.arrivals.get(action, math.inf)
        if arrival < math.inf:
            self._push(max(now, arrival), lane, 0)

    def _next(self, lane: _Lane) -> Action | None:
        row = self.rows[lane.stage]
        return row[lane.position] if lane.position < len(row) else None

    def _send(self, stage: int, action: Action, now: float) -> float:
        """When the message arrives."""
        hop, direction = (stage, 0) if action.kind == "F" else (stage - 1, 1)
        occupied = (self.loads.values_s, self.loads.gradients_s)[direction][hop]
        begin = max(now, self.link_free.get((action.kind, hop), 0.0))
        self.link_free[action.kind, hop] = begin + occupied
        return begin + occupied + self.loads.latency_s[hop][direction]

    def _urgency(self, lane: _Lane) -> tuple[bool, int, int]:
        action = self.rows[lane.stage][lane.position]
        return action.kind != "B", action.micro_batch, lane.number


def _pieces(load: Load) -> tuple[tuple[float, float], ...]:
    """Seconds and utilisation; a long curve becomes few pieces of equal length with the same work."""
    curve = load.curve
    if len(curve.seconds) <= _PIECES or curve.total_s == 0:
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

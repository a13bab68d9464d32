"""The simulator: when each action of each pipeline runs, and how long an iteration takes.

The model: a stage of a pipeline does one action at a time, in the order of its row. Each hop has two links, one per
direction, that do not disturb each other. A message queues at its link, behind those of all pipelines, when its action
ends, occupies the link for its transfer time, and arrives after the latency. Sending costs the stage nothing. Devices
serve their lanes in turns or side by side, see ``sharing``; what happens at the same instant has happened before a
device decides what to do. A stage stashes a micro-batch from the begin of its forward until nothing of it is left;
without a backward it stashes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.builders import check
from lightning_avgpipe.schedule.costs import Costs, Pieces
from lightning_avgpipe.schedule.kinds import KINDS, Direction, Kind
from lightning_avgpipe.schedule.rules import peak_stash, receiver, sender
from lightning_avgpipe.schedule.sharing import InTurns, Sharing, SideBySide, SimulatedLane, SimulatedLink
from lightning_avgpipe.schedule.timeline import Span, Timeline, Transfer

__all__ = ["Simulation", "simulate"]


def simulate(
    schedules: Schedule | Sequence[Schedule],
    costs: Costs,
    devices: Sequence[int] = (),
    sharing: type[Sharing] = InTurns,
) -> Timeline:
    """Predict when each action runs.

    Args:
        schedules: of each pipeline, or of the only one: every action once per stage. All begin at once.
        costs: seconds per action and message.
        devices: of each stage, shape ``(K,)``; default: stage k on device k.
        sharing: how a device serves several lanes.
    Returns:
        The timeline of one iteration.
    Raises:
        ScheduleError: costs for another number of stages, or a schedule that is not complete.
        DeadlockError: a stage waits for something that never comes; shows the grid.
    """
    schedules = [schedules] if isinstance(schedules, Schedule) else schedules
    for schedule in {id(schedule): schedule for schedule in schedules}.values():
        if costs.num_stages != schedule.num_stages:
            raise ScheduleError(f"costs for {costs.num_stages} stages, but the schedule has {schedule.num_stages}")
        check(schedule)  # so every row is played to its end
    simulation = Simulation(schedules, costs, devices or range(costs.num_stages), sharing)
    simulation.run()
    return simulation.timeline()


class Simulation:
    """What is known to happen.

    Args:
        schedules: of each pipeline.
        costs: seconds per action and message.
        devices: of each stage, shape ``(K,)``.
        sharing: how a device serves several lanes.

    Attributes:
        lanes: those of pipeline 0, then those of pipeline 1, ..., by stage.
        now: what has happened until then is known, in seconds.
    """

    def __init__(
        self, schedules: Sequence[Schedule], costs: Costs, devices: Sequence[int], sharing: type[Sharing]
    ) -> None:
        self.now = 0.0
        self._devices = tuple(devices)
        self.lanes = _lanes(schedules, costs, self._devices, sharing)
        self._links = _connect(self.lanes, costs)
        # time, serial number (so that nothing else is compared), device and its version, or lane: when it may go on, or
        # if its device serves no other lane when its action ends
        self._events: list[tuple[float, int, Sharing | SimulatedLane, int]] = []
        self._serial = 0
        for lane in self.lanes:
            self._wake(lane)

    def run(self, actions: int | None = None) -> float:
        """Play on until the first lane has ended so many actions, or to the end; returns when that is, in seconds."""
        events, done = self._events, self.lanes[0].spans
        while events and len(done) != actions:
            now = self.now = events[0][0]
            changed: dict[Sharing, None] = {}  # in order
            while events and events[0][0] == now:
                _, _, who, version = heapq.heappop(events)
                if isinstance(who, SimulatedLane):
                    if who.device is None:
                        self._end(who)
                    else:
                        who.device.add(who)
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

    def _push(self, time: float, who: Sharing | SimulatedLane, version: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, who, version))

    def _wake(self, lane: SimulatedLane) -> None:
        """Let a lane go on as soon as the input of its next action is there, if that is known."""
        input_s = lane.input_s()
        if input_s is None:
            return
        begin_s = input_s if input_s > self.now else self.now
        if lane.device is None:
            lane.begin_s = begin_s
            begin_s += lane.pieces[lane.action.kind][0][0]
        self._push(begin_s, lane, 0)

    def _end(self, lane: SimulatedLane) -> None:
        """Send what an action gave, and see when the next one may begin."""
        action = lane.action
        lane.spans.append((lane.begin_s, self.now))
        if action.kind in lane.receivers:
            there, link = lane.receivers[action.kind]
            arrival_s = link.send(self.now, lane.pipeline, action.micro_batch)
            assert action.kind.produces is not None
            waiting = there.input_s() is None
            there.arrivals[action.kind.produces, action.micro_batch] = arrival_s
            if waiting:
                self._wake(there)
        self._wake(lane)

    def timeline(self) -> Timeline:
        """All that has happened."""
        count = 1 + max(lane.stage for lane in self.lanes)
        spans = [
            Span(lane.stage, action, begin_s, end_s, lane.pipeline)
            for lane in self.lanes
            for action, (begin_s, end_s) in zip(lane.row, lane.spans, strict=False)
        ]
        transfers = tuple(
            Transfer(hop, direction, i, s, s + link.occupied_s, s + link.occupied_s + link.latency_s, n)
            for (direction, hop), link in self._links.items()
            for s, n, i in link.begins
        )
        if len(self.lanes) == count:
            peaks = peak_stash(lane.row for lane in self.lanes)
        else:
            spans.sort(key=lambda span: (span.stage, span.end_s))
            changes = sorted(spans, key=lambda s: (s.begin_s, 1) if s.action.kind.stash > 0 else (s.end_s, 0))
            peaks = peak_stash([span.action for span in changes if span.stage == k] for k in range(count))
        return Timeline(count, tuple(spans), transfers, peaks, devices=self._devices)


def _lanes(
    schedules: Sequence[Schedule], costs: Costs, devices: Sequence[int], sharing: type[Sharing]
) -> list[SimulatedLane]:
    stages = range(costs.num_stages)
    used = {action.kind for schedule in schedules for row in schedule.rows for action in row}
    pieces = [{kind: costs.pieces(kind, k) for kind in KINDS if kind in used} for k in stages]
    full = _full(len(schedules), pieces, devices) if sharing is SideBySide else set()
    pieces = [
        of if device in full else {kind: ((sum(s for s, _ in parts), 0.0),) for kind, parts in of.items()}
        for of, device in zip(pieces, devices, strict=True)
    ]
    serving = {device: sharing() for device in devices if len(schedules) * devices.count(device) > 1}
    return [
        SimulatedLane(schedule.rows[k], n, k, serving.get(devices[k]), pieces[k])
        for n, schedule in enumerate(schedules)
        for k in stages
    ]


def _connect(lanes: Sequence[SimulatedLane], costs: Costs) -> dict[tuple[Direction, int], SimulatedLink]:
    """Tell lanes where messages come from and go to; returns the links by direction and hop."""
    links: dict[tuple[Direction, int], SimulatedLink] = {}
    by_place = {(lane.pipeline, lane.stage): lane for lane in lanes}
    for lane in lanes:
        for kind in lane.pieces:
            if kind.consumes is not None and sender(kind, lane.stage, costs.num_stages) is not None:
                lane.waits[kind] = kind.consumes
            there = receiver(kind, lane.stage, costs.num_stages)
            if kind.produces is not None and there is not None:
                receiving = by_place[lane.pipeline, there]
                if all(action.kind.consumes != kind.produces for action in receiving.row):
                    continue  # it runs forwards only: nobody sends it gradients
                key = kind.produces, min(there, lane.stage)
                if key not in links:
                    links[key] = SimulatedLink(*costs.message_s(*key))
                lane.receivers[kind] = receiving, links[key]
    return links


def _full(num_pipelines: int, pieces: Sequence[dict[Kind, Pieces]], devices: Sequence[int]) -> set[int]:
    """Devices that may have to slow their lanes down."""
    most: dict[int, float] = {}
    for device, of in zip(devices, pieces, strict=True):
        peak = max(used for parts in of.values() for _, used in parts)
        most[device] = most.get(device, 0.0) + num_pipelines * peak
    return {device for device, demand in most.items() if demand > 1.0}

"""The simulator of schedules: when each action of each pipeline runs, and how long an iteration takes.

The model: a stage of a pipeline does one action at a time, in the order of its row. Each hop has two links, one per
direction, that do not disturb each other. A message queues at its link, behind those of all pipelines, when its action
ends, occupies the link for its transfer time, and arrives after the latency. Sending takes no time of the stage.
Devices serve their lanes in turns or side by side, see ``sharing``. A device decides what to run after all events of
the same instant. A stage stashes a micro-batch from the begin of its forward until the last part of its backward ends;
without a backward it stashes nothing.

Where iterations roll, a lane goes on as soon as its own weights are updated, which takes no time. The updates on a
stage come in the order (iteration, pipeline), so that a lane may wait for earlier updates of other lanes::

    one by one   pipeline 0 |F F B B . . .|F F B B . . .|         rolling   |F F B B . . F F B B . . F F B B
                 pipeline 1 |. . F F B B .|. . F F B B .|                   |. . F F B B . . F F B B . . F F
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import check
from lightning_avgpipe.schedule.costs import CostModel, Pieces
from lightning_avgpipe.schedule.kinds import KINDS, Direction, Kind
from lightning_avgpipe.schedule.rules import peak_stash, receiver, sender, turns_of
from lightning_avgpipe.schedule.sharing import InTurns, Rolling, Sharing, SideBySide, SimulatedLane, SimulatedLink
from lightning_avgpipe.schedule.timeline import Span, Timeline, Transfer


def simulate(
    schedules: Schedule | Sequence[Schedule],
    costs: CostModel,
    devices: Sequence[int] = (),
    sharing: type[Sharing] = InTurns,
    iterations: int = 1,
) -> Timeline:
    """Predict when each action runs.

    Args:
        schedules: schedule of each pipeline, or of the only one. All pipelines begin at once.
        costs: seconds per action and message.
        devices: device of each stage, shape ``(K,)``; default: ``devices`` of the first schedule.
        sharing: how a device serves several lanes. With ``SideBySide``, turns of schedules are ignored.
        iterations: number of iterations that follow one another without a drain.
    Returns:
        The timeline of all iterations.
    Raises:
        ScheduleError: no iteration, costs for another number of stages, or a schedule that is not complete.
        DeadlockError: a stage waits for a message that is never sent. The message shows the grid.
    """
    if iterations < 1:
        raise ScheduleError(f"iterations={iterations}: at least one is simulated")
    schedules = [schedules] if isinstance(schedules, Schedule) else schedules
    for schedule in {id(schedule): schedule for schedule in schedules}.values():
        if costs.num_stages != schedule.num_stages:
            raise ScheduleError(f"costs for {costs.num_stages} stages, but the schedule has {schedule.num_stages}")
        check(schedule)  # so that every row runs to its end
    simulation = Simulation(schedules, costs, devices or schedules[0].devices, sharing, iterations)
    simulation.run()
    return simulation.timeline()


class Simulation:
    """The state of a simulation: a queue of events, and all actions and messages so far.

    Args:
        schedules: schedule of each pipeline.
        costs: seconds per action and message.
        devices: device of each stage, shape ``(K,)``.
        sharing: how a device serves several lanes.
        iterations: number of iterations that follow one another without a drain.

    Attributes:
        lanes: lanes of pipeline 0, then of pipeline 1, and so on, by stage.
        now: simulated time so far, in seconds.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        costs: CostModel,
        devices: Sequence[int],
        sharing: type[Sharing],
        iterations: int = 1,
    ) -> None:
        self.now = 0.0
        self._devices = tuple(devices)
        self._sizes = [schedule.num_microbatches for schedule in schedules]
        self.lanes = _lanes(schedules, costs, self._devices, sharing, iterations)
        self._links = _connect(self.lanes, costs, schedules[0])
        # A heap of (time, serial number, device or lane, version). The serial number orders events of the same time.
        # The event of a device is the end of an action, valid only for this version of the device. The event of a lane
        # is that its next action may begin or, if its device serves no other lane, that its action ends.
        self._events: list[tuple[float, int, Sharing | SimulatedLane, int]] = []
        self._serial = 0
        for lane in self.lanes:
            self._wake(lane)

    def run(self, actions: int | None = None) -> float:
        """Simulate until the first lane has ended ``actions`` actions, or to the end; return the time in seconds."""
        events, done = self._events, self.lanes[0].spans
        while events and len(done) != actions:
            now = self.now = events[0][0]
            changed: dict[Sharing, None] = {}  # a set that keeps the order
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
        """Schedule the next action of a lane for the time at which its input is there, if this time is known."""
        input_s = lane.input_s()
        if input_s is None:
            return
        begin_s = input_s if input_s > self.now else self.now
        if lane.device is None:
            lane.begin_s = begin_s
            begin_s += lane.pieces[lane.action.kind][0][0]
        self._push(begin_s, lane, 0)

    def _end(self, lane: SimulatedLane) -> None:
        """End the action of a lane, send its message, and schedule what may begin now."""
        action = lane.action
        waiting = lane.followers()
        lane.spans.append((lane.begin_s, self.now))
        for other in waiting if lane.rolling and len(lane.spans) % lane.rolling.length == 0 else ():
            self._wake(other)
        if action.kind in lane.mail.receivers:
            there, link = lane.mail.receivers[action.kind]
            arrival_s = link.send(self.now, lane.pipeline, action.micro_batch)
            assert action.kind.produces is not None
            self._arrive(there, action.kind.produces, action.micro_batch, arrival_s)
            if there.mail.onwards is not None and action.kind.produces == "forward":
                behind, following, segments = there.mail.onwards
                piece_s, rest_s = link.occupied_s / segments, following.occupied_s / segments
                first_s = arrival_s - link.occupied_s + piece_s  # the first segment is relayed when it arrives
                at_s = following.send(first_s, lane.pipeline, action.micro_batch, arrival_s + rest_s)
                self._arrive(behind, "forward", action.micro_batch, at_s)
        self._wake(lane)

    def _arrive(self, lane: SimulatedLane, direction: Direction, micro_batch: int, arrival_s: float) -> None:
        """Note when a message arrives, and schedule the lane's next action if it waited for this."""
        waiting = lane.input_s() is None
        lane.mail.arrivals[direction, micro_batch] = arrival_s
        if waiting:
            self._wake(lane)

    def timeline(self) -> Timeline:
        """Return the timeline of the simulation so far."""
        count = 1 + max(lane.stage for lane in self.lanes)
        spans = [
            Span(lane.stage, Action(action.kind, i), begin_s, end_s, lane.pipeline, t)
            for lane in self.lanes
            for action, (begin_s, end_s) in zip(lane.row, lane.spans, strict=False)
            for t, i in [divmod(action.micro_batch, self._sizes[lane.pipeline])]
        ]
        transfers = tuple(
            Transfer(hop, direction, i, s, s + link.occupied_s, s + link.occupied_s + link.latency_s, n, t)
            for (direction, hop), link in self._links.items()
            for s, n, number in link.begins
            for t, i in [divmod(number, self._sizes[n])]
        )
        if len(self.lanes) == count:
            peaks = peak_stash(lane.row for lane in self.lanes)
        else:
            spans.sort(key=lambda span: (span.stage, span.end_s))
            changes = sorted(spans, key=lambda s: (s.begin_s, 1) if s.action.kind.stash > 0 else (s.end_s, 0))
            peaks = peak_stash([span.action for span in changes if span.stage == k] for k in range(count))
        return Timeline(count, tuple(spans), transfers, peaks, devices=self._devices)


def _lanes(
    schedules: Sequence[Schedule], costs: CostModel, devices: Sequence[int], sharing: type[Sharing], iterations: int
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
    lanes = [
        SimulatedLane(_repeated(schedule, k, iterations), n, k, serving.get(devices[k]), pieces[k], turns.get(k))
        for n, schedule in enumerate(schedules)
        for turns in [turns_of(schedule, iterations)]
        for k in stages
    ]
    for lane in lanes if iterations > 1 else ():
        others = [other for other in lanes if other.stage == lane.stage and other is not lane]
        lane.rolling = Rolling(len(lane.row) // iterations, others) if others else None
    return lanes


def _repeated(schedule: Schedule, stage: int, iterations: int) -> Sequence[Action]:
    """Return the row of a stage, repeated for each iteration, with micro-batches numbered consecutively."""
    row, count = schedule.rows[stage], schedule.num_microbatches
    return row if iterations == 1 else [Action(kind, t * count + i) for t in range(iterations) for kind, i in row]


def _connect(
    lanes: Sequence[SimulatedLane], costs: CostModel, schedule: Schedule
) -> dict[tuple[Direction, int], SimulatedLink]:
    """Set where the messages of each lane come from and go to; return the links by direction and hop."""
    links: dict[tuple[Direction, int], SimulatedLink] = {}
    by_place, relays, length = {(lane.pipeline, lane.stage): lane for lane in lanes}, schedule.relays, schedule.length
    for lane in lanes:
        if lane.stage in relays and lane.stage + 1 < costs.num_stages:
            link = links.setdefault(("forward", lane.stage), SimulatedLink(*costs.message_s("forward", lane.stage)))
            lane.mail.onwards = by_place[lane.pipeline, lane.stage + 1], link, schedule.segments
        for kind in lane.pieces:
            if kind.consumes is not None and sender(kind, lane.stage, length) is not None:
                lane.mail.waits[kind] = kind.consumes
            there = receiver(kind, lane.stage, length)
            if kind.produces is not None and there is not None:
                receiving = by_place[lane.pipeline, there]
                if all(action.kind.consumes != kind.produces for action in receiving.row):
                    continue  # the receiver runs forwards only, and needs no gradients
                key = kind.produces, min(there, lane.stage)
                if key not in links:
                    links[key] = SimulatedLink(*costs.message_s(*key))
                lane.mail.receivers[kind] = receiving, links[key]
    return links


def _full(num_pipelines: int, pieces: Sequence[dict[Kind, Pieces]], devices: Sequence[int]) -> set[int]:
    """Return the devices whose lanes may use more than the whole device together."""
    most: dict[int, float] = {}
    for device, of in zip(devices, pieces, strict=True):
        peak = max(used for parts in of.values() for _, used in parts)
        most[device] = most.get(device, 0.0) + num_pipelines * peak
    return {device for device, demand in most.items() if demand > 1.0}

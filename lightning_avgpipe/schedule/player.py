"""The player of schedules: runs rows of actions against costs, on simulated devices and links.

The model: a stage of a pipeline does one action at a time, in the order of its row. Each hop has two links, one per
direction, that do not disturb each other. When an action ends, its message queues at the link, behind earlier messages
of all pipelines. It occupies the link for its transfer time, and arrives after the latency. Sending does not occupy the
stage. A device decides what to run after all events of the same instant.

A lane is one stage of one pipeline, or one of its replicas, which take micro-batches in turns. A device that serves
several lanes runs them in turns or side by side. In turns, the order is that of the executor: backwards first, then the
lowest micro-batch, then the lowest pipeline. Side by side, all lanes are slowed down by the sum of their utilisations
while this sum is above 1.

If iterations roll, a lane goes on as soon as its own weights are updated. Updates do not occupy the device, but those
on a stage come one after the other, in the order (iteration, pipeline), so that a lane may wait for earlier updates of
other lanes::

    one by one   pipeline 0 |F F B B . . .|F F B B . . .|         rolling   |F F B B . . F F B B . . F F B B
                 pipeline 1 |. . F F B B .|. . F F B B .|                   |. . F F B B . . F F B B . . F F

On a device, lanes that roll run the oldest iteration first, then the lowest pipeline.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_avgpipe.errors import DeadlockError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.costs import CostModel, Pieces
from lightning_avgpipe.schedule.kinds import KINDS, Direction, Kind
from lightning_avgpipe.schedule.rules import in_turn, in_words, turns_of, urgency

_ROUNDING = 1e-12
_STEP: dict[Direction, int] = {"forward": 1, "backward": -1}  # from the stage that sends to the one that receives


def play(
    schedules: Sequence[Schedule],
    costs: CostModel,
    hosts: Sequence[Sequence[int]],
    sharing: type[Sharing] | None = None,
    iterations: int = 1,
    updates_s: Sequence[float] = (),
) -> Player:
    """Play schedules to their ends.

    Args:
        schedules: schedule of each pipeline.
        costs: seconds per action and message.
        hosts: devices of the replicas of each stage, shape ``(K, any)``.
        sharing: how a device serves several lanes; default: :class:`InTurns`.
        iterations: number of iterations that follow one another without a drain.
        updates_s: seconds of an update on each stage between such iterations, shape ``(K,)``; default: none.
    Returns:
        The player, whose lanes have the time of each action, and its links that of each message.
    Raises:
        DeadlockError: a stage waits for a message that is never sent. The message shows the grid.
    """
    player = Player(schedules, costs, hosts, sharing or InTurns, iterations, updates_s)
    player.run()
    for n, schedule in enumerate(schedules):
        stuck = [lane for lane in player.lanes if lane.pipeline == n and len(lane.spans) < len(lane.row)]
        if stuck:
            where = ", ".join(f"stage {lane.stage} at {lane.action}" for lane in stuck)
            used = {action.kind for row in schedule.rows for action in row}
            raise DeadlockError(
                f"no action can start any more: {where}. {'; '.join(in_words(k) for k in KINDS if k in used)}. "
                f"Reorder these rows:\n{schedule}"
            )
    return player


@dataclass(slots=True, eq=False)
class PlayedLink:
    """A link, one direction of a hop, that carries one message after another.

    Attributes:
        occupied_s: seconds for which a message occupies the link.
        latency_s: seconds from then until the message arrives.
        begins: for each message the time when it began to occupy the link, its pipeline and its micro-batch.
    """

    occupied_s: float
    latency_s: float
    begins: list[tuple[float, int, int]] = field(default_factory=list)
    _free: float = 0.0

    def send(self, now: float, pipeline: int, micro_batch: int, until: float = 0.0) -> float:
        """Send a message, and return when it arrives.

        Args:
            now: time from which the message, or its first segment, can be sent.
            pipeline: number of its pipeline.
            micro_batch: number of its micro-batch.
            until: earliest time at which the last segment of a relayed message can have left the link.
        """
        begin = self._free if self._free > now else now
        self.begins.append((begin, pipeline, micro_batch))
        self._free = max(begin + self.occupied_s, until)
        return self._free + self.latency_s


@dataclass(slots=True, eq=False)
class PlayedLane:
    """One stage of one pipeline, or a replica of it.

    Attributes:
        row: actions of the lane.
        length: number of actions of one iteration.
        pipeline: number of the pipeline.
        stage: number of the stage.
        replica: number of the replica.
        device: device that serves the lane; None if the device has no other lane, so that actions begin as soon as
            their input is there.
        pieces: parts of an action of each kind; a single part unless lanes run side by side.
        turns: stages in the order in which they take turns on the device; None: the lane takes no turns.
        waits: kind -> direction of the message that an action of this kind waits for.
        receivers: kind -> lanes that receive the messages of its actions in turns, each with the link to it.
        relay: lane to which activations are relayed, the link to it, and the number of segments; None: no relay.
        updates: updates of the stage, one of which each iteration but the first waits for; None unless several
            pipelines roll.
        updated: number of iterations whose update has been made.
        begin_s: start time of the action that runs.
        spans: start and end times of the finished actions.
    """

    row: Sequence[Action]
    length: int
    pipeline: int
    stage: int
    replica: int
    device: Sharing | None
    pieces: Mapping[Kind, Pieces]
    turns: deque[int] | None
    waits: dict[Kind, Direction] = field(default_factory=dict)
    receivers: dict[Kind, list[tuple[PlayedLane, PlayedLink]]] = field(default_factory=dict)
    relay: tuple[PlayedLane, PlayedLink, int] | None = None
    updates: PlayedUpdates | None = None
    updated: int = 0
    begin_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    _arrivals: dict[tuple[Direction, int], float] = field(default_factory=dict)
    _end: int = 0

    def __post_init__(self) -> None:
        self._end, done = len(self.row), set()
        for at, (kind, i) in enumerate(self.row):  # an action whose prerequisite here comes later never runs
            if any((needed, i) not in done for needed in kind.after):
                self._end = at
                break
            done.add((kind.counts_as or kind, i))

    @property
    def action(self) -> Action:
        """The action that runs, or the next one."""
        return self.row[len(self.spans)]

    def input_s(self) -> float | None:
        """Return when the input of the next action is there; None if this is not known yet or no action is left."""
        done = len(self.spans)
        if done == self._end or (self.updates is not None and done // self.length > self.updated):
            return None
        kind, i = self.row[done]
        direction = self.waits.get(kind)
        return 0.0 if direction is None else self._arrivals.get((direction, i))

    def arrives(self, direction: Direction, micro_batch: int, at_s: float) -> bool:
        """Note when a message arrives; return whether the lane's next action may have waited for it."""
        waited = self.input_s() is None
        self._arrivals[direction, micro_batch] = at_s
        return waited

    def urgency(self) -> tuple[int, ...]:
        """Return a sort key: of the lanes that may run on a device, the one with the smallest key goes first."""
        if self.updates is not None:
            return len(self.spans) // self.length, self.pipeline, *urgency(self.action), self.stage
        return *urgency(self.action), self.pipeline, self.stage


@dataclass(slots=True, eq=False)
class PlayedUpdates:
    """The updates of the weights of a stage, which come one after the other in the order (iteration, pipeline).

    Attributes:
        seconds: seconds of an update.
        lanes: lanes of the stage, by pipeline.
    """

    seconds: float
    lanes: Sequence[PlayedLane]
    _made: int = 0
    _running: bool = False

    def begin(self) -> bool:
        """Begin the next update if its lane has ended the iteration and no other update runs; return whether it did."""
        t, n = divmod(self._made, len(self.lanes))
        lane = self.lanes[n]
        begins = not self._running and len(lane.spans) >= (t + 1) * lane.length
        self._running = self._running or begins
        return begins

    def end(self) -> PlayedLane:
        """End the update that runs, and return its lane."""
        lane = self.lanes[self._made % len(self.lanes)]
        lane.updated += 1
        self._made, self._running = self._made + 1, False
        return lane


class InTurns:
    """A device that runs one action at a time."""

    __slots__ = ("_running", "_waiting", "version")

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, ...], PlayedLane]] = []  # a heap
        self._running: PlayedLane | None = None
        self.version = 0

    def add(self, lane: PlayedLane) -> None:
        """Note that a lane may begin its next action."""
        heapq.heappush(self._waiting, (lane.urgency(), lane))

    def ended(self, now: float) -> Iterator[PlayedLane]:
        """Yield the lane whose action ends now."""
        assert self._running is not None
        yield self._running
        self._running = None

    def go_on(self, now: float) -> float | None:
        """Begin the next action if possible; return when it ends, or None if no action begins."""
        if self._running is not None or not self._waiting:
            return None
        lane = self._next()
        if lane is None:
            return None
        ((seconds, _),) = lane.pieces[lane.action.kind]
        lane.begin_s = now
        self._running = lane
        return now + seconds

    def _next(self) -> PlayedLane | None:
        """Return the most urgent lane whose turn it is; None if all have to wait for others."""
        if self._waiting[0][-1].turns is None:
            return heapq.heappop(self._waiting)[-1]
        for entry in sorted(self._waiting):
            lane = entry[-1]
            if lane.turns is not None and lane.turns[0] == lane.stage:
                lane.turns.popleft()
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                return lane
        return None


class SideBySide:
    """A device that runs all its lanes at once. Turns of schedules are ignored.

    As all lanes are slowed down by the same factor, the device has its own clock, which runs at their speed: the time
    on this clock at which a part of an action ends does not change when other lanes begin or end.
    """

    __slots__ = ("_added", "_clock", "_demand", "_running", "_slowness", "_updated", "version")

    def __init__(self) -> None:
        self._added: list[PlayedLane] = []
        # A heap: end of the part on the clock, (pipeline, stage), utilisation, the parts after it, the lane.
        self._running: list[tuple[float, tuple[int, int], float, Iterator[tuple[float, float]], PlayedLane]] = []
        self._clock = self._updated = self._demand = 0.0
        self._slowness = 1.0
        self.version = 0

    def add(self, lane: PlayedLane) -> None:
        """Note that a lane may begin its next action."""
        self._added.append(lane)

    def ended(self, now: float) -> Iterator[PlayedLane]:
        """Yield the lanes whose action ends now. Where only a part of an action ends, begin its next part."""
        self._move(now)
        running = self._running
        due = running[0][0] * (1 + _ROUNDING)
        while running and running[0][0] <= due:
            until, place, utilisation, rest, lane = running[0]
            piece = next(rest, None)
            if piece is None:
                heapq.heappop(running)
                self._demand -= utilisation
                yield lane
            else:
                heapq.heapreplace(running, (until + piece[0], place, piece[1], rest, lane))
                self._demand += piece[1] - utilisation

    def go_on(self, now: float) -> float | None:
        """Begin all actions that may begin; return when the next part ends, if nothing else begins before."""
        self._move(now)
        if not self._running:
            self._demand = 0.0  # removes rounding errors
        for lane in self._added:
            lane.begin_s = now
            rest = iter(lane.pieces[lane.action.kind])
            seconds, utilisation = next(rest)
            place = lane.pipeline, lane.stage
            heapq.heappush(self._running, (self._clock + seconds, place, utilisation, rest, lane))
            self._demand += utilisation
        self._added.clear()
        self._slowness = max(1.0, self._demand)
        self.version += 1  # the end that was returned before is no longer valid
        return now + max(0.0, self._running[0][0] - self._clock) * self._slowness if self._running else None

    def _move(self, now: float) -> None:
        """Advance the device's clock to the time ``now``."""
        if now != self._updated:
            self._clock += (now - self._updated) / self._slowness
            self._updated = now


Sharing = InTurns | SideBySide


class Player:
    """A queue of events, and all actions and messages so far. The arguments are those of :func:`play`.

    Attributes:
        lanes: lanes of pipeline 0, then of pipeline 1, and so on, by stage and replica.
        links: links by direction, hop, and the replicas of the sender and the receiver.
        now: time so far, in seconds.
        sizes: number of micro-batches of an iteration of each pipeline; later iterations continue the numbering.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        costs: CostModel,
        hosts: Sequence[Sequence[int]],
        sharing: type[Sharing],
        iterations: int = 1,
        updates_s: Sequence[float] = (),
    ) -> None:
        self.now = 0.0
        self.sizes = [schedule.num_microbatches for schedule in schedules]
        self.lanes = _lanes(schedules, costs, hosts, sharing, iterations, updates_s or (0.0,) * len(hosts))
        self.links = _connect(self.lanes, costs, schedules[0])
        # A heap of (time, serial number, device or lane, version). The serial number orders events of the same time.
        # The event of a device is the end of an action, valid only for this version of the device. The event of a lane
        # is that its next action may begin or, if its device serves no other lane, that its action ends. The event of
        # updates is that one ends.
        self._events: list[tuple[float, int, Sharing | PlayedLane | PlayedUpdates, int]] = []
        self._serial = 0
        for lane in self.lanes:
            self._wake(lane)

    def run(self) -> None:
        """Play to the end."""
        events = self._events
        while events:
            now = self.now = events[0][0]
            changed: dict[Sharing, None] = {}  # a set that keeps the order
            while events and events[0][0] == now:
                _, _, who, version = heapq.heappop(events)
                if isinstance(who, PlayedLane):
                    if who.device is None:
                        self._end(who)
                    else:
                        who.device.add(who)
                        changed[who.device] = None
                elif isinstance(who, PlayedUpdates):
                    self._wake(who.end())
                    self._update(who)
                elif version == who.version:
                    for lane in who.ended(now):
                        self._end(lane)
                    changed[who] = None
            for device in changed:
                due = device.go_on(now)
                if due is not None:
                    self._push(due, device, device.version)

    def _push(self, time: float, who: Sharing | PlayedLane | PlayedUpdates, version: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, who, version))

    def _wake(self, lane: PlayedLane) -> None:
        """Schedule the next action of a lane for the time at which its input is there, if this time is known."""
        input_s = lane.input_s()
        if input_s is None:
            return
        begin_s = input_s if input_s > self.now else self.now
        if lane.device is None:
            lane.begin_s = begin_s
            begin_s += lane.pieces[lane.action.kind][0][0]
        self._push(begin_s, lane, 0)

    def _end(self, lane: PlayedLane) -> None:
        """End the action of a lane, send its message, and schedule what may begin now."""
        kind, i = lane.action
        lane.spans.append((lane.begin_s, self.now))
        if kind in lane.receivers:
            receivers = lane.receivers[kind]
            there, link = receivers[i % self.sizes[lane.pipeline] % len(receivers)]
            arrival_s = link.send(self.now, lane.pipeline, i)
            assert kind.produces is not None
            self._arrive(there, kind.produces, i, arrival_s)
            if there.relay is not None and kind.produces == "forward":
                behind, following, segments = there.relay
                piece_s, rest_s = link.occupied_s / segments, following.occupied_s / segments
                first_s = arrival_s - link.occupied_s + piece_s  # the first segment is relayed when it arrives
                at_s = following.send(first_s, lane.pipeline, i, arrival_s + rest_s)
                self._arrive(behind, "forward", i, at_s)
        if lane.updates is not None and len(lane.spans) % lane.length == 0:
            self._update(lane.updates)
        else:
            self._wake(lane)

    def _update(self, updates: PlayedUpdates) -> None:
        """Begin the next update of a stage, if it can begin; updates that take no time end at once."""
        while updates.begin():
            if updates.seconds:
                self._push(self.now + updates.seconds, updates, 0)
                return
            self._wake(updates.end())

    def _arrive(self, lane: PlayedLane, direction: Direction, micro_batch: int, arrival_s: float) -> None:
        if lane.arrives(direction, micro_batch, arrival_s):
            self._wake(lane)


def _lanes(
    schedules: Sequence[Schedule],
    costs: CostModel,
    hosts: Sequence[Sequence[int]],
    sharing: type[Sharing],
    iterations: int,
    updates_s: Sequence[float],
) -> list[PlayedLane]:
    used = {action.kind for schedule in schedules for row in schedule.rows for action in row}
    places = [(k, j, device) for k, devices in enumerate(hosts) for j, device in enumerate(devices)]
    demand: dict[int, float] = {}  # of a device: the utilisation of all its lanes together
    served = [device for _ in schedules for _, _, device in places]
    serving = {device: sharing() for device in dict.fromkeys(served) if served.count(device) > 1}
    pieces = [{kind: costs.pieces(kind, k, j) for kind in KINDS if kind in used} for k, j, _ in places]
    for (_, _, device), by_kind in zip(places, pieces, strict=True):
        peak = max(share for parts in by_kind.values() for _, share in parts)
        demand[device] = demand.get(device, 0.0) + len(schedules) * peak
    for at, (_, _, device) in enumerate(places):
        if sharing is InTurns or demand[device] <= 1.0:  # an action takes as long as if it were alone
            pieces[at] = {kind: ((sum(s for s, _ in parts), 0.0),) for kind, parts in pieces[at].items()}
    lanes = []
    for n, schedule in enumerate(schedules):
        turns, size = turns_of(schedule, iterations), schedule.num_microbatches
        for (k, j, device), by_kind in zip(places, pieces, strict=True):
            one = in_turn(schedule.rows[k], j, len(hosts[k])) if len(hosts[k]) > 1 else schedule.rows[k]
            row = one if iterations == 1 else [Action(kind, t * size + i) for t in range(iterations) for kind, i in one]
            lanes.append(PlayedLane(row, len(one), n, k, j, serving.get(device), by_kind, turns.get(k)))
    for k, j, _ in places if iterations > 1 else ():
        together = [lane for lane in lanes if (lane.stage, lane.replica) == (k, j)]
        updates = PlayedUpdates(updates_s[k], together)
        for lane in together if len(together) > 1 else ():
            lane.updates = updates
    return lanes


def _connect(
    lanes: Sequence[PlayedLane], costs: CostModel, schedule: Schedule
) -> dict[tuple[Direction, int, int, int], PlayedLink]:
    """Set where the messages of each lane come from and go to; return the links."""
    links: dict[tuple[Direction, int, int, int], PlayedLink] = {}

    def link_to(there: PlayedLane, direction: Direction, here: PlayedLane) -> tuple[PlayedLane, PlayedLink]:
        key = direction, min(there.stage, here.stage), here.replica, there.replica
        if key not in links:
            links[key] = PlayedLink(*costs.message_s(*key))
        return there, links[key]

    by_place: dict[tuple[int, int], list[PlayedLane]] = {}
    for lane in lanes:
        by_place.setdefault((lane.pipeline, lane.stage), []).append(lane)
    for lane in lanes:
        if lane.stage in schedule.relays and (lane.pipeline, lane.stage + 1) in by_place:
            (behind,) = by_place[lane.pipeline, lane.stage + 1]
            lane.relay = *link_to(behind, "forward", lane), schedule.segments
        for kind in lane.pieces:
            if kind.consumes is not None and (lane.pipeline, lane.stage - _STEP[kind.consumes]) in by_place:
                lane.waits[kind] = kind.consumes
            if kind.produces is not None:
                receiving = by_place.get((lane.pipeline, lane.stage + _STEP[kind.produces]), [])
                # a receiver that runs forwards only needs no gradients
                if any(action.kind.consumes == kind.produces for one in receiving for action in one.row):
                    lane.receivers[kind] = [link_to(one, kind.produces, lane) for one in receiving]
    return links

"""How a simulated device serves its lanes. A lane is one stage of one pipeline.

Lanes run side by side or in turns. Side by side, all lanes are slowed down by the sum of their utilisations while this
sum is above 1. In turns, the order is that of the executor: backwards first, then the lowest micro-batch, then the
lowest pipeline. Lanes that roll run the oldest iteration first, then the lowest pipeline.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_avgpipe.schedule.actions import Action
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.kinds import Direction, Kind
from lightning_avgpipe.schedule.rules import urgency

_ROUNDING = 1e-12


class SimulatedLink:
    """A simulated link, one direction of a hop, that carries one message after another.

    Args:
        occupied_s: seconds for which a message occupies the link.
        latency_s: seconds from then until the message arrives.

    Attributes:
        begins: when messages began to occupy the link, with their pipelines and micro-batches.
    """

    __slots__ = ("_free", "begins", "latency_s", "occupied_s")

    def __init__(self, occupied_s: float, latency_s: float) -> None:
        self.occupied_s, self.latency_s = occupied_s, latency_s
        self.begins: list[tuple[float, int, int]] = []
        self._free = 0.0

    def send(self, now: float, pipeline: int, micro_batch: int, until: float = 0.0) -> float:
        """Send a message, and return when it arrives.

        Args:
            now: time from which on the message, or its first segment, can be sent.
            pipeline: number of its pipeline.
            micro_batch: number of its micro-batch.
            until: earliest time at which the last segment of a relayed message can have left the link.
        """
        begin = self._free if self._free > now else now
        self.begins.append((begin, pipeline, micro_batch))
        self._free = max(begin + self.occupied_s, until)
        return self._free + self.latency_s


class Mail:
    """The messages of a lane.

    Attributes:
        waits: kind -> direction of the message that an action of this kind waits for.
        receivers: kind -> lane that receives the message of an action of this kind, and the link to it.
        onwards: lane to which activations are relayed, the link to it, and the number of segments; None: no relay.
        arrivals: (direction, micro-batch) -> time of arrival of each message for which it is known.
    """

    __slots__ = ("arrivals", "onwards", "receivers", "waits")

    def __init__(self) -> None:
        self.waits: dict[Kind, Direction] = {}
        self.receivers: dict[Kind, tuple[SimulatedLane, SimulatedLink]] = {}
        self.onwards: tuple[SimulatedLane, SimulatedLink, int] | None = None
        self.arrivals: dict[tuple[Direction, int], float] = {}

    def input_s(self, action: Action) -> float | None:
        """Return when the input of an action arrives; None as long as this is not known."""
        direction = self.waits.get(action.kind)
        return 0.0 if direction is None else self.arrivals.get((direction, action.micro_batch))


class Rolling(NamedTuple):
    """The data of a lane whose row holds several rolling iterations.

    Attributes:
        length: number of actions of an iteration.
        others: other lanes of the same stage. Updates on a stage come in the order (iteration, pipeline).
    """

    length: int
    others: Sequence[SimulatedLane]


class SimulatedLane:
    """A simulated lane: one stage of one pipeline.

    Args:
        row: actions of the lane.
        pipeline: number of the pipeline.
        stage: number of the stage.
        device: device that serves the lane; None for a device with no other lane, whose actions begin as soon as their
            input is there.
        pieces: parts of an action of each kind; a single part unless lanes run side by side.
        turns: stages in the order in which they take turns on the device; None: the lane takes no turns.

    Attributes:
        mail: messages of the lane.
        rolling: data of rolling iterations; None if iterations do not roll.
        begin_s: begin of the action that runs.
        spans: begins and ends of the finished actions.
    """

    __slots__ = ("begin_s", "device", "mail", "pieces", "pipeline", "rolling", "row", "spans", "stage", "turns")

    def __init__(
        self,
        row: Sequence[Action],
        pipeline: int,
        stage: int,
        device: Sharing | None,
        pieces: Mapping[Kind, Pieces],
        turns: deque[int] | None = None,
    ) -> None:
        self.row, self.pipeline, self.stage, self.device, self.pieces = row, pipeline, stage, device, pieces
        self.turns = turns
        self.rolling: Rolling | None = None
        self.mail = Mail()
        self.begin_s = 0.0
        self.spans: list[tuple[float, float]] = []

    @property
    def action(self) -> Action:
        """The action that runs, or the next one."""
        return self.row[len(self.spans)]

    def input_s(self) -> float | None:
        """Return when the input of the next action is there; None if this is not known yet or no action is left."""
        done = len(self.spans)
        if done == len(self.row) or (self.rolling and not self._updated(self.rolling, done)):
            return None
        return self.mail.input_s(self.row[done])

    def _updated(self, rolling: Rolling, done: int) -> bool:
        """Return whether all updates on this stage that precede this lane's current iteration have been made."""
        length, others = rolling
        t, within = divmod(done, length)
        return bool(within) or all(len(o.spans) >= (t - (o.pipeline > self.pipeline)) * length for o in others)

    def followers(self) -> list[SimulatedLane]:
        """Return the waiting lanes among those that an update of this lane may allow to go on."""
        return [other for other in self.rolling.others if other.input_s() is None] if self.rolling else []

    def urgency(self) -> tuple[int, ...]:
        """Return a sort key: of the lanes that may run on a device, the one with the smallest key goes first."""
        if self.rolling:
            return len(self.spans) // self.rolling.length, self.pipeline, *urgency(self.action), self.stage
        return *urgency(self.action), self.pipeline, self.stage


class InTurns:
    """A simulated device that runs one action at a time."""

    __slots__ = ("_running", "_waiting", "version")

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, ...], SimulatedLane]] = []  # a heap
        self._running: SimulatedLane | None = None
        self.version = 0

    def add(self, lane: SimulatedLane) -> None:
        """Note that a lane may begin its next action."""
        heapq.heappush(self._waiting, (lane.urgency(), lane))

    def ended(self, now: float) -> Iterator[SimulatedLane]:
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

    def _next(self) -> SimulatedLane | None:
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
    """A simulated device that runs all its lanes at once.

    As all lanes are slowed down alike, the device has its own clock, which runs at their speed: the time on this clock
    at which a part of an action ends does not change when other lanes begin or end.
    """

    __slots__ = ("_added", "_clock", "_demand", "_running", "_slowness", "_updated", "version")

    def __init__(self) -> None:
        self._added: list[SimulatedLane] = []
        # A heap: end of the part on the clock, (pipeline, stage), utilisation, the parts after it, the lane.
        self._running: list[tuple[float, tuple[int, int], float, Iterator[tuple[float, float]], SimulatedLane]] = []
        self._clock = self._updated = self._demand = 0.0
        self._slowness = 1.0
        self.version = 0

    def add(self, lane: SimulatedLane) -> None:
        """Note that a lane may begin its next action."""
        self._added.append(lane)

    def ended(self, now: float) -> Iterator[SimulatedLane]:
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
        self.version += 1  # an end that was announced before is not valid any more
        return now + max(0.0, self._running[0][0] - self._clock) * self._slowness if self._running else None

    def _move(self, now: float) -> None:
        """Advance the device's clock to the time ``now``."""
        if now != self._updated:
            self._clock += (now - self._updated) / self._slowness
            self._updated = now


Sharing = InTurns | SideBySide

"""Sharing: how a device serves its lanes, each of them one stage of one pipeline.

Side by side: while their utilisations sum to more than 1, all of them are slowed down by that sum. Or in turns, as the
executor does it: backwards first, then the lowest micro-batch, then the lowest pipeline; of lanes that roll the oldest
iteration first, then the lowest pipeline.
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
    """One direction of a hop: messages one after another.

    Args:
        occupied_s: by a message.
        latency_s: from then until it arrives.

    Attributes:
        begins: when messages began to occupy it, with their pipelines and micro-batches.
    """

    __slots__ = ("_free", "begins", "latency_s", "occupied_s")

    def __init__(self, occupied_s: float, latency_s: float) -> None:
        self.occupied_s, self.latency_s = occupied_s, latency_s
        self.begins: list[tuple[float, int, int]] = []
        self._free = 0.0

    def send(self, now: float, pipeline: int, micro_batch: int, until: float = 0.0) -> float:
        """When a message arrives that is ready now, or begins to be and is so at last."""
        begin = self._free if self._free > now else now
        self.begins.append((begin, pipeline, micro_batch))
        self._free = max(begin + self.occupied_s, until)
        return self._free + self.latency_s


class Mail:
    """The messages of a lane.

    Attributes:
        waits: the directions of messages that kinds wait for here.
        receivers: where the messages of kinds go from here, and over which link.
        onwards: where values go from here unread, over which link, and in how many segments; None: nowhere.
        arrivals: when a message is there, as far as that is known.
    """

    __slots__ = ("arrivals", "onwards", "receivers", "waits")

    def __init__(self) -> None:
        self.waits: dict[Kind, Direction] = {}
        self.receivers: dict[Kind, tuple[SimulatedLane, SimulatedLink]] = {}
        self.onwards: tuple[SimulatedLane, SimulatedLink, int] | None = None
        self.arrivals: dict[tuple[Direction, int], float] = {}

    def input_s(self, action: Action) -> float | None:
        """When the input of an action is there; None as long as that is not known."""
        direction = self.waits.get(action.kind)
        return 0.0 if direction is None else self.arrivals.get((direction, action.micro_batch))


class Rolling(NamedTuple):
    """A lane's row is that of several iterations, which roll.

    Attributes:
        length: of an iteration.
        others: lanes of the same stage: updates on a stage come in the order (iteration, pipeline).
    """

    length: int
    others: Sequence[SimulatedLane]


class SimulatedLane:
    """One stage of one pipeline.

    Args:
        row: its actions.
        pipeline: n.
        stage: k.
        device: serves it; None: one that serves no other lane, so that nobody decides when an action begins.
        pieces: of an action of each kind; on a device that serves lanes in turns, or no other lane, one.
        turns: whose turn it is on its device, by stage; None: it takes none.

    Attributes:
        mail: its messages.
        rolling: None: all lanes begin at once.
        begin_s: of the action that runs.
        spans: begins and ends of the actions that are over.
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
        """The one that runs, or the next one."""
        return self.row[len(self.spans)]

    def input_s(self) -> float | None:
        """When the input of the next action is there; None as long as that is not known, or without an action."""
        done = len(self.spans)
        if done == len(self.row) or (self.rolling and not self._updated(self.rolling, done)):
            return None
        return self.mail.input_s(self.row[done])

    def _updated(self, rolling: Rolling, done: int) -> bool:
        """Whether the last update on this stage before the iteration that comes, or runs, is this lane's own."""
        length, others = rolling
        t, within = divmod(done, length)
        return bool(within) or all(len(o.spans) >= (t - (o.pipeline > self.pipeline)) * length for o in others)

    def followers(self) -> list[SimulatedLane]:
        """Lanes that wait for something, of those that may wait for an update of this one."""
        return [other for other in self.rolling.others if other.input_s() is None] if self.rolling else []

    def urgency(self) -> tuple[int, ...]:
        """Of what may run on a device the smallest goes first."""
        if self.rolling:
            return len(self.spans) // self.rolling.length, self.pipeline, *urgency(self.action), self.stage
        return *urgency(self.action), self.pipeline, self.stage


class InTurns:
    """Runs one action at a time."""

    __slots__ = ("_running", "_waiting", "version")

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, ...], SimulatedLane]] = []  # a heap
        self._running: SimulatedLane | None = None
        self.version = 0

    def add(self, lane: SimulatedLane) -> None:
        """A lane may begin its next action."""
        heapq.heappush(self._waiting, (lane.urgency(), lane))

    def ended(self, now: float) -> Iterator[SimulatedLane]:
        """The lane whose action ends now."""
        assert self._running is not None
        yield self._running
        self._running = None

    def go_on(self, now: float) -> float | None:
        """Begin what may begin; when something ends, if that is not known yet."""
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
        """The most urgent lane whose turn it is."""
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
    """Runs all lanes at once.

    As all of them are slowed down alike, the device has a clock of its own, which runs at their speed: a lane's piece
    ends at a time on that clock that nobody who comes or goes later can change.
    """

    __slots__ = ("_added", "_clock", "_demand", "_running", "_slowness", "_updated", "version")

    def __init__(self) -> None:
        self._added: list[SimulatedLane] = []
        # A heap: end of the piece on the clock, pipeline and stage, utilisation, the pieces after it.
        self._running: list[tuple[float, tuple[int, int], float, Iterator[tuple[float, float]], SimulatedLane]] = []
        self._clock = self._updated = self._demand = 0.0
        self._slowness = 1.0
        self.version = 0

    def add(self, lane: SimulatedLane) -> None:
        """A lane may begin its next action."""
        self._added.append(lane)

    def ended(self, now: float) -> Iterator[SimulatedLane]:
        """Lanes whose action ends now; those of which only a piece does go on."""
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
        """Begin what may begin; when something ends, if nothing else begins before."""
        self._move(now)
        if not self._running:
            self._demand = 0.0  # without what rounding has left
        for lane in self._added:
            lane.begin_s = now
            rest = iter(lane.pieces[lane.action.kind])
            seconds, utilisation = next(rest)
            place = lane.pipeline, lane.stage
            heapq.heappush(self._running, (self._clock + seconds, place, utilisation, rest, lane))
            self._demand += utilisation
        self._added.clear()
        self._slowness = max(1.0, self._demand)
        self.version += 1  # what was due is not any more
        return now + max(0.0, self._running[0][0] - self._clock) * self._slowness if self._running else None

    def _move(self, now: float) -> None:
        """Set the clock to what it shows now."""
        if now != self._updated:
            self._clock += (now - self._updated) / self._slowness
            self._updated = now


Sharing = InTurns | SideBySide

"""Lanes, the devices that serve them, and the links between them, for the simulation of several pipelines.

A device serves its lanes side by side: while their utilisations sum to more than 1, all of them are slowed down by that
sum. Or it serves them in turns, as the executor does: backwards first, then the lowest micro-batch, then the lowest
pipeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from lightning_avgpipe.schedule import Action

__all__ = ["Device", "InTurns", "Lane", "Link", "Pieces", "SideBySide"]

_ROUNDING = 1e-12

Pieces = tuple[tuple[float, float], ...]  # of an action: seconds and utilisation


class Link:
    """One direction of a hop: messages one after another.

    Args:
        occupied_s: by a message.
        latency_s: from then until it arrives.
    """

    __slots__ = ("_free", "_latency_s", "_occupied_s")

    def __init__(self, occupied_s: float, latency_s: float) -> None:
        self._occupied_s, self._latency_s = occupied_s, latency_s
        self._free = 0.0

    def send(self, now: float) -> float:
        """When a message that is ready now arrives."""
        self._free = (self._free if self._free > now else now) + self._occupied_s
        return self._free + self._latency_s


class Lane:
    """One stage of one pipeline.

    Args:
        row: its actions.
        number: of the lane; those of the same pipeline follow each other.
        device: serves it.
        pieces: of a forward ``"F"`` and of a backward ``"B"``; on a device that serves lanes in turns, one.

    Attributes:
        position: in the row, of the next action, or of the one that runs.
        arrivals: when the input of an action is there, as far as that is known.
        receivers: where the results of ``"F"`` and ``"B"`` go, and over which link.
        ends: of the actions that are over, ``"F"`` and ``"B"`` apart.
    """

    __slots__ = ("arrivals", "device", "ends", "number", "pieces", "position", "receivers", "row")

    def __init__(self, row: Sequence[Action], number: int, device: Device, pieces: Mapping[str, Pieces]) -> None:
        self.row: tuple[Action | None, ...] = (*row, None)
        self.number, self.device, self.pieces = number, device, pieces
        self.position = 0
        self.arrivals: dict[Action | None, float] = {}
        self.ends: dict[str, list[float]] = {"F": [], "B": []}
        self.receivers: dict[str, tuple[Lane, Link]] = {}


class InTurns:
    """Runs one action at a time."""

    __slots__ = ("_running", "_waiting", "version")

    def __init__(self) -> None:
        self._waiting: list[tuple[Action, int, Lane]] = []  # a heap: "B" comes before "F"
        self._running: Lane | None = None
        self.version = 0

    def add(self, lane: Lane, action: Action) -> None:
        """A lane may begin an action."""
        heapq.heappush(self._waiting, (action, lane.number, lane))

    def ended(self, now: float) -> Iterator[Lane]:
        """The lane whose action ends now."""
        assert self._running is not None
        yield self._running
        self._running = None

    def go_on(self, now: float) -> float | None:
        """Begin what may begin; when something ends, if that is not known yet."""
        if self._running is not None or not self._waiting:
            return None
        action, _, self._running = heapq.heappop(self._waiting)
        ((seconds, _),) = self._running.pieces[action.kind]
        return now + seconds


class SideBySide:
    """Runs all lanes at once.

    As all of them are slowed down alike, the device has a clock of its own, which runs at their speed: a lane's piece
    ends at a time on that clock that nobody who comes or goes later can change.
    """

    __slots__ = ("_added", "_clock", "_demand", "_running", "_slowness", "_updated", "version")

    def __init__(self) -> None:
        self._added: list[tuple[Action, Lane]] = []
        # A heap: end of the piece on the clock, number of the lane, its utilisation, the pieces after it.
        self._running: list[tuple[float, int, float, Iterator[tuple[float, float]], Lane]] = []
        self._clock = self._updated = self._demand = 0.0
        self._slowness = 1.0
        self.version = 0

    def add(self, lane: Lane, action: Action) -> None:
        """A lane may begin an action."""
        self._added.append((action, lane))

    def ended(self, now: float) -> Iterator[Lane]:
        """Lanes whose action ends now; those of which only a piece does go on."""
        self._move(now)
        running = self._running
        due = running[0][0] * (1 + _ROUNDING)
        while running and running[0][0] <= due:
            until, number, utilisation, rest, lane = running[0]
            piece = next(rest, None)
            if piece is None:
                heapq.heappop(running)
                self._demand -= utilisation
                yield lane
            else:
                heapq.heapreplace(running, (until + piece[0], number, piece[1], rest, lane))
                self._demand += piece[1] - utilisation

    def go_on(self, now: float) -> float | None:
        """Begin what may begin; when something ends, if nothing else begins before."""
        self._move(now)
        if not self._running:
            self._demand = 0.0  # without what rounding has left
        for action, lane in self._added:
            rest = iter(lane.pieces[action.kind])
            seconds, utilisation = next(rest)
            heapq.heappush(self._running, (self._clock + seconds, lane.number, utilisation, rest, lane))
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


Device = InTurns | SideBySide

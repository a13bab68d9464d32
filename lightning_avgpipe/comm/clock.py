"""Clocks: the offset between the clocks of two processes, and the time of events on a device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.utils.device import Moment, has_passed, port_of, seconds_between

host_now = time.perf_counter
_ROUNDS = 16  # questions, each with its answer


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock: ``own time + offset_s`` is the time on the clock of rank 0, up to ``error_s``.

    Attributes:
        offset_s: offset in seconds.
        error_s: largest error of the offset, in seconds.
    """

    offset_s: float = 0.0
    error_s: float = 0.0


def estimate_offset(rounds: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset of another clock from questions and answers.

    The other clock was read at some time between question and answer. The middle of this interval is off by at most
    half the round trip, so the quickest round decides.

    Args:
        rounds: (own time when asking, the other's time, own time when the answer came), seconds.
    """
    asked, other, answered = min(rounds, key=lambda times: times[2] - times[0])
    return ClockOffset(other - (asked + answered) / 2, (answered - asked) / 2)


def offset_in(group: Collectives) -> ClockOffset:
    """Return the offset of this process's clock from that of rank 0. Every process of the group calls it."""
    rounds: list[tuple[float, float, float]] = []

    def exchange() -> None:
        first, reading = group.peer(0), torch.empty((), dtype=torch.float64, device="cpu")
        for _ in range(_ROUNDS):
            asked = host_now()
            first.send(reading)
            reading = first.receive(reading)
            rounds.append((asked, float(reading), host_now()))

    def answer() -> None:
        for peer in map(group.peer, range(1, group.world_size)):
            for _ in range(_ROUNDS):
                reading = peer.receive(torch.empty((), dtype=torch.float64, device="cpu"))
                peer.send(torch.full_like(reading, host_now()))

    group.together("an alignment of clocks", answer if group.rank == 0 else exchange)
    return estimate_offset(rounds) if rounds else ClockOffset()


class DeviceClock:
    """A clock that reads the time where work happens: on the host at once, on an accelerator by events.

    An anchor event ties the events of an accelerator to the host's clock. Making the clock waits for the device once,
    and so does reading the first event afterwards; in between the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._port = port_of(device)
        self._port.synchronize()
        self._anchor = self._port.moment()
        self._port.synchronize()
        self._anchored_s = host_now()

    def now(self, stream: Any = None) -> Moment:
        """Return the moment at which a stream (default: the current one) gets here; on the host, this instant."""
        return self._port.moment(stream)

    def seconds(self, moment: Moment) -> float:
        """Return a moment in seconds of the host's clock."""
        return moment if isinstance(moment, float) else self._anchored_s + seconds_between(self._anchor, moment)


class Stopwatch:
    """A timer of laps on a device. The host waits neither for the end of a lap nor for its time."""

    def __init__(self, device: torch.device) -> None:
        self._port = port_of(device)
        self._laps: deque[tuple[int, Moment, Moment]] = deque()

    @contextlib.contextmanager
    def lap(self, number: int) -> Iterator[None]:
        """Time what is queued or done within this context as one lap. A lap that raises is not counted."""
        begin = self._port.moment()
        yield
        self._laps.append((number, begin, self._port.moment()))

    def finished(self) -> list[tuple[int, float]]:
        """Return number and seconds of each lap that has ended on the device since the last call, in order."""
        found = []
        while self._laps:
            number, begin, end = self._laps[0]
            if not has_passed(end):
                break
            self._laps.popleft()
            found.append((number, seconds_between(begin, end)))
        return found

"""Clocks: what another process's clock shows now, and when something happened on a device."""

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
_ROUNDS = 16  # of a question and its answer


@dataclass(frozen=True)
class ClockOffset:
    """``own time + offset_s`` is the time on the clock of rank 0, up to ``error_s``."""

    offset_s: float = 0.0
    error_s: float = 0.0


def estimate_offset(rounds: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Estimate an offset from questions and answers.

    The other clock was read at some time between question and answer; halfway is off by at most half the round trip,
    so the quickest round counts.

    Args:
        rounds: (own time when asking, the other's time, own time when the answer came), seconds.
    """
    asked, other, answered = min(rounds, key=lambda times: times[2] - times[0])
    return ClockOffset(other - (asked + answered) / 2, (answered - asked) / 2)


def offset_in(group: Collectives) -> ClockOffset:
    """How far this process's clock is from that of rank 0. Every process of the group calls it."""
    rounds: list[tuple[float, float, float]] = []

    def exchange() -> None:
        first, reading = group.peer(0), torch.empty((), dtype=torch.float64)
        for _ in range(_ROUNDS):
            asked = host_now()
            first.send(reading)
            reading = first.receive(reading)
            rounds.append((asked, float(reading), host_now()))

    def answer() -> None:
        for peer in map(group.peer, range(1, group.world_size)):
            for _ in range(_ROUNDS):
                reading = peer.receive(torch.empty((), dtype=torch.float64))
                peer.send(torch.full_like(reading, host_now()))

    group.together("an alignment of clocks", answer if group.rank == 0 else exchange)
    return estimate_offset(rounds) if rounds else ClockOffset()


class DeviceClock:
    """Reads times where work happens: on the host at once, on an accelerator by events that nothing waits for.

    There an anchor ties the events to the host's clock. Making it waits for the device once, and so does reading the
    first event afterwards; in between the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._port = port_of(device)
        self._port.synchronize()
        self._anchor = self._port.moment()
        self._port.synchronize()
        self._anchored_s = host_now()

    def now(self, stream: Any = None) -> Moment:
        """The moment at which a stream gets here; default: the current stream, or on the host this instant."""
        return self._port.moment(stream)

    def seconds(self, moment: Moment) -> float:
        """When it was, on the host's clock."""
        return moment if isinstance(moment, float) else self._anchored_s + seconds_between(self._anchor, moment)


class Stopwatch:
    """Times laps on a device; the host waits neither for their ends nor for the results."""

    def __init__(self, device: torch.device) -> None:
        self._port = port_of(device)
        self._laps: deque[tuple[int, Moment, Moment]] = deque()

    @contextlib.contextmanager
    def lap(self, number: int) -> Iterator[None]:
        """What is queued or done within this context is one lap; one that raises is none."""
        begin = self._port.moment()
        yield
        self._laps.append((number, begin, self._port.moment()))

    def finished(self) -> list[tuple[int, float]]:
        """Number and seconds of each lap that has ended on the device since the last call, in order."""
        found = []
        while self._laps:
            number, begin, end = self._laps[0]
            if not has_passed(end):
                break
            self._laps.popleft()
            found.append((number, seconds_between(begin, end)))
        return found

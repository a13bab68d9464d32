"""Clocks: what another process's clock shows now, and when something happened on a device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["ClockOffset", "DeviceClock", "Moment", "Stopwatch", "estimate_offset", "host_now"]

# A time of this process's clock, or on CUDA an event that will have one.
Moment = float | torch.cuda.Event

host_now = time.perf_counter


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


class DeviceClock:
    """Reads times where work happens: on the host at once, on CUDA by events that nothing waits for.

    On CUDA an anchor ties the events to the host's clock. Making it waits for the device once, and so does reading the
    first event afterwards; in between the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize(device)
            self._anchor = self._event(torch.cuda.current_stream(device))
            self._anchor.synchronize()
        self._anchored_s = host_now()

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """The moment at which a stream gets here; default: the current stream, or on the host this instant."""
        if not self._cuda:
            return host_now()
        return self._event(torch.cuda.current_stream(self._device) if stream is None else stream)

    def seconds(self, moment: Moment) -> float:
        """When it was, on the host's clock."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._anchored_s + self._anchor.elapsed_time(moment) / 1e3

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class Stopwatch:
    """Times laps on a device; the host waits neither for their ends nor for the results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: deque[tuple[int, Moment, Moment]] = deque()

    @contextlib.contextmanager
    def lap(self, number: int) -> Iterator[None]:
        """What is queued or done within this context is one lap; one that raises is none."""
        begin = self._now()
        yield
        self._laps.append((number, begin, self._now()))

    def finished(self) -> list[tuple[int, float]]:
        """Number and seconds of each lap that has ended on the device since the last call, in order."""
        found = []
        while self._laps:
            number, begin, end = self._laps[0]
            if isinstance(begin, float) or isinstance(end, float):
                seconds = end - begin  # type: ignore[operator]
            elif end.query():
                seconds = begin.elapsed_time(end) / 1e3
            else:
                break
            self._laps.popleft()
            found.append((number, seconds))
        return found

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return host_now()
        return DeviceClock._event(torch.cuda.current_stream(self._device))

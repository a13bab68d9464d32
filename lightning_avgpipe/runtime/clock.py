"""Clocks: what another process's clock shows now, and when something happened on a device."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["ClockOffset", "DeviceClock", "Moment", "estimate_offset", "host_now"]

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

"""Record what the processes do in one iteration, and how much of their devices their kernels use."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.probe import ClockOffset
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.schedule import FORWARD, Action, Activity, Kind, Span, Timeline, Transfer, peak_stash
from lightning_avgpipe.utils.device import DeviceClock, Moment, host_now, port_of

_Message = tuple[Edge, int]  # edge and micro-batch

# names of forwards in torch's profiler: micro-batch, stage
_FORWARDS = re.compile(rf"avgpipe::{FORWARD}(\d+) of stage (\d+)")


@dataclass(frozen=True)
class Recording:
    """The record of one process; times are in seconds on its own clock.

    Attributes:
        rank: rank of the process.
        clock: offset of its clock from rank 0's.
        spans: actions that it ran.
        activities: all other activities.
        sent: (edge, micro-batch) -> begin and end of sending.
        arrived: (edge, micro-batch) -> time of arrival.
        processor_s: (stage, kind of action) -> CPU seconds of all threads of the process.
    """

    rank: int
    clock: ClockOffset
    spans: tuple[Span, ...]
    activities: tuple[Activity, ...]
    sent: dict[_Message, tuple[float, float]]
    arrived: dict[_Message, float]
    processor_s: Mapping[tuple[int, Kind], float] = field(default_factory=dict)

    @property
    def span_s(self) -> float:
        """The seconds from the first action's begin to the last action's end."""
        return max(span.end_s for span in self.spans) - min(span.begin_s for span in self.spans)

    @property
    def busy_s(self) -> float:
        """The seconds of :attr:`span_s` without waits."""
        return self.span_s - sum(a.end_s - a.begin_s for a in self.activities if a.kind == "wait")


class Recorder(Observer):
    """An observer that records one iteration in this process; its methods may be called from any thread.

    Args:
        rank: rank of this process.
        device: device of this process.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._clock = DeviceClock(device)
        self._spans: list[tuple[int, Action, int, Moment, Moment]] = []
        self._activities: list[tuple[Literal["wait", "step", "averaging"], Moment, Moment, str]] = []
        self._sent: dict[_Message, tuple[Moment, Moment]] = {}
        self._arrived: dict[_Message, Moment] = {}
        self._processor_s: dict[tuple[int, Kind], float] = defaultdict(float)
        self._unsent = 0
        self._all_sent = threading.Condition()

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action and record its times."""
        begin, before = self._clock.now(), time.process_time()
        output = do()
        self._processor_s[work.stage, work.action.kind] += time.process_time() - before
        self._spans.append((work.stage, work.action, work.pipeline, begin, self._clock.now()))
        return output

    @contextlib.contextmanager
    def waiting(self, note: str) -> Iterator[None]:
        """Record a wait of the executor, on the host, that lasts for this context."""
        begin = host_now()
        yield
        self._activities.append(("wait", begin, host_now(), note))

    @contextlib.contextmanager
    def activity(self, kind: Literal["step", "averaging"]) -> Iterator[None]:
        """Record other work of the device that lasts for this context."""
        begin = self._clock.now()
        yield
        self._activities.append((kind, begin, self._clock.now(), ""))

    def queued(self) -> None:
        """Count a message that will be sent."""
        with self._all_sent:
            self._unsent += 1

    @contextlib.contextmanager
    def sending(self, route: Route, micro_batch: int, stream: Any) -> Iterator[None]:
        """Record the sending of a queued message within this context: on a stream, or by the host if that is None."""
        begin = self._there(stream)
        yield
        if isinstance(route.what, Edge):
            self._sent[route.what, micro_batch] = begin, self._there(stream)
        with self._all_sent:
            self._unsent -= 1
            self._all_sent.notify_all()

    def arrived(self, route: Route, micro_batch: int, stream: Any, at_s: float | None) -> None:
        """Record the arrival of a message: at ``at_s`` or, if None, when its stream gets here (on the host: now)."""
        if isinstance(route.what, Edge):
            self._arrived[route.what, micro_batch] = self._there(stream) if at_s is None else at_s

    def finish(self, clock: ClockOffset, timeout_s: float) -> Recording:
        """Return the recording when the last message has been sent.

        Raises:
            PeerError: it was not sent in time.
        """
        with self._all_sent:
            if not self._all_sent.wait_for(lambda: self._unsent == 0, timeout_s):
                raise PeerError(
                    f"rank {self._rank} could not send {self._unsent} messages of a recorded iteration within "
                    f"{timeout_s:.0f} s; raise timeout=... if the links are that slow"
                )
        at = self._clock.seconds
        return Recording(
            self._rank,
            clock,
            tuple(Span(stage, action, at(begin), at(end), n) for stage, action, n, begin, end in self._spans),
            tuple(Activity(self._rank, kind, at(begin), at(end), note) for kind, begin, end, note in self._activities),
            {message: (at(begin), at(end)) for message, (begin, end) in self._sent.items()},
            {message: at(moment) for message, moment in self._arrived.items()},
            self._processor_s,
        )

    def _there(self, stream: Any) -> Moment:
        return host_now() if stream is None else self._clock.now(stream)


def assemble(recordings: Sequence[Recording], replicas: Sequence[Sequence[int]]) -> Timeline:
    """Merge the recordings of all processes into a timeline on the clock of rank 0; the first action begins at 0.

    Args:
        recordings: recordings of all processes.
        replicas: for each stage, the ranks that take turns at its micro-batches, shape ``(K,)``.
    """
    begins = [span.begin_s + recording.clock.offset_s for recording in recordings for span in recording.spans]
    zero = min(begins, default=0.0)
    spans: list[Span] = []
    activities: list[Activity] = []
    sent: dict[_Message, tuple[float, float]] = {}
    arrived: dict[_Message, float] = {}
    for recording in recordings:
        shift = recording.clock.offset_s - zero
        spans += [replace(s, begin_s=s.begin_s + shift, end_s=s.end_s + shift) for s in recording.spans]
        activities += [replace(a, begin_s=a.begin_s + shift, end_s=a.end_s + shift) for a in recording.activities]
        sent |= {message: (begin + shift, end + shift) for message, (begin, end) in recording.sent.items()}
        arrived |= {message: moment + shift for message, moment in recording.arrived.items()}
    spans.sort(key=lambda span: (span.stage, span.end_s))
    transfers = [_transfer(message, *times, arrived[message]) for message, times in sent.items()]
    transfers.sort(key=lambda transfer: transfer.begin_s)
    hosts = tuple(map(tuple, replicas))
    rows = ((span.action for span in spans if span.stage == k) for k in range(len(hosts)))
    return Timeline(len(hosts), tuple(spans), tuple(transfers), peak_stash(rows), hosts, tuple(activities))


def _transfer(message: _Message, begin_s: float, end_s: float, arrival_s: float) -> Transfer:
    """Make a transfer, and put its times in order: the end of sending is noticed late, and clocks differ a little."""
    edge, micro_batch = message
    arrival_s = max(arrival_s, begin_s)
    end_s = min(end_s, arrival_s)
    return Transfer(edge.hop, edge.direction, micro_batch, begin_s, end_s, arrival_s, edge.pipeline)


@dataclass
class KernelTrace:
    """The kernels of a device, as torch's profiler saw them.

    Times are in seconds on the profiler's clock, which differs from the recorder's.

    Attributes:
        kernels: begin and end of each kernel, and the share of the multiprocessors that it occupies, 0..1; sorted by
            begin; empty if the driver does not permit profiling.
        forwards_s: (stage, micro-batch) -> begin of the forward.
    """

    kernels: list[tuple[float, float, float]] = field(default_factory=list)
    forwards_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Read the trace that the profiler has exported."""
        for event in json.loads(path.read_text())["traceEvents"]:
            category, arguments = event.get("cat"), event.get("args", {})
            begin_s = float(event.get("ts", 0.0)) / 1e6
            if category == "kernel":
                share = min(1.0, float(arguments.get("blocks per SM", 1.0)))
                self.kernels.append((begin_s, begin_s + float(event["dur"]) / 1e6, share))
            elif category == "gpu_user_annotation" and (forward := _FORWARDS.fullmatch(event["name"])):
                micro_batch, stage = map(int, forward.groups())
                self.forwards_s[stage, micro_batch] = begin_s
        self.kernels.sort()


@contextlib.contextmanager
def tracing_kernels(device: torch.device) -> Iterator[KernelTrace]:
    """Profile a device with torch's profiler within this context; the trace is filled at its end."""
    from torch.profiler import profile, supported_activities

    trace = KernelTrace()
    with profile(activities=supported_activities()) as profiler:
        yield trace
        port_of(device).synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace.read(path)

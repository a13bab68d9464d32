"""Measure how much of its device a process uses while actions run."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Work
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.schedule import FORWARD, Kind
from lightning_avgpipe.utils.device import port_of

_log = logging.getLogger(__name__)

_SAMPLE_S = 0.02
_FORWARDS = f"avgpipe::{FORWARD}"


class BusyRecorder(Recorder):
    """A recorder that also measures the processor time of all threads of the process.

    Attributes:
        processor_s: (stage, kind of action) -> seconds of each action.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self.processor_s: dict[tuple[int, Kind], list[float]] = defaultdict(list)

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action, and record its times and processor time."""

        def timed() -> Message | None:
            before = time.process_time()
            output = do()
            self.processor_s[work.stage, work.action.kind].append(time.process_time() - before)
            return output

        return super().perform(work, timed)


@dataclass(frozen=True)
class Kernel:
    """A kernel on the device; times are in seconds of the profiler's clock.

    Attributes:
        begin_s: begin of the kernel.
        end_s: end of the kernel.
        share: share of the multiprocessors that it occupies, 0..1.
    """

    begin_s: float
    end_s: float
    share: float


class KernelTrace:
    """The kernels of a device, as torch's profiler saw them.

    Attributes:
        kernels: kernels by begin; empty if the driver does not permit profiling.
        forwards_s: micro-batch -> begin of its forward, on the profiler's clock, which differs from the recorder's.
    """

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.forwards_s: dict[int, float] = {}

    def read(self, path: Path) -> None:
        """Read the trace that the profiler has exported."""
        for event in json.loads(path.read_text())["traceEvents"]:
            category, arguments = event.get("cat"), event.get("args", {})
            begin_s = float(event.get("ts", 0.0)) / 1e6
            if category == "kernel":
                share = min(1.0, float(arguments.get("blocks per SM", 1.0)))
                self.kernels.append(Kernel(begin_s, begin_s + float(event["dur"]) / 1e6, share))
            elif category == "gpu_user_annotation" and event["name"].startswith(_FORWARDS):
                self.forwards_s[int(event["name"].removeprefix(_FORWARDS))] = begin_s
        self.kernels.sort(key=lambda kernel: kernel.begin_s)


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


@contextlib.contextmanager
def sampling_device(device: torch.device) -> Iterator[list[float]]:
    """Sample the utilisation of a CUDA device, 0..1, by NVML within this context.

    The list is complete at the end, and empty if NVML is not available (``pip install nvidia-ml-py``). The measure is
    coarse: the driver averages over up to a second, and any kernel makes the whole device busy.
    """
    samples: list[float] = []
    ended = threading.Event()

    def sample() -> None:
        try:
            while not ended.wait(_SAMPLE_S):
                samples.append(port_of(device).utilization())
        except Exception as error:  # NVML's own errors have names only where it is installed
            _log.info("NVML does not say how busy %s is: %s", device, error)
            samples.clear()

    thread = threading.Thread(target=sample, name="avgpipe utilisation", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()

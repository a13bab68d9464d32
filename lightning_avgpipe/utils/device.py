"""Device ports and clocks: one interface to the host and to accelerators, which work asynchronously."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_WITHOUT_STREAMS = ("cpu", "meta", "mps")
_HOST_BACKEND = "gloo"
_MOST_BLOCKS = 4  # most thread blocks of a transfer
# type of device -> variable -> value
_ENVIRONMENT = {
    "cuda": {
        # number of hardware queues: streams that share one wait for each other
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # after an error or a timeout, abort NCCL's communicators but not the process: its own error is more precise,
        # since it names stage, rank and action
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
}
# The same for several processes. Loading a kernel at its first launch may wait for everything that runs on the device,
# including a send that waits for another process, which may wait in the same way: a deadlock.
_ENVIRONMENT_OF_SEVERAL = {"cuda": {"CUDA_MODULE_LOADING": "EAGER"}}
_HOST_ALLOCATOR = "DefaultCPUAllocator"  # torch's allocator raises a RuntimeError with this name

T = TypeVar("T")

TUNED_WITHOUT_GRAPHS = "max-autotune-no-cudagraphs"  # a mode of torch.compile


def keeps_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether ``torch.compile`` with these options uses CUDA graphs, whose outputs the next call overwrites."""
    asked = (options.get("options") or {}).get("triton.cudagraphs", False)
    return bool(asked or options.get("mode") in ("reduce-overhead", "max-autotune"))


host_now = time.perf_counter
Moment = float | torch.Event  # a time on this process's clock, or on an accelerator an event that records its time


def has_passed(moment: Moment) -> bool:
    """Return whether the stream of a moment has reached it."""
    return isinstance(moment, float) or moment.query()


def seconds_between(begin: Moment, end: Moment) -> float:
    """Wait for the moment ``end``, and return the seconds since ``begin`` on the same device."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    if not end.query():
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@functools.cache
def port_of(device: torch.device) -> DevicePort:
    """Return the port of a device."""
    return (DevicePort if device.type in _WITHOUT_STREAMS else AcceleratorPort)(device)


def accelerator_in_use() -> str | None:
    """Return the type of the accelerator that this process has begun to use, or None."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in _WITHOUT_STREAMS:
        return None
    return accelerator.type if torch.get_device_module(accelerator).is_initialized() else None


def all_generators() -> list[torch.Generator]:
    """Return torch's default generators of the host and of the accelerator, if it is in use."""
    used = accelerator_in_use()
    others = () if used is None else torch.get_device_module(used).default_generators
    return [torch.default_generator, *others]


def backends(host: str, accelerator: str, device: torch.device) -> str:
    """Return a backend string for torch.distributed with one backend for the host and one for an accelerator."""
    return f"cpu:{host},{device.type}:{accelerator}"


def device_backend(name: str | None, device: torch.device) -> str:
    """Return the backend of torch.distributed for a type of device.

    Args:
        name: backend, or backends by type of device, such as ``cpu:gloo,cuda:nccl``; None: torch's default.
        device: a device of this type.
    """
    if name is None:
        return dist.Backend.default_device_backend_map.get(device.type, _HOST_BACKEND)
    if ":" not in name:
        return name
    return dict(part.split(":") for part in name.split(",")).get(device.type, _HOST_BACKEND)


def urgent_options(backend: str, timeout: timedelta) -> Any:
    """Return options of torch.distributed for transfers that run beside computation; None if a backend has none.

    Such transfers have high priority, and use few multiprocessors, which they occupy while they wait for the other end.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = _MOST_BLOCKS
    return options


def set_environment(device: torch.device, environment: MutableMapping[str, str], several: bool) -> list[str]:
    """Set the variables that a kind of device and its backend read when they start, unless the user has set them.

    Args:
        device: a device of the kind.
        environment: environment of this process, which processes that it starts inherit.
        several: whether several processes train.
    Returns:
        Names of variables that were set too late, because this process already uses a device of this kind.
    """
    variables = {
        **_ENVIRONMENT.get(device.type, {}),
        **(_ENVIRONMENT_OF_SEVERAL.get(device.type, {}) if several else {}),
    }
    new = [name for name in variables if name not in environment]
    environment.update({name: variables[name] for name in new})
    begun = new and accelerator_in_use() == device.type
    return [name for name in new if name.startswith(device.type.upper())] if begun else []


def connects_hosts(name: str) -> bool:
    """Return whether a backend string for torch.distributed includes a backend for tensors on the host."""
    return ":" in name or "cpu" in dist.Backend.backend_capability.get(name, ["cpu"])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host is out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _HOST_ALLOCATOR in str(error)


def _waits() -> int:
    """Return how often this thread has yielded the processor to sleep or wait; 0 where this is not known."""
    with contextlib.suppress(ImportError, AttributeError):  # RUSAGE_THREAD exists on Linux only
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


class DevicePort:
    """The port of a device without streams, such as the host: its work is done when a call returns.

    Args:
        device: device of the port.

    Attributes:
        runs_ahead: whether calls return before their work is done.
        counts_memory: whether an allocator of torch counts allocations. If not, the memory is that of the host.
    """

    runs_ahead = counts_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_host(self) -> bool:
        """Whether tensors on the device are in the host's memory."""
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        """The name of the device model."""
        with contextlib.suppress(OSError):  # on Linux this file has the model's name, which platform does not return
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that random operations on this device may use."""
        return (torch.default_generator,)

    # -- streams and time ----------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Make the device the current device of this thread."""

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""

    def new_stream(self, urgent: bool = True) -> Any:
        """Make a stream; None if the device has no streams.

        Args:
            urgent: whether the stream has high priority.
        """
        return None

    def current_stream(self) -> Any:
        """Return the current stream of this thread; None if the device has no streams."""
        return None

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Run the work within this context on a stream."""
        return contextlib.nullcontext()

    def event(self) -> Any:
        """Record an event on the current stream; None if the device has no streams."""
        return None

    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of another stream's tensor until the current stream, which waits for it, has used it."""

    def moment(self, stream: Any = None) -> Moment:
        """Return the moment at which a stream (default: the current one) finishes its work so far."""
        return time.perf_counter()

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run a function, and return its result and the seconds that it took."""
        waits, begin_s, begin_own_s = _waits(), time.perf_counter(), time.thread_time()
        result = work()
        own_s, took_s = time.thread_time() - begin_own_s, time.perf_counter() - begin_s
        # With one thread, use its processor time, which excludes other processes, unless the work waited.
        computed = torch.get_num_threads() == 1 and (own_s > took_s / 2 or _waits() == waits)
        return result, own_s if computed else took_s

    # -- memory --------------------------------------------------------------------------------------------------------

    def total_bytes(self) -> int:
        """Return the bytes of memory in all."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        """Return the bytes of memory that are free now, or all where the host does not report this."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except ValueError:
            return self.total_bytes()

    def other_bytes(self) -> int:
        """Return the bytes in use, except what this process's allocator has reserved; 0 where it is not counted."""
        return 0

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors of this process use now; 0 where it is not counted."""
        return 0

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors have used since the last :meth:`reset_peak`; 0 where it is not counted."""
        return 0

    def reset_peak(self) -> None:
        """Reset the peak to what is used now."""


class AcceleratorPort(DevicePort):
    """The port of a device with streams and an allocator, by torch's module for it, such as ``torch.cuda``."""

    runs_ahead = counts_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch: Any = torch.get_device_module(device)

    @property
    def name(self) -> str:
        return str(self._torch.get_device_name(self.device))

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        self._torch.current_device()  # initialises the device, which creates the generators
        return torch.default_generator, self._torch.default_generators[self.device.index or 0]

    def enter_thread(self) -> None:
        self._torch.set_device(self.device)

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

    def new_stream(self, urgent: bool = True) -> Any:
        return self._torch.Stream(self.device, priority=-1 if urgent else 0)

    def current_stream(self) -> Any:
        return self._torch.current_stream(self.device)

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._torch.stream(stream)  # type: ignore[no-any-return]

    def event(self) -> Any:
        return self.current_stream().record_event()

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self.current_stream())

    def moment(self, stream: Any = None) -> Moment:
        event = self._torch.Event(enable_timing=True)
        event.record(self.current_stream() if stream is None else stream)
        return event  # type: ignore[no-any-return]

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        self.synchronize()
        begin = self.moment()
        result = work()
        return result, seconds_between(begin, self.moment())

    def total_bytes(self) -> int:
        return int(self._torch.get_device_properties(self.device).total_memory)

    def free_bytes(self) -> int:
        return int(self._torch.mem_get_info(self.device)[0])

    def other_bytes(self) -> int:
        free, total = self._torch.mem_get_info(self.device)
        return max(0, total - free - self._torch.memory_reserved(self.device))

    def allocated_bytes(self) -> int:
        return int(self._torch.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        # includes memory (of messages) that was freed while other streams use it: it is not available yet either
        found = self._torch.memory_stats(self.device).get("active_bytes.all.peak")
        return int(self._torch.max_memory_allocated(self.device) if found is None else found)

    def reset_peak(self) -> None:
        self._torch.reset_peak_memory_stats(self.device)


class DeviceClock:
    """A clock that reads the time at which work happens: on the host immediately, on an accelerator by events.

    An anchor event relates the events of an accelerator to the host's clock. Creating the clock waits for the device,
    and so does reading the first event later; in between the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._port = port_of(device)
        self._port.synchronize()
        self._anchor = self._port.moment()
        self._port.synchronize()
        self._anchored_s = host_now()

    def now(self, stream: Any = None) -> Moment:
        """Return the moment at which a stream (default: the current one) reaches this point; on the host, now."""
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
        """Time the work within this context, queued or done, as one lap. A lap that raises is not counted."""
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


@contextlib.contextmanager
def visiting(tensors: Collection[Tensor], device: torch.device | None) -> Iterator[None]:
    """Move tensors to a device within this context, and back after it."""
    moves = device is not None and not port_of(device).is_host
    # tensors without contents on this process are fetched on demand instead
    homes = [(t, t.data) for t in tensors if moves and t.device != device and not t.is_meta]
    for tensor, home in homes:
        tensor.data = home.to(device)
    try:
        yield
    finally:
        for tensor, home in homes:
            home.copy_(tensor.data)
            tensor.data = home

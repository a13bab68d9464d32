"""The device port: all that differs between the host and an accelerator, whose work outlasts the calls."""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_avgpipe.utils.device_memory import AllocatorMemory, DeviceMemory

_WITHOUT_STREAMS = ("cpu", "meta", "mps")
_HOST_BACKEND = "gloo"
_HOST_ALLOCATOR = "DefaultCPUAllocator"  # of torch, which raises a RuntimeError

T = TypeVar("T")

TUNED_WITHOUT_GRAPHS = "max-autotune-no-cudagraphs"  # a mode of torch.compile


def keeps_graphs(options: Mapping[str, Any]) -> bool:
    """Whether ``torch.compile`` with these arguments makes graphs of kernels, which keep the values of one call."""
    asked = (options.get("options") or {}).get("triton.cudagraphs", False)
    return bool(asked or options.get("mode") in ("reduce-overhead", "max-autotune"))


Moment = float | torch.Event  # a time of this process's clock, or on an accelerator an event that will have one


def has_passed(moment: Moment) -> bool:
    """Whether its stream has got there."""
    return isinstance(moment, float) or moment.query()


def seconds_between(begin: Moment, end: Moment) -> float:
    """From one moment to another of the same device; waits for the end."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    if not end.query():
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@functools.cache
def port_of(device: torch.device) -> DevicePort:
    """What to ask about a device."""
    return (DevicePort if device.type in _WITHOUT_STREAMS else AcceleratorPort)(device)


def all_generators() -> list[torch.Generator]:
    """Torch's generators, of all devices that are in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in _WITHOUT_STREAMS:
        return [torch.default_generator]
    module = torch.get_device_module(accelerator)
    return [torch.default_generator, *(module.default_generators if module.is_initialized() else ())]


def backends(host: str, accelerator: str, device: torch.device) -> str:
    """Names for torch.distributed what connects hosts, and what connects devices of a kind."""
    return f"cpu:{host},{device.type}:{accelerator}"


def device_backend(name: str | None, device: torch.device) -> str:
    """The backend of torch.distributed between devices of a kind.

    Args:
        name: of it, or with the kinds of devices, as ``cpu:gloo,cuda:nccl``; None: that of torch for the kind.
        device: of the kind.
    """
    if name is None:
        return dist.Backend.default_device_backend_map.get(device.type, _HOST_BACKEND)
    if ":" not in name:
        return name
    return dict(part.split(":") for part in name.split(",")).get(device.type, _HOST_BACKEND)


def first_options(backend: str, timeout: timedelta) -> Any:
    """For torch.distributed: a backend's transfers go before other work of the device; None: it has no such option."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def connects_hosts(name: str) -> bool:
    """Whether a backend, or one of those of several kinds of devices, connects hosts as well."""
    return ":" in name or "cpu" in dist.Backend.backend_capability.get(name, ["cpu"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had too little memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _HOST_ALLOCATOR in str(error)


def _waits() -> int:
    """How often this thread has given the processor away, to sleep or to wait; where that is not known, 0."""
    with contextlib.suppress(ImportError, AttributeError):  # as on Linux only
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


class DevicePort:
    """A device whose work is done when a call returns, as the host's; its memory is the host's.

    Args:
        device: the device.

    Attributes:
        runs_ahead: whether calls return before their work is done.
        memory: what it has, and what is used.
    """

    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = DeviceMemory()

    @property
    def is_host(self) -> bool:
        """Whether tensors there are in the host's memory."""
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        """Of the model of device."""
        with contextlib.suppress(OSError):  # Linux tells more there than platform does
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Those that draws on this device may use."""
        return (torch.default_generator,)

    # -- streams and time ----------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Make it the current device of this thread."""

    def synchronize(self) -> None:
        """Wait until all of its work is done."""

    def new_stream(self, first: bool = True) -> Any:
        """A stream beside the current one; None where there are none.

        Args:
            first: whether its work goes first.
        """
        return None

    def current_stream(self) -> Any:
        """The stream on which this thread puts its work; None where there are none."""
        return None

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Work within this context goes to a stream."""
        return contextlib.nullcontext()

    def event(self) -> Any:
        """The place where the current stream is; None where its work is done."""
        return None

    def moment(self, stream: Any = None) -> Moment:
        """When a stream gets here, by default the current one."""
        return time.perf_counter()

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Do some work; its result, and the seconds that it took."""
        waits, begin_s, begin_own_s = _waits(), time.perf_counter(), time.thread_time()
        result = work()
        own_s, took_s = time.thread_time() - begin_own_s, time.perf_counter() - begin_s
        # On one thread the time for which it computed: what other processes take is not its own. What it waits is.
        computed = torch.get_num_threads() == 1 and (own_s > took_s / 2 or _waits() == waits)
        return result, own_s if computed else took_s

    def utilization(self) -> float:
        """Which part of the time it was busy lately, 0..1.

        Raises:
            Exception: of any kind, where that cannot be told.
        """
        raise NotImplementedError(f"{self.device} does not tell how busy it is")


class AcceleratorPort(DevicePort):
    """A device with streams and an allocator of its own, behind torch's module for it, such as ``torch.cuda``."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch: Any = torch.get_device_module(device)
        self.memory = AllocatorMemory(device, self._torch)

    @property
    def name(self) -> str:
        return str(self._torch.get_device_name(self.device))

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        self._torch.current_device()  # which makes the generators
        return torch.default_generator, self._torch.default_generators[self.device.index or 0]

    def enter_thread(self) -> None:
        self._torch.set_device(self.device)

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

    def new_stream(self, first: bool = True) -> Any:
        return self._torch.Stream(self.device, priority=-1 if first else 0)

    def current_stream(self) -> Any:
        return self._torch.current_stream(self.device)

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._torch.stream(stream)  # type: ignore[no-any-return]

    def event(self) -> Any:
        return self.current_stream().record_event()

    def moment(self, stream: Any = None) -> Moment:
        event = self._torch.Event(enable_timing=True)
        event.record(self.current_stream() if stream is None else stream)
        return event  # type: ignore[no-any-return]

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        self.synchronize()
        begin = self.moment()
        result = work()
        return result, seconds_between(begin, self.moment())

    def utilization(self) -> float:
        return float(self._torch.utilization(self.device)) / 100

"""The simulated device in this process: ``torch.sim``, and what was found while something ran on it."""

from __future__ import annotations

import contextlib
import threading
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.simulated import build

NAME = "sim"
NUM_DEVICES = 4
PACKAGE = "lightning_avgpipe"

backend: Any = None  # the library, once it is started


@dataclass(frozen=True)
class Wait:
    """A wait of the host for a device.

    Attributes:
        thread: that waits.
        why: the operation.
        file: innermost of the package; "" if none is.
        line: there.
        function: there.
    """

    thread: str
    why: str
    file: str
    line: int
    function: str


@dataclass
class Report:
    """What was found.

    Attributes:
        errors: races, and memory freed early, with the lines of the package that led there.
        waits: how often.
    """

    errors: Counter[str] = field(default_factory=Counter)
    waits: Counter[Wait] = field(default_factory=Counter)

    def note(self, kind: str, what: str) -> None:
        frames = traceback.extract_stack()[:-1]
        own = [frame for frame in frames if PACKAGE in Path(frame.filename).parts]
        if kind == "wait":
            last = own[-1] if own else None
            place = (last.filename.rpartition(f"{PACKAGE}/")[2], last.lineno or 0, last.name) if last else ("", 0, "")
            self.waits[Wait(threading.current_thread().name, what, *place)] += 1
        else:
            lines = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed((own or frames)[-4:]))
            self.errors[f"{kind}: {what} ({lines})"] += 1


@contextlib.contextmanager
def reported() -> Iterator[Report]:
    """What is found in this context."""
    report = Report()
    backend.listen(report.note)
    try:
        yield report
    finally:
        backend.listen(None)


def start(library: Path) -> None:
    """Give this process the device. Once, and before the first backward, which counts the kinds of devices."""
    global backend
    backend = build.load(library)
    backend.start(NUM_DEVICES)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _index(device: Any = None) -> int:
    if device is None:
        return int(backend.current_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(backend.current_device()) if index is None else index


def _device(device: Any = None) -> torch.device:
    return torch.device(NAME, _index(device))


def _generator(device: Any = None) -> torch.Generator:
    return backend.default_generator(_index(device))  # type: ignore[no-any-return]


def _module() -> types.ModuleType:
    module, everywhere = types.ModuleType(f"torch.{NAME}"), range(NUM_DEVICES)
    functions: Mapping[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: backend.current_device(),
        "set_device": lambda device: backend.set_device(_index(device)),
        "device": lambda device: torch.accelerator.device_index(_index(device)),
        "default_generators": [_generator(device) for device in everywhere],
        "manual_seed": lambda seed: _generator().manual_seed(seed),
        "manual_seed_all": lambda seed: [_generator(device).manual_seed(seed) for device in everywhere],
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "get_rng_state_all": lambda: [_generator(device).get_state() for device in everywhere],
        "set_rng_state_all": lambda states: [_generator(i).set_state(state) for i, state in enumerate(states)],
        "synchronize": lambda device=None: torch.accelerator.synchronize(_device(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_device(device)),
        "Stream": lambda device=None, **options: torch.Stream(device=_device(device), **options),
        "Event": lambda **options: torch.Event(device=NAME, **options),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "get_device_name": lambda device=None: "simulated device",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=2**34, name="simulated device"),
        "mem_get_info": lambda device=None: (2**34 - backend.allocated(_index(device)), 2**34),
        "memory_allocated": lambda device=None: backend.allocated(_index(device)),
        "memory_reserved": lambda device=None: backend.allocated(_index(device)),
        "memory_stats": lambda device=None: {"active_bytes.all.peak": backend.active_peak(_index(device))},
        "max_memory_allocated": lambda device=None: backend.peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: backend.reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module

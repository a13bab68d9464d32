"""Streams of random numbers that have names, and generators that are left as they were."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.host_random import host_state, seed_host, set_host_state


@dataclass(frozen=True)
class RandomKey:
    """Names one execution of a step function.

    Attributes:
        seed: of the run, the same on all ranks.
        iteration: batches seen so far.
        pipeline: n, 0-based.
        micro_batch: i, 0-based.
    """

    seed: int
    iteration: int = 0
    pipeline: int = 0
    micro_batch: int = 0

    def derive(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        """A 63-bit seed for one draw of this execution: of a module's n-th call the n-th function."""
        text = f"{self._prefix}{name}/{occurrence}/{function}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @functools.cached_property
    def _prefix(self) -> str:
        return f"{self.seed}/{self.iteration}/{self.pipeline}/{self.micro_batch}/"


@functools.cache
def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Those that draws on this device may use."""
    return port_of(device).generators


def seed_all(seed: int, device: torch.device) -> None:
    for generator in generators(device):
        generator.manual_seed(seed)


@contextlib.contextmanager
def stream(seed: int, device: torch.device) -> Iterator[None]:
    """Draw torch's random numbers from a fresh stream, then go on with the old one."""
    with restored(device):
        seed_all(seed, device)
        yield


@contextlib.contextmanager
def restored(device: torch.device) -> Iterator[None]:
    """Afterwards torch's generators are as they are now."""
    states = [(generator, generator.get_state()) for generator in generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class host_stream:
    """The same for the generators of Python and NumPy. A class, as it is entered at every unit that may use them."""

    __slots__ = ("_seed", "_state")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._state = host_state()
        seed_host(self._seed)

    def __exit__(self, *error: object) -> None:
        set_host_state(self._state)


class RandomState:
    """What torch's generators of a device, Python's and NumPy's would give next; a leaf for trees."""

    def __init__(self, device: torch.device) -> None:
        self._of_torch = [generator.get_state() for generator in generators(device)]
        self._on_host = host_state()

    def put(self, device: torch.device) -> None:
        """Let the generators go on from here."""
        for generator, state in zip(generators(device), self._of_torch, strict=True):
            generator.set_state(state)
        set_host_state(self._on_host)

    def is_same(self, other: RandomState) -> bool:
        same = all(map(torch.equal, self._of_torch, other._of_torch))
        return same and self._on_host == other._on_host


class Streams:
    """A stream of random numbers for each of several takers, torch's, Python's and NumPy's; each goes on with its own.

    Args:
        key: names the first; the others are of further micro-batches.
        count: of takers.
        device: on which they draw.
    """

    def __init__(self, key: RandomKey, count: int, device: torch.device) -> None:
        self._seeds = [replace(key, micro_batch=i).derive("step") for i in range(count)]
        self._device = device
        self._states: dict[int, RandomState] = {}

    @contextlib.contextmanager
    def drawing(self, i: int) -> Iterator[None]:
        """Within this context taker i draws."""
        with restored(self._device), host_stream(self._seeds[i]):
            if i not in self._states:
                seed_all(self._seeds[i], self._device)
            else:
                self._states[i].put(self._device)
            try:
                yield
            finally:
                self._states[i] = RandomState(self._device)

"""Named streams of random numbers, and contexts that restore generators."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_avgpipe.utils.device import port_of


@dataclass(frozen=True)
class RandomKey:
    """A key that identifies one execution of a step function, from which seeds are derived.

    Attributes:
        seed: seed of the run, the same on all ranks.
        iteration: number of batches before this one.
        pipeline: number n of the pipeline, from 0.
        micro_batch: number i of the micro-batch, from 0.
    """

    seed: int
    iteration: int = 0
    pipeline: int = 0
    micro_batch: int = 0

    def derive(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        """Return a 63-bit seed for function number ``function`` in call number ``occurrence`` of module ``name``."""
        text = f"{self._prefix}{name}/{occurrence}/{function}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @functools.cached_property
    def _prefix(self) -> str:
        return f"{self.seed}/{self.iteration}/{self.pipeline}/{self.micro_batch}/"


@functools.cache
def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that random operations on a device may use."""
    return port_of(device).generators


def seed_all(seed: int, device: torch.device) -> None:
    """Seed torch's generators of a device."""
    for generator in generators(device):
        generator.manual_seed(seed)


def seeds_of(device: torch.device) -> tuple[int, ...]:
    """Return the seeds with which the generators of a device were last seeded."""
    return tuple(generator.initial_seed() for generator in generators(device))


class _Begun(threading.local):
    seed: int | None = None


_begun = _Begun()


class stream:
    """Draw torch's random numbers from a new stream within this context, and restore the generators afterwards."""

    __slots__ = ("_before", "_device", "_seed", "_states")

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def __enter__(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators(self._device)]
        self._before, _begun.seed = _begun.seed, self._seed
        seed_all(self._seed, self._device)

    def __exit__(self, *error: object) -> None:
        _begun.seed = self._before
        for generator, state in self._states:
            generator.set_state(state)


def stream_seed() -> int | None:
    """Return the seed of the innermost :func:`stream` that this thread is in; None if there is none."""
    return _begun.seed


class restored:
    """Restore these generators of torch at the end of this context."""

    __slots__ = ("_states",)

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, *error: object) -> None:
        for generator, state in self._states:
            generator.set_state(state)


@dataclass(frozen=True)
class HostState:
    """The states of the global generators of Python and NumPy; equal states give equal random numbers.

    As a context manager it restores these states on exit.

    Reading or writing these states takes some 100 us, so it is done once per iteration, and for a unit only if needed.

    Attributes:
        python: state from ``random.getstate``.
        numpy: pickled state of NumPy, since comparing arrays does not give a bool.
    """

    python: tuple[Any, ...]
    numpy: bytes

    @classmethod
    def now(cls) -> HostState:
        """Return the current states of the generators."""
        return cls(random.getstate(), pickle.dumps(np.random.get_state(legacy=False)))

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        np.random.set_state(pickle.loads(self.numpy))

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, *error: object) -> None:
        self.restore()


def seed_host(seed: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def peek_host() -> tuple[float, float]:
    """Draw a number from both generators, to compare their states with expected ones."""
    return random.random(), float(np.random.random_sample())


@contextlib.contextmanager
def host_stream(seed: int) -> Iterator[None]:
    """Draw Python's and NumPy's random numbers from a new stream within this context, and restore the generators."""
    with HostState.now():
        seed_host(seed)
        yield


class _Kept(threading.local):
    state: HostState | None = None


_kept = _Kept()


@contextlib.contextmanager
def host_kept() -> Iterator[None]:
    """Restore Python's and NumPy's generators at the end of this context, so that forwards in it may reseed them."""
    before, _kept.state = _kept.state, HostState.now()
    try:
        yield
    finally:
        _kept.state.restore()
        _kept.state = before


@contextlib.contextmanager
def host_lent() -> Iterator[None]:
    """Continue the streams that :func:`host_kept` has saved, for user code that belongs to no micro-batch."""
    if _kept.state is None:
        yield
        return
    _kept.state.restore()
    try:
        yield
    finally:
        _kept.state = HostState.now()


class RandomState:
    """The states of torch's generators of a device, and of Python's and NumPy's global generators; a leaf for trees."""

    def __init__(self, device: torch.device) -> None:
        self._of_torch = [generator.get_state() for generator in generators(device)]
        self._on_host = HostState.now()

    def restore(self, device: torch.device) -> None:
        """Set the generators to this state."""
        for generator, state in zip(generators(device), self._of_torch, strict=True):
            generator.set_state(state)
        self._on_host.restore()

    def is_same(self, other: RandomState) -> bool:
        """Return whether all generators have the same state in both."""
        same = all(map(torch.equal, self._of_torch, other._of_torch))
        return same and self._on_host == other._on_host

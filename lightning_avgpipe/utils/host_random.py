"""The common generators of Python and NumPy, whose states are read and written at every stage's forward."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class HostState:
    """Of both generators; those that are equal give equal numbers.

    Attributes:
        python: as ``random.getstate`` gives it.
        numpy: the memory of the generator; or its pickled state.
        is_memory: which of these.
    """

    python: tuple[Any, ...]
    numpy: bytes
    is_memory: bool


class _HostRandom:
    """Reads and writes both.

    ``np.random.get_state`` and ``set_state`` take 30 us each, longer than a small unit. What a Mersenne Twister knows
    is memory, whose address NumPy tells; beside it, one normal number may be kept for the next call. Only ``get_state``
    tells that, so it is asked unless the memory is what it was when no number was kept: drawing one changes it.
    """

    def __init__(self) -> None:
        self._bare = b""  # what the memory was when no number was kept

    def state(self) -> HostState:
        address = _address()
        if address is not None:
            memory = ctypes.string_at(address, _BYTES)
            if memory == self._bare or not np.random.get_state(legacy=False)["has_gauss"]:  # type: ignore[call-overload]
                self._bare = memory
                return HostState(random.getstate(), memory, True)
        return HostState(random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), False)

    def set_state(self, state: HostState) -> None:
        random.setstate(state.python)
        address = _address()
        if address is not None and state.is_memory:
            np.random.seed(0)  # no number is kept
            ctypes.memmove(address, state.numpy, _BYTES)
            self._bare = state.numpy
        else:
            np.random.set_state(pickle.loads(state.numpy))


_BYTES = 624 * 4 + 4  # of a Mersenne Twister: its key and its position
_random = _HostRandom()


def host_state() -> HostState:
    """What the generators are at now."""
    return _random.state()


def set_host_state(state: HostState) -> None:
    """They go on from there."""
    _random.set_state(state)


def seed_host(seed: int) -> None:
    """They begin a new stream."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _address() -> int | None:
    """Where the memory of NumPy's common generator lies; None if it is of another kind."""
    if not _is_known():
        return None
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else None


@functools.cache
def _is_known() -> bool:
    """Whether this NumPy's Mersenne Twisters lie in memory as is said here."""
    if not hasattr(np.random, "get_bit_generator"):
        return False
    twister = np.random.MT19937(1)
    state: Any = twister.state["state"]
    expected = state["key"].astype(np.uint32).tobytes() + np.int32(state["pos"]).tobytes()
    return ctypes.string_at(twister.ctypes.state_address, _BYTES) == expected

"""The common generators of Python and NumPy, whose states are read and written at every stage's forward.

``getstate`` and ``setstate`` of either take 5 to 30 us, longer than a small unit. What a Mersenne Twister knows is
memory: that of NumPy's lies where NumPy says, that of Python's behind the head of its object. Where it is found there
it is copied, and elsewhere the generators are asked.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

_WORDS = 624  # of a Mersenne Twister's key
_BYTES = _WORDS * 4 + 4  # with its position


@dataclass(frozen=True)
class HostState:
    """Of both generators; those that are equal give equal numbers.

    Attributes:
        python: the memory of the generator, and the normal number that it keeps; or as ``random.getstate`` gives it.
        numpy: the memory of the generator; or its pickled state.
        is_memory: which of these ``numpy`` is.
    """

    python: tuple[Any, ...]
    numpy: bytes
    is_memory: bool


class _HostRandom:
    """Reads and writes both.

    Beside its memory NumPy's keeps one normal number for the next call. Only ``get_state`` tells that, so it is asked
    unless the memory is what it was when no number was kept: drawing one changes it.
    """

    def __init__(self) -> None:
        self._bare = b""  # what NumPy's memory was when no number was kept

    def state(self) -> HostState:
        python, address = _python_state(), _numpy_address()
        if address is not None:
            memory = ctypes.string_at(address, _BYTES)
            if memory == self._bare or not np.random.get_state(legacy=False)["has_gauss"]:  # type: ignore[call-overload]
                self._bare = memory
                return HostState(python, memory, True)
        return HostState(python, pickle.dumps(np.random.get_state(legacy=False)), False)

    def set_state(self, state: HostState) -> None:
        _set_python_state(state.python)
        address = _numpy_address()
        if address is not None and state.is_memory:
            if ctypes.string_at(address, _BYTES) != self._bare:
                np.random.seed(0)  # no number is kept
            ctypes.memmove(address, state.numpy, _BYTES)
            self._bare = state.numpy
        else:
            np.random.set_state(pickle.loads(state.numpy))

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        address = _numpy_address()
        if address is not None:
            self._bare = ctypes.string_at(address, _BYTES)


_random = _HostRandom()


def host_state() -> HostState:
    """What the generators are at now."""
    return _random.state()


def set_host_state(state: HostState) -> None:
    """They go on from there."""
    _random.set_state(state)


def seed_host(seed: int) -> None:
    """They begin a new stream."""
    _random.seed(seed)


_common: Any = random._inst  # type: ignore[attr-defined]  # whose methods are the functions of ``random``


def _python_state() -> tuple[Any, ...]:
    address = _python_address()
    return random.getstate() if address is None else (ctypes.string_at(address, _BYTES), _common.gauss_next)


def _set_python_state(state: tuple[Any, ...]) -> None:
    address = _python_address()
    if address is None:
        random.setstate(state)
    else:
        ctypes.memmove(address, state[0], _BYTES)
        _common.gauss_next = state[1]


@functools.cache
def _python_address() -> int | None:
    """Where the memory of Python's common generator lies; None if this Python keeps it elsewhere."""
    if sys.implementation.name != "cpython":
        return None
    *key, position = random.getstate()[1]
    address = id(_common) + object.__basicsize__
    return address if ctypes.string_at(address, _BYTES) == struct.pack(f"=i{_WORDS}I", position, *key) else None


def _numpy_address() -> int | None:
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

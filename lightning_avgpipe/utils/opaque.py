"""What is in objects that have neither items nor attributes: arrays, and generators of random numbers."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

_LARGEST = 2**26  # bytes of an array that steps may change


def is_opaque(obj: Any) -> bool:
    """Whether it is such an object, and can be changed. A large array, or one that is mapped from a file, is data."""
    if isinstance(obj, np.ndarray):
        return obj.flags.writeable and not isinstance(obj, np.memmap) and obj.nbytes <= _LARGEST
    return is_generator(obj)


def is_generator(obj: Any) -> bool:
    """Whether random numbers are drawn from it."""
    return isinstance(obj, GENERATORS)


def contents(obj: Any) -> Any:
    """A copy of what is in it."""
    if isinstance(obj, np.ndarray):
        return obj.copy()
    if isinstance(obj, torch.Generator):
        return obj.get_state().numpy().tobytes()
    if isinstance(obj, random.Random):
        return obj.getstate()
    if isinstance(obj, np.random.RandomState):
        return pickle.dumps(obj.get_state())
    return pickle.dumps(_bits(obj).state)


def is_same(obj: Any, copy: Any) -> bool:
    """Whether that is in it."""
    if isinstance(obj, np.ndarray):
        return obj.shape == copy.shape and obj.tobytes() == copy.tobytes()
    return bool(contents(obj) == copy)


def put(obj: Any, copy: Any) -> None:
    """Put it back."""
    if isinstance(obj, np.ndarray):
        obj[...] = copy
    elif isinstance(obj, torch.Generator):
        obj.set_state(torch.frombuffer(bytearray(copy), dtype=torch.uint8))
    elif isinstance(obj, random.Random):
        obj.setstate(copy)
    elif isinstance(obj, np.random.RandomState):
        obj.set_state(pickle.loads(copy))
    else:
        _bits(obj).state = pickle.loads(copy)


def _bits(obj: Any) -> Any:
    return obj.bit_generator if isinstance(obj, np.random.Generator) else obj


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

"""What is in objects that have neither items nor attributes: arrays, generators of random numbers, and iterators."""

from __future__ import annotations

import itertools
import pickle
import random
import types
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_LARGEST = 2**26  # bytes of an array that steps may change


def is_opaque(obj: Any) -> bool:
    """Whether it is such an object, and can be changed. A large array, or one that is mapped from a file, is data."""
    if isinstance(obj, np.ndarray):
        return obj.flags.writeable and not isinstance(obj, np.memmap) and obj.nbytes <= _LARGEST
    return is_generator(obj)


def is_generator(obj: Any) -> bool:
    """Whether random numbers are drawn from it."""
    return isinstance(obj, GENERATORS)


def is_iterator(obj: Any) -> bool:
    """Whether items are taken from it one after the other, and nobody can put them back.

    An iterator that is written as a class has attributes, which can.
    """
    cls = type(obj)
    if not hasattr(cls, "__next__"):
        return False
    return cls.__module__ in ("builtins", "itertools") or _num_yielded(obj) is not None


def progress(obj: Any, depth: int = 9) -> Any:
    """How far an iterator has come, as something that can be compared; reading it takes nothing."""
    if isinstance(obj, types.GeneratorType):
        frame = obj.gi_frame
        return None if frame is None else (frame.f_lasti, {k: _told(v, depth) for k, v in frame.f_locals.items()})
    if isinstance(obj, itertools.count):
        return repr(obj)
    if _num_yielded(obj) is not None:
        return _num_yielded(obj)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = obj.__reduce__()
    except TypeError:  # it does not say
        return None
    return _told(parts, depth)


def _told(part: Any, depth: int) -> Any:
    if isinstance(part, (type(None), bool, int, float, str, bytes, range)):
        return part
    if depth and type(part) in (tuple, list):  # some are made to tell, so they are new each time
        return [_told(inner, depth - 1) for inner in part]
    return progress(part, depth - 1) if depth and is_iterator(part) else id(part)


def _num_yielded(obj: Any) -> int | None:
    """Batches that the iterator of a DataLoader has given; None for other objects."""
    found = getattr(obj, "_num_yielded", None) if isinstance(obj, _BaseDataLoaderIter) else None
    return found if isinstance(found, int) else None


def contents(obj: Any) -> Any:
    """A copy of what is in it."""
    if is_iterator(obj):
        return progress(obj)
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

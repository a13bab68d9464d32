"""Contents of objects without items and attributes: arrays, generators of random numbers, and iterators."""

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
    """Return whether an object is a random generator or a writable array that is not large or mapped from a file."""
    if isinstance(obj, np.ndarray):
        return obj.flags.writeable and not isinstance(obj, np.memmap) and obj.nbytes <= _LARGEST
    return is_generator(obj)


def is_generator(obj: Any) -> bool:
    """Return whether an object is a generator of random numbers of torch, NumPy or Python."""
    return isinstance(obj, GENERATORS)


def is_iterator(obj: Any) -> bool:
    """Return whether an object is an iterator whose position cannot be restored.

    An iterator that is written as a class in Python has attributes, which can be restored.
    """
    cls = type(obj)
    if not hasattr(cls, "__next__"):
        return False
    return cls.__module__ in ("builtins", "itertools") or _num_yielded(obj) is not None


def progress(obj: Any, depth: int = 9) -> Any:
    """Return the position of an iterator as an object that can be compared, without advancing the iterator."""
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
    except TypeError:  # the iterator does not tell its position
        return None
    return _told(parts, depth)


def _told(part: Any, depth: int) -> Any:
    if isinstance(part, (type(None), bool, int, float, str, bytes, range)):
        return part
    if depth and type(part) in (tuple, list):  # these may be new objects at each call, so ids cannot be compared
        return [_told(inner, depth - 1) for inner in part]
    return progress(part, depth - 1) if depth and is_iterator(part) else id(part)


def _num_yielded(obj: Any) -> int | None:
    """Return the number of batches that an iterator of a DataLoader has yielded; None for other objects."""
    found = getattr(obj, "_num_yielded", None) if isinstance(obj, _BaseDataLoaderIter) else None
    return found if isinstance(found, int) else None


def contents(obj: Any) -> Any:
    """Return a copy of the contents of an array or random generator, or the position of an iterator."""
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
    """Return whether the contents of an object are equal to a copy of :func:`contents`."""
    if isinstance(obj, np.ndarray):
        return obj.shape == copy.shape and np.array_equal(_words(obj), _words(copy))
    return bool(contents(obj) == copy)


def put(obj: Any, copy: Any) -> None:
    """Restore the contents of an array or random generator from a copy of :func:`contents`."""
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


def _words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of an array as integers: a view, or a copy of an array that is not contiguous or has objects."""
    if type(array) is np.ndarray and array.flags.c_contiguous and not array.dtype.hasobject:
        flat = array.reshape(-1).view(np.uint8)
    else:
        flat = np.frombuffer(array.tobytes(), np.uint8)
    return flat if flat.size % 8 else flat.view(np.uint64)  # eight bytes are compared as fast as one


def _bits(obj: Any) -> Any:
    return obj.bit_generator if isinstance(obj, np.random.Generator) else obj


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

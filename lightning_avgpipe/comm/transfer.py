"""Transfers: tensors move between hosts in parts, so that a slow link can be told from a silent one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_PART_BYTES = 1024**2  # on a link of 10 Mbit/s one passes every second
_PIECE_BYTES = 64 * 1024  # what is smaller is not worth a message of its own


def transfer(begin: Callable[[Tensor], Any], tensor: Tensor, moved: Callable[[], None], pieces: int = 1) -> None:
    """Send or receive, and return when it is done. Both ends use the same parts.

    Args:
        begin: begins with a part; returns what can be waited for. Parts arrive in the order in which they are begun.
        tensor: one-dimensional, on the host.
        moved: called after each part.
        pieces: parts that there are at least, if the tensor is large enough.
    """
    ended(begun(begin, tensor, pieces), moved)


def begun(begin: Callable[[Tensor], Any], tensor: Tensor, pieces: int = 1) -> list[Any]:
    """What :func:`transfer` begins with; arguments as there."""
    size = tensor.element_size()
    length = max(1, min(_PART_BYTES // size, max(_PIECE_BYTES // size, -(-tensor.numel() // pieces))))
    return [begin(part) for part in (tensor.split(length) if tensor.numel() > length else (tensor,))]


def ended(works: Sequence[Any], moved: Callable[[], None]) -> None:
    """Return when a transfer that has begun is done."""
    for work in works:
        if work is not None:  # of a process that takes no part
            work.wait()
        moved()

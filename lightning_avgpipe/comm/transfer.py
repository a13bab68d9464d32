"""Transfers: tensors move between hosts in parts, so that a slow link can be told from a silent one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The timeout of connections. gloo breaks a connection that waits for longer, even if no process needs the transfer yet,
# or if all processes were stopped. So connections have no limit; a process that needs something has one: see Waits.
UNLIMITED = timedelta(days=365)
_PART_BYTES = 1024**2  # on a link of 10 Mbit/s one passes every second
_PIECE_BYTES = 64 * 1024  # a smaller part is not worth a message of its own


def transfer(begin: Callable[[Tensor], Any], tensor: Tensor, moved: Callable[[], None], pieces: int = 1) -> None:
    """Send or receive a tensor in parts, and return when it is done. Both ends use the same parts.

    Args:
        begin: begins the transfer of a part and returns its work. Parts arrive in the order in which they are begun.
        tensor: one-dimensional, on the host.
        moved: called after each part.
        pieces: least number of parts, if the tensor is large enough.
    """
    ended(begun(begin, tensor, pieces), moved)


def begun(begin: Callable[[Tensor], Any], tensor: Tensor, pieces: int = 1) -> list[Any]:
    """Begin the transfers of all parts and return their works; the arguments are those of :func:`transfer`."""
    size = tensor.element_size()
    length = max(1, min(_PART_BYTES // size, max(_PIECE_BYTES // size, -(-tensor.numel() // pieces))))
    return [begin(part) for part in (tensor.split(length) if tensor.numel() > length else (tensor,))]


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error says that a connection to another process, or to the store, broke.

    gloo raises plain RuntimeErrors, as does much else (such as a lack of memory); its messages name a source file of
    gloo.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def ended(works: Sequence[Any], moved: Callable[[], None]) -> None:
    """Wait until the works of a transfer are done, and report each part as moved."""
    for work in works:
        if work is not None:  # None on a process that takes no part
            work.wait(UNLIMITED)
        moved()

"""Alone: code of a step sees no other process, as on one device.

All stages work on the same batch, and each runs a part of the step: a collective in it would wait for processes that do
something else, and what it would sum or gather is what one process has already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["alone"]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within this context ``torch.distributed.is_initialized()`` is False.

    That is what everybody asks first who would gather over processes: losses, ``torchmetrics``, ``SyncBatchNorm``. What
    does not ask is told that there is no process group, as on one device. Our own messages travel in groups that they
    name, also those of other threads meanwhile.
    """
    if not dist.is_initialized():
        yield
        return
    before = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.GroupMember.WORLD = before  # type: ignore[assignment]

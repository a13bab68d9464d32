"""Alone: code of a step sees no other process, as on one device.

All stages work on the same batch, and each runs a part of the step: a collective in it would wait for processes that do
something else, and what it would sum or gather is what one process has already.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_avgpipe.comm.lone_group import LoneGroup
from lightning_avgpipe.errors import StepChangedError


class _Here(threading.local):
    depth = 0


_here = _Here()
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def own_group(group: Any) -> Any:
    """Note that a process group is ours, which may be used at any time; returns it."""
    if isinstance(group, dist.ProcessGroup):
        _own.add(group)
    return group


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within this context ``torch.distributed`` is not initialized, and its functions find one process, of rank 0.

    Everybody asks ``is_initialized()`` first who would gather over processes: losses, ``torchmetrics``,
    ``SyncBatchNorm``. Who does not ask gets a group of this process alone, also from ``new_group``. A group that was
    made before, of several processes, is refused. Our own messages travel in groups that they name, also those of other
    threads meanwhile.
    """
    if not dist.is_initialized() and not _here.depth:
        yield
        return
    before, group = dist.GroupMember.WORLD, _lone_group()
    dist.GroupMember.WORLD = None  # type: ignore[assignment]
    if not _here.depth:
        _patch()
        # as torch does for groups that it makes, until it forgets all of them
        c10d._world.pg_map[group] = ("gloo", dist.HashStore())
        c10d._world.pg_group_ranks[group] = {0: 0}
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        if not _here.depth:
            c10d._world.pg_map.pop(group, None)
            c10d._world.pg_group_ranks.pop(group, None)
        dist.GroupMember.WORLD = before  # type: ignore[assignment]


@functools.cache
def _lone_group() -> LoneGroup:
    return LoneGroup()


@functools.cache
def _patch() -> None:
    """Functions that are imported by name ask these two for the group, and whether this process is in it."""
    default_group, not_in_group = c10d._get_default_group, c10d._rank_not_in_group

    @functools.wraps(default_group)
    def get_default_group() -> Any:
        return _lone_group() if _here.depth else default_group()

    @functools.wraps(not_in_group)
    def rank_not_in_group(group: Any) -> bool:
        if _here.depth and isinstance(group, dist.ProcessGroup) and group.size() > 1 and group not in _own:
            raise StepChangedError(
                f"a step uses a process group of {group.size()} processes, which would wait for each other: all stages "
                "work on the same batch, and each runs a part of the step. A step sees its process alone, and what it "
                "would gather is there: leave the group out, or ask torch.distributed.is_initialized() before"
            )
        return not_in_group(group)

    c10d._get_default_group = get_default_group
    c10d._rank_not_in_group = rank_not_in_group

"""Alone: a context in which the code of a step sees a single process in torch.distributed, as on one device.

All stages work on the same batch, and each runs a part of the step. A collective within the step would wait for
processes that run other parts, although this process already has what the collective would sum or gather.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightning_avgpipe.errors import StepChangedError

Tensors = Sequence[Tensor]


class _Here(threading.local):
    depth = 0  # of contexts of alone()
    in_hook = False


_here = _Here()
_threads: set[int] = set()  # identifiers of the threads that run code of a step now
_NOTHING = contextlib.nullcontext()
_own: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups of this package


def own_group(group: Any) -> Any:
    """Register a process group of this package, which :func:`alone` never refuses, and return the group."""
    if isinstance(group, dist.ProcessGroup):
        _own.add(group)
    return group


def alone() -> contextlib.AbstractContextManager[None]:
    """Make ``torch.distributed`` look uninitialized in this context; its functions find one process, of rank 0.

    Code that gathers over processes asks ``is_initialized()`` first: losses, ``torchmetrics``, ``SyncBatchNorm``. Code
    that does not ask gets a group of this process alone, also from ``new_group``. A group of several processes that was
    made before is refused. This package's own messages travel in groups that are passed explicitly.

    The context holds for the thread that enters it, and for the threads in which autograd runs a backward for that
    thread. Other threads, which may save a checkpoint meanwhile, see all processes.
    """
    return _NOTHING if c10d._world.default_pg is None and not _here.depth else _ALONE


@contextlib.contextmanager
def in_hook() -> Iterator[None]:
    """Let a hook see the true rank, even in the middle of a step, so that it can write on one rank only."""
    before, _here.in_hook = _here.in_hook, True
    try:
        yield
    finally:
        _here.in_hook = before


def hides_rank() -> bool:
    """Return whether this thread runs code of a step, outside of hooks, which must see its group as one process."""
    return is_alone() and not _here.in_hook


class _Alone:
    """The context of :func:`alone` where torch.distributed is initialized."""

    def __enter__(self) -> None:
        if not _here.depth:
            _patch()
            if not _threads:  # register the group as torch does; torch forgets all groups when it is destroyed
                group = _lone_group()
                c10d._world.pg_map[group] = ("gloo", dist.HashStore())
                c10d._world.pg_group_ranks[group] = {0: 0}
            _threads.add(threading.get_ident())
        _here.depth += 1

    def __exit__(self, *error: object) -> None:
        _here.depth -= 1
        if not _here.depth:
            _threads.discard(threading.get_ident())
            if not _threads:
                c10d._world.pg_map.pop(_lone_group(), None)
                c10d._world.pg_group_ranks.pop(_lone_group(), None)


_ALONE = _Alone()


def is_alone() -> bool:
    """Return whether this thread runs code of a step, or a backward of autograd on behalf of such a thread."""
    return bool(_here.depth or (_threads and torch._C._current_graph_task_id() != -1))


@functools.cache
def _lone_group() -> LoneGroup:
    return LoneGroup()


@functools.cache
def _patch() -> None:
    """Replace how torch.distributed looks up its default group, checks membership of a group, and names new groups.

    torch names groups by a count that must agree on all processes. Stages may run the code that makes a group a
    different number of times, so groups that a step makes get names outside of this count.
    """
    members: Any = type(dist.GroupMember)
    world = members.WORLD
    default_group, not_in_group = c10d._get_default_group, c10d._rank_not_in_group
    name: Any = c10d._process_group_name
    numbers = itertools.count()

    def get_world(cls: Any) -> Any:
        return None if is_alone() else world.fget(cls)

    @functools.wraps(default_group)
    def get_default_group() -> Any:
        return _lone_group() if is_alone() else default_group()

    @functools.wraps(not_in_group)
    def rank_not_in_group(group: Any) -> bool:
        if is_alone() and isinstance(group, dist.ProcessGroup) and group.size() > 1 and group not in _own:
            raise StepChangedError(
                f"a step uses a process group of {group.size()} processes, which would wait for each other: all stages "
                "work on the same batch, and each runs a part of the step. A step sees one process only, which already "
                "has what it would gather: leave the group out, or check torch.distributed.is_initialized() first"
            )
        return not_in_group(group)

    @functools.wraps(name)
    def process_group_name(ranks: Any, use_hashed_name: bool) -> Any:
        return f"alone-{next(numbers)}" if is_alone() else name(ranks, use_hashed_name)

    members.WORLD = property(get_world, world.fset)
    c10d._get_default_group = get_default_group
    c10d._rank_not_in_group = rank_not_in_group
    c10d._process_group_name = process_group_name


_Group: Any = dist.ProcessGroup  # its type stubs lack this constructor and the methods that torch's Python code calls


class LoneGroup(_Group):  # type: ignore[misc]
    """A process group that ``torch.distributed`` uses where rank 0 is the only process. It opens no connection.

    A sum or a mean over processes leaves its tensor as it is; a gathered list has one item.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    def getBackendName(self) -> str:
        """Return a name for messages."""
        return "lone"

    def new_group(self, ranks: Any, **options: Any) -> LoneGroup:
        """Return a group of some processes of this group, which can only be this process."""
        return LoneGroup()

    # -- nothing to do ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Done:
        return _Done()

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> _Done:
        return _Done()

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        return None

    # -- the input is the output --------------------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Done:
        return _copied(outputs, inputs)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = alltoall

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Done:
        return _copied([first for first, *_ in outputs], inputs)

    gather = allgather

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Done:
        return _copied(outputs, [first for first, *_ in inputs])

    reduce_scatter = scatter

    def alltoall_base(self, output: Tensor, given: Tensor, *args: Any, opts: Any = None) -> _Done:
        return _copied([output], [given.reshape(output.shape)])

    _allgather_base = _reduce_scatter_base = alltoall_base


class _Done:
    """The work handle of an asynchronous collective that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _copied(outputs: Tensors, inputs: Tensors) -> _Done:
    for output, given in zip(outputs, inputs, strict=True):
        output.copy_(given)
    return _Done()

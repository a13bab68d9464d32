"""The attempt: which of the processes that a store has seen are those of this start.

torchrun keeps its store when it starts processes again, with all that those before them wrote. Neither its count of
restarts tells them apart, since a node that has joined late counts from zero.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_PREFIX = "avgpipe/attempt"
_POLL_S = 0.05


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that only the processes have which call this now, all of them.

    ::

        rank r   hello/r = token                  token's welcome -> session     here/session/r
        rank 0            token -> welcome = session                    ... until all are here

    Rank 0 may read what a process before this one wrote as rank r; then it welcomes one that is gone, and reads again.

    Raises:
        RuntimeError: not all have come within the timeout; says which.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"{_PREFIX}/hello/{rank}", token)
        welcome = f"{_PREFIX}/welcome/{token}"
        store.wait([welcome], timeout)
        session = store.get(welcome).decode()
        store.set(f"{_PREFIX}/{session}/here/{rank}", "1")
    else:
        session = uuid.uuid4().hex
        _welcome(store, session, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
    return dist.PrefixStore(f"{_PREFIX}/{session}", store)


def _welcome(store: dist.Store, session: str, missing: set[int], deadline: float) -> None:
    while True:
        for rank in sorted(missing):
            if store.check([f"{_PREFIX}/{session}/here/{rank}"]):
                missing.remove(rank)
            elif store.check([hello := f"{_PREFIX}/hello/{rank}"]):
                store.set(f"{_PREFIX}/welcome/{store.get(hello).decode()}", session)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come in time")
        time.sleep(_POLL_S)

"""Separation of the current start of the processes from earlier starts that used the same store.

torchrun keeps its store, with everything that earlier processes wrote, when it restarts processes. Its count of
restarts does not distinguish starts, since a node that joined late counts from zero.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_PREFIX = "avgpipe/attempt"
_POLL_S = 0.05


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a part of a store that is used only by the processes that call this function now.

    ::

        rank r   hello/r = token                  token's welcome -> session     here/session/r
        rank 0            token -> welcome = session                    ... until all are here

    Rank 0 may read a token that an earlier process wrote as rank r. Then it welcomes a process that is gone, and reads
    again until the current one has answered.

    Args:
        store: store that all processes share.
        rank: rank of this process.
        world_size: number of processes that call this function.
        timeout: largest time to wait for all processes.
    Raises:
        DistStoreError: not all processes have called within the timeout. The message says which are missing.
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
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come in time")
        time.sleep(_POLL_S)

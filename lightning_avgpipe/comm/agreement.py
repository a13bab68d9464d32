"""Agreement: a check that every process asks for the same operation before any of them starts it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.waits import RunningTime
from lightning_avgpipe.errors import ConfigurationError

_POLL_S = 0.005


class Agreement:
    """A comparison of what the processes ask for.

    Requests are compared through the store and not by a collective: a process whose peers ask for nothing must not
    disturb the collectives that they run.

    Args:
        rank: rank of this process.
        names: names of all processes, by rank.
        store: store that all processes share; None if there is only one process.
        timeout_s: longest wait, in seconds. It is shorter than that of other waits, whose errors say less about the
            reason.
        monitor: monitor that knows whether a process has failed.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: dist.Store | None,
        timeout_s: float,
        monitor: Monitor,
    ) -> None:
        self._rank = rank
        self._names = names
        self._store = store
        self._timeout_s = timeout_s
        self._monitor = monitor
        self._count = 0

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all processes ask for the same operation.

        Args:
            asked: name of the operation, which is compared and quoted in messages.
            where: for messages: where to call the operation so that all processes do.
        Raises:
            ConfigurationError: some processes do not ask within the timeout, or ask for something else.
            PeerError: a process has failed.
        """
        if self._store is None:
            return
        self._count += 1
        store, prefix = self._store, f"asked/{self._count}"
        store.set(f"{prefix}/{self._rank}", asked)
        missing = [rank for rank in range(len(self._names)) if rank != self._rank]
        waited = RunningTime()
        while missing and waited.seconds() < self._timeout_s:
            self._monitor.check()
            missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
            if missing:
                time.sleep(_POLL_S)
        if missing:
            silent = " and ".join(self._names[rank] for rank in missing)
            raise ConfigurationError(
                f"{asked} was called on {self._names[self._rank]}, but not on {silent} within {self._timeout_s:g} s; "
                f"every rank must call it: {where}"
            )
        for rank, name in enumerate(self._names):
            other = store.get(f"{prefix}/{rank}").decode()
            if other != asked:
                raise ConfigurationError(
                    f"{asked} was called on {self._names[self._rank]}, but {other} on {name}; every rank must ask for "
                    "the same"
                )

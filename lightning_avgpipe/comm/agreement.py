"""Agreement: what every process must have asked for before any of them acts on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.errors import ConfigurationError

_POLL_S = 0.005


class Agreement:
    """Compares what the processes ask for.

    It goes through the store: a process whose peers do not ask must not disturb what they do together.

    Args:
        rank: of this process.
        names: of all processes, by rank.
        store: shared by all of them; None if there is only one.
        timeout_s: longest wait, in seconds: shorter than that of other waits, which say less about the reason.
        monitor: knows whether a process has failed.
        ranks: of those that take part now.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: dist.Store | None,
        timeout_s: float,
        monitor: Monitor,
        ranks: Callable[[], Sequence[int]],
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._names = names
        self._store = store
        self._timeout_s = timeout_s
        self._monitor = monitor
        self._count = 0

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all processes ask for the same.

        Args:
            asked: for messages, and to compare.
            where: it must be asked for, so that all do.
        Raises:
            ConfigurationError: some do not ask within the timeout, or for something else.
            PeerError: a process has failed.
        """
        if self._store is None:
            return
        self._count += 1
        store, prefix = self._store, f"asked/{self._count}"
        store.set(f"{prefix}/{self._rank}", asked)
        missing = [rank for rank in self._ranks() if rank != self._rank]
        deadline = time.monotonic() + self._timeout_s
        while missing and time.monotonic() < deadline:
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
        for rank in self._ranks():
            name = self._names[rank]
            other = store.get(f"{prefix}/{rank}").decode()
            if other != asked:
                raise ConfigurationError(
                    f"{asked} was called on {self._names[self._rank]}, but {other} on {name}; every rank must ask for "
                    "the same"
                )

"""Memory of this process, in MiB, watched while it runs."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["MIB", "Resident"]

MIB = 2**20
_EVERY_S = 0.002


class Resident:
    """Memory of this process that belongs to no file, in MiB: now, and the largest since the start."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._peak = 0.0
        self._base = self._read()
        self._thread = threading.Thread(target=self._watch, name="resident memory", daemon=True)
        self._thread.start()

    @staticmethod
    def _read() -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")

    def _watch(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self._peak = max(self._peak, self._read())

    def now(self) -> float:
        """MiB above the start."""
        value = self._read()
        self._peak = max(self._peak, value)
        return value - self._base

    def peak(self) -> float:
        """Largest MiB above the start; ends the watch."""
        self._stopped.set()
        self._thread.join()
        self.now()
        return self._peak - self._base

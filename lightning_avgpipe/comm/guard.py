"""The guard: a thread that never blocks, and ends a process that does not end by itself after a failure."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable

from lightning_avgpipe.comm.activity import ThreadActivity

_POLL_S = 0.2
_LISTEN_S = 5.0, 30.0  # shortest and longest time that the main thread gets to end after a failure
_JOIN_S = 2.0
_LAPSE_S = 5.0  # a process in which no thread runs for longer was stopped, rather than slow


class Guard:
    """A thread that watches over this process.

    Args:
        activity: activity of the main thread.
        timeout_s: time, in seconds, that this process may take to end after a failure; at least 5 s and at most 30 s.
        look: called again and again by the thread; must not block.
    """

    def __init__(self, activity: ThreadActivity, timeout_s: float, look: Callable[[], None]) -> None:
        self._activity = activity
        self._listen_s = sorted((timeout_s, *_LISTEN_S))[1]
        self._look = look
        self._failure = ""
        self._deadline = math.inf
        self._ran = time.monotonic()
        self._lapse_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="avgpipe watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def limit(self, failure: str) -> None:
        """Note a failure. From this call on, the main thread has a limited time to notice it and to end."""
        self._failure, self._deadline = failure, time.monotonic() + self._listen_s

    def lapse(self) -> str:
        """Return a sentence for messages if this process did not run for a long time; else an empty string."""
        lapse_s = max(self._lapse_s, time.monotonic() - self._ran) if self._thread.is_alive() else 0.0
        if lapse_s < _LAPSE_S:
            return ""
        return (
            f". No thread of {self._activity.name} itself ran for {lapse_s:.1f} s (it was stopped, or a call held the "
            "interpreter), so others may have given it up"
        )

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            self._lapse_s, self._ran = max(self._lapse_s, now - self._ran - _POLL_S), now
            self._look()
            if now > self._deadline and not self._closed.is_set():
                self._end_process()

    def _end_process(self) -> None:
        """End the process: the main thread does not react, cannot be interrupted, and does nothing useful any more."""
        try:
            sys.stderr.write(
                f"\n{self._activity.name}: the run failed {self._listen_s:.0f} s ago, and this process has not ended "
                f"since, so it is ended now. It {self._activity.described()}. The failure: {self._failure}\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)

"""Rounds: a thread that exchanges data with the store of all processes in rounds, however long the store takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_avgpipe.comm.transfer import is_broken_connection
from lightning_avgpipe.errors import described

_LOCAL_S = 2.0  # longest wait of another thread for this one
_SILENT_S = 3.0  # a store that takes longer counts as silent


class Rounds:
    """A thread that talks to the store in rounds, and the waits of other threads for it.

    Args:
        name: name of this process, for messages.
        keeper: name of the process that keeps the store.
        talk: does one round; returns the seconds until the next one.
        lost: called with the reason when there will be no further round.
    """

    def __init__(self, name: str, keeper: str, talk: Callable[[], float], lost: Callable[[str], None]) -> None:
        self._name = name
        self._keeper = keeper
        self._talk = talk
        self._lost = lost
        self._count = 0
        self._began: float | None = None  # start of the current round; None between rounds
        self._goes_on = True
        # wakes the main thread or this one, whichever waits for the other
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="avgpipe board", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Start no further round. The thread ends when the store answers; a silent store is not waited for."""
        self._goes_on = False
        self.wake()
        if self._thread.is_alive() and not self._is_silent():
            self._thread.join(_LOCAL_S)

    def wake(self) -> None:
        """Wake the waiting threads, which check their conditions again; a pause between rounds ends."""
        with self._changed:
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool], limit_s: float = _LOCAL_S) -> None:
        """Interrupt the pause, and wait until a condition holds, unless the store is gone or silent.

        Args:
            condition: checked after each round.
            limit_s: longest wait, in seconds.
        """
        if not self._thread.is_alive():
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: condition() or not self._goes_on or self._is_silent(), limit_s)

    def look(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition as :meth:`until`, but no longer than for the next whole round."""
        rounds = self._count + 2  # the current round may have looked already
        self.until(lambda: self._count >= rounds or condition())

    def silence(self) -> str:
        """Return a sentence for messages if the store does not answer; else an empty string."""
        if not self._is_silent():
            return ""
        return (
            f". {self._keeper}, which keeps the store of all processes, has not answered for {self._silent_s():.1f} s: "
            "it is stopped, or cannot be reached"
        )

    def _silent_s(self) -> float:
        """Return for how many seconds the current round has been waiting for the store."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _is_silent(self) -> bool:
        return self._silent_s() > _SILENT_S

    def _run(self) -> None:
        while self._goes_on:
            self._began, pause_s = time.monotonic(), 0.0
            try:
                pause_s = self._talk()
            except Exception as error:  # without this thread no later failure would be noticed
                if is_broken_connection(error):
                    self._lose(f"{self._keeper} is gone, and with it the store that the processes share ({error})")
                else:
                    self._lose(f"the monitor of {self._name} failed: {described(error)}")
            self._began = None
            with self._changed:
                self._count += 1
                self._changed.notify_all()
                if self._goes_on:
                    self._changed.wait(pause_s)

    def _lose(self, failure: str) -> None:
        self._goes_on = False
        self._lost(failure)

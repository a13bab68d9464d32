"""Rounds: a thread that talks to the store of all processes, again and again, and waits for it as long as it takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_avgpipe.errors import described

_LOCAL_S = 2.0  # longest wait for the thread
_SILENT_S = 3.0  # a store that takes longer does not answer


class Rounds:
    """The thread, and how others wait for it.

    Args:
        name: of this process, for messages.
        keeper: of the store: the name of its process.
        talk: a round; returns the seconds until the next one.
        lost: told why there will be no further round.
    """

    def __init__(self, name: str, keeper: str, talk: Callable[[], float], lost: Callable[[str], None]) -> None:
        self._name = name
        self._keeper = keeper
        self._talk = talk
        self._lost = lost
        self._asked: deque[Callable[[], object]] = deque()
        self._count = 0
        self._began: float | None = None  # the round that goes on
        self._goes_on = True
        # wakes whichever of main thread and this one waits for the other
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="avgpipe board", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """No further round. The thread ends when the store answers, which nobody waits for."""
        self._goes_on = False
        self.wake()
        if self._thread.is_alive() and not self._is_silent():
            self._thread.join(_LOCAL_S)

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def ask(self, question: Callable[[], object]) -> None:
        """Have the thread call something before its next round."""
        self._asked.append(question)

    def until(self, condition: Callable[[], bool], limit_s: float = _LOCAL_S) -> None:
        """Interrupt the pause, and wait for a condition, unless the store is gone or silent.

        Args:
            condition: asked after each round.
            limit_s: longest wait.
        """
        if not self._thread.is_alive():
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: condition() or not self._goes_on or self._is_silent(), limit_s)

    def look(self, condition: Callable[[], bool]) -> None:
        """The same for a condition that no round may make true: the next whole one decides."""
        rounds = self._count + 2  # the one that goes on now may have looked already
        self.until(lambda: self._count >= rounds or condition())

    def silence(self) -> str:
        """For messages: that the store does not answer; or empty."""
        if not self._is_silent():
            return ""
        return (
            f". {self._keeper}, which keeps the store of all processes, has not answered for {self._silent_s():.1f} s: "
            "it is stopped, or cannot be reached"
        )

    def _silent_s(self) -> float:
        """For how long the store has been asked in vain."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _is_silent(self) -> bool:
        return self._silent_s() > _SILENT_S

    def _run(self) -> None:
        while self._goes_on:
            self._began, pause_s = time.monotonic(), 0.0
            try:
                while self._asked:
                    self._asked.popleft()()
                pause_s = self._talk()
            except RuntimeError as error:
                self._lose(f"{self._keeper} is gone, and with it the store that the processes share ({error})")
            except Exception as error:  # nobody would notice a failure from here on
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

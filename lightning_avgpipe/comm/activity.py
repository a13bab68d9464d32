"""Activity: what the main thread of a process is doing, for messages."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from lightning_avgpipe.utils.packages import LIGHTNING

_LINES = 3  # of user code, to say where a process is
_LIBRARIES = {"torch", *LIGHTNING, "lightning_avgpipe", "threading"}


class Activity:
    """What the thread that makes it is doing.

    Args:
        names: of all processes, by rank, as they are when asked for.
        rank: of this process.

    Attributes:
        names: as given.
        rank: as given.
        text: as ``waits for the input of F0``; or empty.
    """

    def __init__(self, names: list[str], rank: int) -> None:
        self.names = names
        self.rank = rank
        self.text = ""
        self._thread = threading.get_ident()

    @property
    def name(self) -> str:
        """Of this process."""
        return self.names[self.rank]

    @contextlib.contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Within this context the thread does this; and still does, for messages, when it fails."""
        before, self.text = self.text, text
        yield
        self.text = before

    def clause(self) -> str:
        """For a sentence that has named the process: as ``, which waits for the input of F0``; or empty."""
        return f", which {self.text}" if self.text else ""

    def described(self) -> str:
        """With the innermost lines of user code that the thread is in; any thread may ask."""
        frame = sys._current_frames().get(self._thread)
        lines: list[str] = []
        while frame is not None and len(lines) < _LINES:
            if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
                code = frame.f_code
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return f"{self.text or 'is not in a step'} (at {', called at '.join(lines)})"

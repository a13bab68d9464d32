"""Activity: a text for error messages that says what the main thread of a process is doing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from lightning_avgpipe.utils.lightning import LIGHTNING

_LINES = 3  # of user code that a description shows
_LIBRARIES = {"torch", *LIGHTNING, "lightning_avgpipe", "threading"}


class ThreadActivity:
    """A record of what one thread is doing: the thread that creates the instance.

    Args:
        names: names of all processes, by rank; a later change of the list counts.
        rank: rank of this process.

    Attributes:
        names: as given.
        rank: as given.
        text: what the thread does, such as ``waits for the input of F0``; empty outside of :meth:`during`.
    """

    def __init__(self, names: list[str], rank: int) -> None:
        self.names = names
        self.rank = rank
        self.text = ""
        self._thread = threading.get_ident()

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.rank]

    @contextlib.contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Set the text within this context. An error leaves the text as it is, so that messages can quote it."""
        before, self.text = self.text, text
        yield
        self.text = before

    def clause(self) -> str:
        """Return a relative clause for messages, such as ``, which waits for the input of F0``, or an empty string."""
        return f", which {self.text}" if self.text else ""

    def described(self) -> str:
        """Return the text and the innermost lines of user code that the thread is in. Any thread may call it."""
        frame = sys._current_frames().get(self._thread)
        lines: list[str] = []
        while frame is not None and len(lines) < _LINES:
            if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
                code = frame.f_code
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return f"{self.text or 'is not in a step'} (at {', called at '.join(lines)})"

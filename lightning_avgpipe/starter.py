"""The starter: the process that started this one, by running the script again as the launcher of ddp does, or a copy.

Before the processes are connected nobody but the starter could end this one: if it is killed by then, this one would
wait for it until the timeout. Later the watch over the processes notices.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_avgpipe.errors import PeerError

__all__ = ["ScriptLauncher", "needing_starter"]

_POLL_S = 0.5
_VARIABLE = "AVGPIPE_STARTER"
# read once and removed, so that what this process starts does not take it for its own
_SCRIPT_STARTER = os.environ.pop(_VARIABLE, "")


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each other process of this node, and tells it who started it."""

    def _call_children_scripts(self) -> None:
        os.environ[_VARIABLE] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_VARIABLE]


@contextlib.contextmanager
def needing_starter(name: str) -> Iterator[None]:
    """Within this context this process ends when its starter does, whatever it waits for.

    Args:
        name: of this process, for messages.

    Raises:
        PeerError: the starter is gone already.
    """
    starter = _starter()
    if starter is None:
        yield
        return
    gone = (
        f"{name} was started by process {starter}, which ended or was killed before the processes were connected, so "
        "this one ends too"
    )
    if os.getppid() != starter:
        raise PeerError(gone)
    connected = threading.Event()

    def look() -> None:
        while not connected.wait(_POLL_S):
            if os.getppid() != starter:
                # the main thread is inside of a call that waits, and that nobody can interrupt
                sys.stderr.write(f"\n{gone}\n")
                sys.stderr.flush()
                os._exit(1)

    thread = threading.Thread(target=look, name="avgpipe starter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        connected.set()
        thread.join()


def _starter() -> int | None:
    """The number of the process whose child this one was when it began; None if it was started in another way."""
    if os.name != "posix":  # elsewhere a process keeps its parent's number when the parent is gone
        return None
    parent = multiprocessing.parent_process()
    if parent is not None and getattr(multiprocessing.current_process(), "_start_method", "") in ("spawn", "fork"):
        return parent.pid
    return int(_SCRIPT_STARTER) if _SCRIPT_STARTER.isdecimal() else None

"""Commands for a test, run as a user runs them: whatever they start is gone at the end, or the test fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LIMIT_S = 100.0
ENDING_S = 5.0  # a process that has done its work may still be about to end

Command = tuple[Sequence[object], Mapping[str, str]]  # Python's arguments, and what is added to the environment


@contextmanager
def started(*commands: Command, folder: Path | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Python with arguments, several times at once; killed with all that it has started when the test fails."""
    inherited = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)], cwd=folder, env={**os.environ, **inherited, **environment},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        for arguments, environment in commands
    ]  # fmt: skip
    sessions = {process.pid for process in running}
    try:
        yield running
        others = [pid for pid in psutil.pids() if _session(pid) in sessions and pid not in sessions]
        _, left = psutil.wait_procs([psutil.Process(pid) for pid in others if psutil.pid_exists(pid)], timeout=ENDING_S)
        left = [process for process in left if _session(process.pid) is not None]
        assert not left, f"processes left behind: {left}"
    finally:
        for pid in psutil.pids():
            if _session(pid) in sessions:
                os.kill(pid, signal.SIGKILL)
        for process in running:
            process.communicate(timeout=ENDING_S)


def run(folder: Path, *arguments: object, **environment: str) -> str:
    """Run Python with arguments in a folder; returns what was printed."""
    with started((arguments, environment), folder=folder) as (process,):
        printed, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
    return printed + errors


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None

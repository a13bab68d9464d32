"""The keeper: a process that has nothing but the store through which the others find each other.

So any of those may die. It is started by rank 0, and ends when all of them that run on its machine have ended. Signals
to a whole job are not for it: the others need the store to agree what to do.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import torch.distributed as dist

_PREFIX = "avgpipe/keeper"
_READY = "ready"
_POLL_S = 0.5
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_TOKEN = uuid.uuid4().hex  # where a container starts again, host and number of the process may be the same
_entered: list[int] = []  # ranks of this process: trainers that come later use the same store
# this file alone: the package would bring Lightning, which takes seconds
_CODE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


def start(port: int, world_size: int, limit_s: float) -> subprocess.Popen[str]:
    """Start a keeper, whose store is there when this returns.

    Args:
        port: of the store.
        world_size: number of processes that will use it.
        limit_s: longest wait.
    Raises:
        RuntimeError: it is not there in time, or has ended.
    """
    command = [sys.executable, "-c", _CODE, __file__, str(port), str(world_size)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    late = threading.Timer(limit_s, process.kill)
    late.start()
    try:
        with process.stdout as said:
            if said.readline().strip() == _READY:
                return process
    finally:
        late.cancel()
    process.kill()
    process.wait()
    raise RuntimeError(
        f"the process that is to keep the store at port {port} ended, or was not ready in {limit_s:g} s. If the port "
        "is taken, another run has it, maybe one that goes on without group 0, which cannot come back"
    )


def enter(store: dist.Store, rank: int) -> str | None:
    """From now on this process uses the store of a keeper, which stays until it ends.

    ::

        avgpipe/keeper/<rank>/<attempt>  ->  <number of the process> <host> <token>

    Returns:
        Who came as this rank last before this process, and may have died: this process is another one. None: nobody.
    """
    this, before, attempt = f"{os.getpid()} {platform.node()} {_TOKEN}", "", 0
    while (found := store.compare_set(_entry(rank, attempt), "", this).decode()) != this:
        before, attempt = found, attempt + 1
    _entered.append(rank)
    return "process {} on {}".format(*before.split(" ")) if before else None


def name() -> str | None:
    """Of the keeper whose store this process uses, for messages; None if it uses none."""
    return "the keeper" if _entered else None


def serve(port: int, world_size: int) -> None:
    """Keep a store, until the process that has started this one and all that have entered here have ended."""
    for name in _SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    starter, living, attempts = os.getppid(), set[int](), dict.fromkeys(range(world_size), 0)
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    while os.getppid() == starter or living:
        time.sleep(_POLL_S)
        for rank in attempts:  # first: who comes when the last one ends is not left without the store
            while store.check([entry := _entry(rank, attempts[rank])]):
                process, host, _ = store.get(entry).decode().split(" ")
                attempts[rank] += 1
                if host == platform.node():
                    living.add(int(process))
        living = set(filter(_runs, living))


def _entry(rank: int, attempt: int) -> str:
    return f"{_PREFIX}/{rank}/{attempt}"


def _runs(process: int) -> bool:
    """Whether a process of this machine runs."""
    if Path("/proc/self/stat").exists():  # where it can be told from one that has ended, and for which nobody waits
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state not in ("Z", "X")
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


if __name__ == "__main__":
    serve(*map(int, sys.argv[-2:]))

"""One process per rank for a benchmark, on free or on rate-limited links."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import network

__all__ = ["launch"]


def launch(script: str, arguments: Sequence[str], world_size: int, megabits: int | None, limit_s: float) -> Any:
    """Run a script once per rank; ends with all of them.

    Args:
        script: path of the script; rank 0 writes its result, as JSON, to the path that follows ``--result``.
        arguments: for every rank.
        world_size: number of ranks.
        megabits: rate of each link per second, between network namespaces; None: loopback.
        limit_s: longest time in seconds.
    Raises:
        SystemExit: a rank failed.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    with tempfile.TemporaryDirectory() as folder, _ranks(world_size, megabits) as (before, environments):
        result = Path(folder) / "result.json"
        command = [sys.executable, script, *arguments, "--result", str(result)]
        processes = [
            subprocess.Popen([*prefix, *command], env=environment)
            for prefix, environment in zip(before, environments, strict=True)
        ]
        try:
            codes = [process.wait(timeout=limit_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"{Path(script).name}: the {world_size} processes ended with {codes}")
        return json.loads(result.read_text())


@contextlib.contextmanager
def _ranks(world_size: int, megabits: int | None) -> Iterator[tuple[list[list[str]], list[dict[str, str]]]]:
    """For each rank what to put before its command, and its environment."""
    base = {**os.environ, "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    if megabits is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        yield [[]] * world_size, [{**base, **local, "RANK": str(rank)} for rank in range(world_size)]
        return
    with network.namespaces(world_size, megabits) as spaces:
        shared = {"MASTER_ADDR": spaces.master, "MASTER_PORT": "29511"}
        apart = [
            {**base, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": spaces.interface(rank)}
            for rank in range(world_size)
        ]
        yield [spaces.command(rank) for rank in range(world_size)], apart

"""One process per rank for a benchmark, on free or on rate-limited links: the parent launches, the ranks connect."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import network
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.schedule.kinds import Placement

__all__ = ["TIMEOUT", "add_options", "begin", "connected", "free_port", "launch"]

TIMEOUT = timedelta(minutes=3)


def add_options(parser: argparse.ArgumentParser, limit_s: float, each: str) -> None:
    """Options of every script that :func:`launch` runs.

    Args:
        limit_s: longest time of the processes, by default.
        each: for what this is.
    """
    parser.add_argument("--limit-s", type=float, default=limit_s, help=f"for each {each}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def launch(
    script: str, arguments: Sequence[str], world_size: int, megabits: network.Megabits | None, limit_s: float
) -> Any:
    """Run a script once per rank; ends with all of them.

    Args:
        script: path of the script; rank 0 writes its result, as JSON, to the path that follows ``--result``.
        arguments: for every rank.
        world_size: number of ranks.
        megabits: rate of each link per second, or of each two, between network namespaces; None: loopback.
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
def connected(
    network: type[ProcessGroups] = ProcessGroups, each: int = 1, placement: Placement = "loop"
) -> Iterator[Cluster]:
    """In a rank: an open cluster of all ranks with so many stages on each, which is closed when all are done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world_size = dist.get_world_size()
    rank, device = dist.get_rank(), torch.device("cpu")
    stage_map = StageMap.on(DeviceLayout(world_size), each * world_size, placement=placement)
    cluster = Cluster(stage_map, Process(rank, device, TIMEOUT.total_seconds(), network(rank, device, TIMEOUT)))
    cluster.open()
    yield cluster
    cluster.group.barrier()
    cluster.close()
    dist.destroy_process_group()


def begin() -> tuple[int, int]:
    """In a rank: be what torchrun would have started, quiet and with one thread; gives the rank and how many."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"}
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return int(rank), int(size)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _ranks(
    world_size: int, megabits: network.Megabits | None
) -> Iterator[tuple[list[list[str]], list[dict[str, str]]]]:
    """For each rank what to put before its command, and its environment."""
    base = {**os.environ, "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    if megabits is None:
        local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        yield [[]] * world_size, [{**base, **local, "RANK": str(rank)} for rank in range(world_size)]
        return
    with network.namespaces(world_size, megabits) as spaces:
        shared = {"MASTER_ADDR": spaces.master, "MASTER_PORT": "29511"}
        apart = [
            {**base, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": spaces.interface(rank)}
            for rank in range(world_size)
        ]
        yield [spaces.command(rank) for rank in range(world_size)], apart

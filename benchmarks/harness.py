"""What all benchmarks share: a process per rank, on free or rate-limited links; rounds, recordings and memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import network
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.probe import offset_in
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.engine.recording import Recorder, assemble
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.plan import Plan
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.schedule import Timeline
from lightning_avgpipe.schedule.kinds import Placement

if TYPE_CHECKING:
    import lightning as L

TIMEOUT = timedelta(minutes=3)
MIB = 2**20
_EVERY_S = 0.002  # between two looks at the memory

Side = TypeVar("Side")


def add_options(parser: argparse.ArgumentParser, limit_s: float, each: str) -> None:
    """Options of every script that :func:`launch` runs.

    Args:
        limit_s: longest time of the processes, by default.
        each: for what this is.
    """
    parser.add_argument("--limit-s", type=float, default=limit_s, help=f"for each {each}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def write(options: argparse.Namespace, found: Any) -> None:
    """Write what was found to the file of ``--json``, if there is one."""
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


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


def spawned(work: Callable[..., Any], arguments: Sequence[Sequence[Any]], limit_s: float = 500.0) -> list[Any]:
    """Run a function in a spawned process for each entry of arguments, and return the results.

    The processes are ranks of one run if there are several.

    Raises:
        SystemExit: a process failed.
    """
    context, port, pipes, processes = multiprocessing.get_context("spawn"), free_port(), [], []
    for rank, given in enumerate(arguments):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_spawned, args=(work, rank, len(arguments), port, given, sender))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        if not all(pipe.poll(limit_s) for pipe in pipes):
            raise SystemExit(f"{work.__name__} took more than {limit_s:g} s")
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit(f"{work.__name__} failed in a process") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spawned(work: Callable[..., Any], rank: int, size: int, port: int, given: Sequence[Any], sender: Any) -> None:
    if size > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0",
            "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
    torch.set_num_threads(1)
    sender.send(work(*given))
    os._exit(0)


def quiet_trainer(**options: Any) -> L.Trainer:
    """Make a Trainer on CPUs for one epoch that only trains: without logger, checkpoints and texts."""
    import lightning as L

    quiet: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    return L.Trainer(**quiet | {"enable_progress_bar": False, "enable_model_summary": False} | options)


def loaded(
    cluster: Cluster, model: nn.Module, points: Sequence[str], args: tuple[Any, ...], relays: Sequence[int] = ()
) -> tuple[Pipeline, Plan]:
    """Return the pipeline of a model that is divided at these points, and its plan.

    Args:
        cluster: open cluster.
        model: the same model on every rank.
        points: units at which stages begin, except the first.
        args: arguments of its ``training_step`` for one micro-batch.
        relays: stages that relay what they receive.
    """
    step: Any = model.training_step
    plan = Planner(Divisible(model), len(points) + 1, list(points)).plan(Step("training_step", step, args))
    pipeline = Pipeline(cluster, model)
    pipeline.load(plan.graph, plan.cuts, relays=list(relays))
    return pipeline, plan


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """All sides in each round, another one first every time: what disturbs the machine disturbs all sides alike."""
    for i in range(rounds):
        first = i % len(sides)
        yield from (*sides[first:], *sides[:first])


def record(cluster: Cluster, observers: Observers, iterate: Callable[[], object]) -> Timeline | None:
    """One iteration that these see; on rank 0 what happened in it. Every rank calls it."""
    recorder = Recorder(cluster.rank, cluster.device)
    cluster.group.barrier()
    with observers.having(recorder):
        iterate()
    return timeline_of(cluster, recorder)


def timeline_of(cluster: Cluster, recorder: Recorder) -> Timeline | None:
    """What all ranks recorded, on rank 0. Every rank calls it."""
    recordings = cluster.group.gather_objects(recorder.finish(offset_in(cluster.group), cluster.waits.timeout_s))
    stages = range(cluster.stage_map.num_stages)
    return None if cluster.rank else assemble(recordings, [cluster.stage_map.ranks(k) for k in stages])


class Resident:
    """Memory of this process that belongs to no file, in MiB: now, and the largest since the start."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._peak = 0.0
        self._base = self._read()
        self._thread = threading.Thread(target=self._watch, name="resident memory", daemon=True)
        self._thread.start()

    @staticmethod
    def _read() -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")

    def _watch(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self._peak = max(self._peak, self._read())

    def now(self) -> float:
        """MiB above the start."""
        value = self._read()
        self._peak = max(self._peak, value)
        return value - self._base

    def peak(self) -> float:
        """Largest MiB above the start; ends the watch."""
        self._stopped.set()
        self._thread.join()
        self.now()
        return self._peak - self._base

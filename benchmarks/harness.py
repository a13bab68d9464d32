"""What all benchmarks share: a process per rank, on free or rate-limited links; rounds, recordings and memory."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks import network
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.probe import offset_in
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.engine.recording import Recorder, assemble
from lightning_avgpipe.schedule import Timeline
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.utils.lightning import find_free_network_port, pl

TIMEOUT = timedelta(minutes=3)
MIB = 2**20
_EVERY_S = 0.002  # between two looks at the memory

Side = TypeVar("Side")


def parser(description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser with what all scripts take; the help shows the docstring of the script.

    Args:
        description: docstring of the script.
        quick: what a quick run measures; "": there is none.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="file for the results")
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def write(options: argparse.Namespace, found: Any) -> None:
    """Write what was found to the file of ``--json``, if there is one."""
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]], columns: int, label: str, path: Path,
    colour_of: Callable[[str], str] = lambda name: "#2f6fb2",
) -> None:  # fmt: skip
    """Draw bars of medians with a point for each value, and a line at 1.

    Args:
        panels: title of a panel -> name of a bar -> its values.
        columns: number of panels in a row.
        label: what the values are.
        path: file of the picture.
        colour_of: function that returns the colour of a bar, given its name.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for axis, (title, bars) in zip(grid, panels.items(), strict=False):
        for y, (name, values) in enumerate(bars.items()):
            axis.barh(y, statistics.median(values), color=colour_of(name), height=0.7)
            axis.plot(values, [y] * len(values), "k.", markersize=4)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(bars)), bars, fontsize=7)
        axis.invert_yaxis()
    figure.supxlabel(label, fontsize=9)
    figure.savefig(path, dpi=110)


def launch(
    function: Callable[..., Any], arguments: Sequence[Any] = (), world_size: int = 1,
    megabits: network.Megabits | None = None, limit_s: float = 900.0,
) -> list[Any]:  # fmt: skip
    """Call a function in a process for each rank, with ``rank.py``, and return the results by rank.

    The function, its arguments and its results are pickled.

    Args:
        function: a function of a module, or of the script that runs.
        arguments: the same for every rank.
        world_size: number of ranks.
        megabits: rate of each link per second, or of each two, between network namespaces; None: loopback.
        limit_s: longest time in seconds.
    Raises:
        SystemExit: a rank failed, or nobody may limit links here.
    """
    if megabits is not None and not network.available():
        raise SystemExit("links of a limited rate are network namespaces, which need root, ip and tc")
    script = getattr(sys.modules["__main__"], "__file__", None) if function.__module__ == "__main__" else None
    ranks = _ranks(world_size, megabits)
    with _exiting_at_sigterm(), tempfile.TemporaryDirectory() as folder, ranks as (before, environments):
        Path(folder, "call").write_bytes(pickle.dumps((function, tuple(arguments))))
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), folder, script or ""]
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
            raise SystemExit(f"{function.__qualname__}: the {world_size} processes ended with {codes}")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


@contextlib.contextmanager
def _exiting_at_sigterm() -> Iterator[None]:
    """Exit at a SIGTERM within this context, so that nothing is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def be_quiet() -> None:
    """Let this process compute with one thread, and say nothing of what Lightning and warnings would."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


@contextlib.contextmanager
def connected(
    network: type[ProcessGroups] = ProcessGroups, each: int = 1, placement: Placement = "loop"
) -> Iterator[Cluster]:
    """In a rank: an open cluster of all ranks with so many stages on each, which is closed when all are done."""
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


@contextlib.contextmanager
def _ranks(
    world_size: int, megabits: network.Megabits | None
) -> Iterator[tuple[list[list[str]], list[dict[str, str]]]]:
    """For each rank what to put before its command, and its environment."""
    size = str(world_size)
    base = {**os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
    base |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"}  # so that Lightning starts no processes
    ranks = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    if megabits is None:
        local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "GLOO_SOCKET_IFNAME": "lo"}
        yield [[]] * world_size, [rank | local for rank in ranks]
        return
    with network.namespaces(world_size, megabits) as spaces:
        shared = {"MASTER_ADDR": spaces.master, "MASTER_PORT": "29511"}
        apart = [rank | shared | {"GLOO_SOCKET_IFNAME": spaces.interface(i)} for i, rank in enumerate(ranks)]
        yield [spaces.command(rank) for rank in range(world_size)], apart


class Clock(pl.Callback):
    """A record of when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self, first: int, last: int = 0) -> list[float]:
        """Return what each step took, but for so many first and last ones of the record."""
        counted = self.ends[first - 1 : len(self.ends) - last]
        return [end - begin for begin, end in itertools.pairwise(counted)]


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Make a Trainer on CPUs for one epoch that only trains: without logger, checkpoints and texts."""
    quiet: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(**quiet | {"enable_progress_bar": False, "enable_model_summary": False} | options)


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """All sides in each round, another one first every time: what disturbs the machine disturbs all sides alike."""
    for i in range(rounds):
        first = i % len(sides)
        yield from (*sides[first:], *sides[:first])


def timed(
    cluster: Cluster, sides: Mapping[str, Callable[[], object]], rounds: int, torchs: Container[str] = ()
) -> dict[str, list[float]]:
    """Let sides take turns in all processes; return what each took in each round, but for a first one that warms up.

    All processes begin a side together, and its seconds end with the last of them. Every rank calls this; on ranks
    other than 0 the seconds are those of that rank.

    Args:
        cluster: open cluster.
        sides: functions that each run an iteration, by name.
        rounds: number of rounds that count.
        torchs: sides that do not run with the interception of calls, which the strategy keeps on while it trains.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for name in in_turns([*sides], 1 + rounds):
        with contextlib.nullcontext() if name in torchs else intercepting():
            cluster.group.barrier()
            before = time.perf_counter()
            sides[name]()
            took = time.perf_counter() - before
        seconds[name].append(max(cluster.group.gather_objects(took)))
    return {name: values[1:] for name, values in seconds.items()}


def check_equal(losses: Mapping[str, Sequence[float]], near: float) -> None:
    """Check that all sides have the losses of the first one, up to a share.

    Raises:
        SystemExit: they differ, so the sides do not compute the same.
    """
    name, wanted = next(iter(losses.items()))
    for other, found in losses.items():
        if len(found) != len(wanted) or any(abs(a - b) > near * abs(b) for a, b in zip(found, wanted, strict=True)):
            raise SystemExit(f"{other} and {name} do not compute the same: losses {found} and {wanted}")


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

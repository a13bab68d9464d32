"""Many trainers in the same processes, and many iterations, need no more than a few."""

from __future__ import annotations

import os
import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.commands import ROOT, run
from tests.models import MLP, loader
from tests.trainers import pipeline

FILES = 256
LEAVE_S = 5.0


def trainers(count: int, folder: Path) -> list[tuple[int, int, int]]:
    """Threads, files and listening sockets after each of several trainers."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    counts = []
    for number in range(count):
        runner = pipeline(2, 2, {"num_pipelines": 2}, max_epochs=1)
        model = MLP()
        runner.fit(model, loader(MLP, 16, 8), loader(MLP, 8, 8))
        runner.save_checkpoint(folder / f"{number}.ckpt")
        if number % 2:
            runner.validate(model, loader(MLP, 8, 8), verbose=False)
        process = psutil.Process()
        listening = sum(connection.status == "LISTEN" for connection in process.net_connections("tcp"))
        threads = settled(process.num_threads, [before for before, *_ in counts[:2]] if len(counts) > 1 else [])
        files = settled(process.num_fds, [before for _, before, _ in counts[:4]] if len(counts) > 3 else [])
        counts.append((threads, files, listening))
    return counts


def settled(count: Callable[[], int], before: Sequence[int]) -> int:
    """How many there are; more than before are counted again, since one that has ended takes a moment to leave."""
    deadline = time.monotonic() + LEAVE_S
    while (found := count()) > max(before, default=found) and time.monotonic() < deadline:
        os.sched_yield()
    return found


@pytest.mark.slow
def test_a_trainer_needs_no_more_threads_files_and_sockets_than_the_one_before(tmp_path: Path) -> None:
    for rank, counts in enumerate(processes.everywhere(2, trainers, 7, tmp_path, folder=tmp_path)):
        threads, files, listening = zip(*counts, strict=True)
        assert max(threads[2:]) <= max(threads[:2])
        assert max(files[4:]) <= max(files[:4])
        assert set(listening) == {2 if rank == 0 else 1}  # that of gloo, and on rank 0 the store


@pytest.mark.slow
def test_memory_is_flat_under_the_default_launcher_and_a_limit_of_files(tmp_path: Path) -> None:
    printed = run(
        tmp_path, ROOT / "benchmarks" / "soak.py", "--trainers", "10", "--iterations", "500", "--files", str(FILES)
    )
    found: dict[str, list[list[float]]] = defaultdict(list)
    for rank, kind, *numbers in re.findall(
        r"rank (\d), (\w+) \d+: (\d+) threads, (\d+) files, (\d+) listening, ([\d.]+) MiB", printed
    ):
        found[f"{rank} {kind}"].append([float(number) for number in numbers])
    assert {key: len(lines) for key, lines in found.items()} == {
        "0 trainer": 10, "1 trainer": 10, "0 iteration": 10, "1 iteration": 10,
    }  # fmt: skip
    for lines in found.values():
        for position in (0, 1, 2):
            assert max(line[position] for line in lines[4:]) <= max(line[position] for line in lines[:4])
        assert lines[-1][3] - lines[4][3] < 5  # MiB

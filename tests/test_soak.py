"""Many trainers in the same processes, and many iterations, need no more than a few."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.commands import ROOT, run

FILES = 256


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
    for key, lines in found.items():
        assert {line[2] for line in lines} == {2 if key[0] == "0" else 1}  # gloo's, and on rank 0 that of the store
        for position, first in ((0, 2), (1, 4)):  # threads, files
            assert max(line[position] for line in lines[first:]) <= max(line[position] for line in lines[:first])
        assert lines[-1][3] - lines[4][3] < 5  # MiB

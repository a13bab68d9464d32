"""The benchmarks run, and say what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.schedules import table
from tests.commands import ROOT, run


def test_the_table_compares_with_1f1b_and_with_the_simulator() -> None:
    common = {"stages": 2, "ratio": 0.5, "peak_stash": [2, 1]}
    rows = [
        {**common, "schedule": "1f1b", "advance": 0, "seconds": 1.2, "simulated_s": 1.25},
        {**common, "schedule": "advance_forward", "advance": 1, "seconds": 1.0, "simulated_s": 1.0},
    ]
    _, first, second = table(rows).splitlines()
    assert first.split() == ["2", "0.50", "1f1b", "1.200", "s", "1.250", "s", "-4.0%", "1.000x", "2", "1"]
    assert second.split()[2:] == ["advance_forward", "h=1", "1.000", "s", "1.000", "s", "+0.0%", "1.200x", "2", "1"]


@pytest.mark.slow
def test_the_schedules_are_measured_without_root(tmp_path: Path) -> None:
    arguments = [
        ROOT / "benchmarks" / "schedules.py", "--stages", "2", "--ratios", "0.5", "--links",
        "throttled", "--microbatches", "4", "--forward-ms", "10", "--backward-ms", "20", "--iterations", "1",
        "--limit-s", "90", "--json", tmp_path / "rows.json", "--picture", tmp_path / "picture.png",
    ]  # fmt: skip
    run(tmp_path, *arguments)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["schedule"] for row in rows] == ["afab", "1f1b", "advance_forward"]
    # no action is shorter than its sleep, and none of them overlap on a stage
    assert all(row["seconds"] > 4 * 0.030 for row in rows)
    assert [row["peak_stash"] for row in rows] == [[4, 4], [2, 1], [rows[2]["advance"] + 2, 1]]
    assert (tmp_path / "picture.png").exists()

"""The benchmarks run, and say what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import summary
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


def test_the_engines_table_compares_round_by_round() -> None:
    seconds = {"avgpipe 1f1b": [1.0, 4.0, 2.0], "torch gpipe": [3.0, 9.0, 5.0], "torch 1f1b": [1.5, 4.0, 4.0]}
    found = summary({"seconds": seconds, "cpu_s": seconds, "bounds_s": {"1f1b": 1.6}})
    assert found["best_peer"] == "torch 1f1b"
    assert found["rows"][0]["over_best_peer"] == 1.5  # of 1.5, 1.0 and 2.0, whatever the medians of the sides
    assert found["rows"][0]["of_bound"] == 2.0 / 1.6
    assert "of_bound" not in found["rows"][1]


@pytest.mark.slow
def test_the_engine_is_measured_beside_torchs_pipelining(tmp_path: Path) -> None:
    # it fails if the sides do not compute the same losses
    run(
        tmp_path, ROOT / "benchmarks" / "engine.py", "--quick", "--parts", "replay", "free", "--limit-s", "90",
        "--json", tmp_path / "engine.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "engine.json").read_text())
    assert {row["units"] for row in found["replay"]} == {"planned", "leaves"}
    sides = {row["side"] for row in found["free"]["rows"]}
    assert sides >= {"avgpipe afab", "avgpipe 1f1b", "torch gpipe", "torch 1f1b"}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found["free"]["seconds"].values())

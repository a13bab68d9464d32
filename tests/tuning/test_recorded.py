"""Recorded profiles: what predictors make of real runs of two processes, beside what these runs took.

``tests/golden/tuning.json`` holds rows of ``benchmarks/tuning.py --json``, without the single rounds.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning import Choice, choices
from lightning_avgpipe.tuning import Profile, Setting, search

ROWS = json.loads((Path(__file__).parents[1] / "golden" / "tuning.json").read_text())


def profile_of(row: dict[str, Any]) -> Profile:
    return Profile.from_json(json.dumps(row["profile"]))


def choices_of(row: dict[str, Any]) -> dict[str, Choice]:
    measured = {Setting(m, n, h): seconds for m, n, h, seconds in row["measured"]}
    return {choice.by: choice for choice in choices(profile_of(row), measured)}


RUNS = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['workload']}-{row['megabits']}")


@RUNS
def test_recorded_runs_are_ranked_as_they_were_measured(row: dict[str, Any]) -> None:
    found = choices_of(row)
    for name in ("corrected", "simulator"):
        assert found[name].rank_correlation > found["paper"].rank_correlation
        assert found[name].rank_correlation > 0.8


@RUNS
def test_the_default_predictor_chooses_nearly_the_best(row: dict[str, Any]) -> None:
    profile = profile_of(row)
    settings = [Setting(m, n, h) for m, n, h, _ in row["measured"]]
    default = search(profile, settings)
    found = choices_of(row)
    assert found[default.predictor].setting == default.choice.setting
    assert found[default.predictor].regret <= 0.03


def test_rules_of_thumb_and_the_printed_formula_choose_worse() -> None:
    mean = {
        by: statistics.mean(choices_of(row)[by].regret for row in ROWS)
        for by in ("corrected", "simulator", "paper", "max-num", "max-size")
    }
    assert max(mean["corrected"], mean["simulator"]) < min(mean["paper"], mean["max-num"], mean["max-size"]) - 0.05

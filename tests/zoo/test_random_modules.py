"""Modules put together at random train by stages as in one process, or are refused or stopped by name in time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.random_modules import judge

# `RANDOM_MODULES=2000 pytest -m slow tests/zoo/test_random_modules.py` takes some twenty minutes
SEEDS = int(os.environ.get("RANDOM_MODULES", "400"))


def assert_nothing_is_silently_wrong(seeds: Iterable[int], folder: Path | None = None, **options: Any) -> None:
    """Judge the modules of some seeds; none may be wrong before the second optimizer step without a named error."""
    verdicts = [judge(seed, folder, **options) for seed in seeds]
    wrong = [f"{v.text}\n{v.source}" for v in verdicts if v.kind in ("wrong", "unclear")]
    counts = Counter(v.kind for v in verdicts)
    assert not wrong, "\n\n".join([f"{counts}", *wrong])
    assert counts["right"], f"none of the seeds {seeds} trains: {counts}"


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_modules_train_as_in_one_process_or_are_refused(first: int) -> None:
    assert_nothing_is_silently_wrong(range(first, first + 10))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, SEEDS, 40))
def test_many_random_modules_train_as_in_one_process_or_are_refused(first: int) -> None:
    assert_nothing_is_silently_wrong(range(first, first + 40))


@pytest.mark.slow
def test_random_modules_are_compared_with_plain_training_by_default() -> None:
    assert_nothing_is_silently_wrong(range(2000, 2030), verify="auto")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2100, 2160, 20))
def test_random_modules_train_in_two_processes_or_are_refused(first: int, tmp_path: Path) -> None:
    assert_nothing_is_silently_wrong(range(first, first + 20), tmp_path)

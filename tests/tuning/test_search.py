"""The search: candidates, the choice within the memory, what it says, and its picture."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from lightning_avgpipe.errors import ConfigurationError, TuningError
from lightning_avgpipe.schedule.picture import pixels
from lightning_avgpipe.tuning import Result, Setting, candidates, search
from lightning_avgpipe.tuning.picture import draw
from tests.profiles import random_profile

PROFILE = random_profile(1)
SETTINGS = candidates(PROFILE, 4)


def tight(share: float) -> float:
    """A limit between the least and the most that any setting needs."""
    needs = [max(candidate.prediction.memory) for candidate in search(PROFILE, SETTINGS).candidates]
    return min(needs) + share * (max(needs) - min(needs))


def test_candidates_are_divisors_or_powers_of_two_with_advances_that_matter() -> None:
    assert {s.num_microbatches for s in SETTINGS} == {1, 2, 4, 8, 16, 32, 64}
    assert [s for s in SETTINGS if s.num_microbatches == 1] == [Setting(1, n) for n in (1, 2, 3, 4)]
    counts = {97: {1, 2, 4, 8, 16, 32, 64}, 12: {1, 2, 3, 4, 6, 12}}
    for batch_size, expected in counts.items():
        profile = dataclasses.replace(PROFILE, batch_size=batch_size, num_microbatches=1)
        assert {s.num_microbatches for s in candidates(profile, 1)} == expected
    assert {s.advance for s in candidates(PROFILE, 1, [64], schedule="afab")} == {0}
    with pytest.raises(TuningError, match="from 1 to 64"):
        candidates(PROFILE, 1, [65])


def test_the_choice_is_the_fastest_that_fits_and_never_more_memory_for_nothing() -> None:
    limit = tight(0.3)
    result = search(PROFILE, SETTINGS, limit)
    assert max(result.choice.prediction.memory) <= limit
    for candidate in result.candidates:
        faster = candidate.prediction.per_batch_s < result.choice.prediction.per_batch_s * (1 - 1e-9)
        assert not (faster and max(candidate.prediction.memory) <= limit)
        same = candidate.prediction.per_batch_s == result.choice.prediction.per_batch_s
        assert not same or max(candidate.prediction.memory) >= max(result.choice.prediction.memory)
    assert result.choice.prediction.per_batch_s >= search(PROFILE, SETTINGS).choice.prediction.per_batch_s


def test_if_nothing_fits_it_is_said_what_is_missing_and_what_would_help() -> None:
    with pytest.raises(TuningError, match=r"too much. What would help: .*more stages") as caught:
        search(PROFILE, SETTINGS, tight(0) - 2**20)
    assert "1.0 MiB too much" in str(caught.value) and "on stage" in str(caught.value)
    assert "fewer pipelines" not in str(caught.value)  # already one
    with pytest.raises(TuningError, match=r"fewer pipelines"):
        search(PROFILE, [Setting(4, 4)], tight(0))


def test_results_survive_json_and_print_a_line_per_number_of_pipelines() -> None:
    for limit in (None, tight(0.3)):
        result = search(PROFILE, SETTINGS, limit)
        assert Result.from_json(result.to_json()) == result
        header, _, *rows, why = str(result).splitlines()
        assert header.split()[:2] == ["pipelines", "micro-batches"]
        assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
        assert sum(row.endswith("chosen") for row in rows) == 1
        assert why == f"{result.choice.setting}: {result.reason}"


def test_where_it_is_open_each_number_of_pipelines_is_considered_with_and_without_rolling() -> None:
    both = candidates(PROFILE, 3, rolling="auto")
    assert len(set(both)) == len(both)
    assert {*both} == {*candidates(PROFILE, 3), *candidates(PROFILE, 3, rolling=True)}


def test_the_picture_hatches_what_does_not_fit_and_marks_the_choice() -> None:
    limit = tight(0.1)
    result = search(PROFILE, SETTINGS, limit)
    figure = draw(result, measured={(8, 2): 0.1})
    left, right, *_ = figure.axes
    columns, rows = [1, 2, 4, 8, 16, 32, 64], [1, 2, 3, 4]
    infeasible = {
        f"M={m} N={n}"
        for m in columns
        for n in rows
        if all(
            max(c.prediction.memory) > limit
            for c in result.candidates
            if (c.setting.num_microbatches, c.setting.num_pipelines) == (m, n)
        )
    }
    assert infeasible
    for axes in (left, right):
        assert {patch.get_gid() for patch in axes.patches} == infeasible
        star = next(c for c in axes.collections if c.get_gid() == "choice")
        (x, y), *_ = star.get_offsets()
        setting = result.choice.setting
        assert (columns[int(x)], rows[int(y)]) == (setting.num_microbatches, setting.num_pipelines)
    assert len(left.collections) == len(right.collections) + 1  # the measured point
    image = pixels(figure)
    x, y = left.transData.transform((columns.index(8), rows.index(2)))
    assert image[image.shape[0] - 1 - round(y), round(x)].tolist() != [255, 255, 255]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning_avgpipe\[pictures\]'"):
        draw(search(PROFILE, SETTINGS))

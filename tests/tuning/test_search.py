"""The search: candidates, the choice within the memory, what it says, and its picture."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.schedule.picture import pixels
from lightning_avgpipe.tuning.picture import draw
from lightning_avgpipe.tuning.profile import Setting, from_json, to_json
from lightning_avgpipe.tuning.search import (
    MEASURED_SAMPLES,
    ROLLING_SAMPLES,
    Result,
    SamplesFactor,
    candidates,
    samples_at,
    search,
)
from lightning_avgpipe.tuning.trials import trial_sizes
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
        assert from_json(Result, to_json(result)) == result
        header, _, *rows, why = str(result).splitlines()
        assert header.split()[:2] == ["pipelines", "micro-batches"]
        assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
        assert sum(row.endswith("chosen") for row in rows) == 1
        assert why == f"{result.choice.setting}: {result.reason}"


def test_where_it_is_open_each_number_of_pipelines_is_considered_with_and_without_rolling() -> None:
    both = candidates(PROFILE, 3, rolling="auto")
    assert len(set(both)) == len(both)
    assert {*both} == {*candidates(PROFILE, 3), *candidates(PROFILE, 3, rolling=True)}


def test_models_that_divide_batches_have_micro_batches_of_the_sizes_that_one_has() -> None:
    one, split = candidates(PROFILE, 1), candidates(PROFILE, 3, split=True)
    assert {setting.parts for setting in split} == {setting.parts for setting in one}
    assert {setting.num_pipelines for setting in split} == {1, 2}  # PROFILE's batch is no multiple of three
    assert all(setting.split == (setting.num_pipelines > 1) for setting in split)
    assert samples_at(None, 2, split=True) == 1.0 < samples_at(None, 4, rolling=True, split=True)


def test_the_picture_hatches_what_does_not_fit_and_marks_the_choice() -> None:
    limit = tight(0.1)
    result = search(PROFILE, SETTINGS, limit)
    figure = draw(result)
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
    image = pixels(figure)
    x, y = left.transData.transform((columns.index(8), rows.index(2)))
    assert image[image.shape[0] - 1 - round(y), round(x)].tolist() != [255, 255, 255]


# -- what a batch of parallel models is worth ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1, [1, 1, 1, 1]),
        (1.5, [1, 1.5, 1.5, 1.5]),
        ({2: 1.2, 4: 1.6}, [1, 1.2, 1.2 + 0.4 * math.log2(1.5), 1.6]),
        ({4: 2.0}, [1, 1.5, 1 + math.log2(3) / 2, 2.0]),
        ({2: 1.25}, [1, 1.25, 1 + 0.25 * math.log2(3), 1.5]),
        ({1: 1.0}, [1, 1, 1, 1]),
    ],
)
def test_factors_are_linear_in_the_logarithm_of_the_number_of_pipelines(
    factor: SamplesFactor, expected: list[float]
) -> None:
    assert [samples_at(factor, n) for n in (1, 2, 3, 4)] == pytest.approx(expected)


def test_rolling_pipelines_need_what_was_measured_of_them_if_nothing_is_given() -> None:
    for n in (2, 4):
        assert samples_at(None, n, rolling=True) == ROLLING_SAMPLES[n] * MEASURED_SAMPLES[n] >= samples_at(None, n)
    for n in (2, 3, 4):
        assert samples_at({2: 1.5}, n, rolling=True) == samples_at({2: 1.5}, n)
    assert samples_at(None, 1, rolling=True) == 1.0


def test_pipelines_roll_where_that_takes_less_time_to_a_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(1)
    settings = candidates(profile, 2, [8], [0], rolling="auto")
    one, *several = search(profile, settings).candidates
    assert (one.setting.rolling, *(c.setting.rolling for c in several)) == (False, False, True)
    gain = several[0].prediction.per_batch_s / several[1].prediction.per_batch_s
    for worth, rolls in ((0.99 * gain, True), (1.01 * gain, False)):
        monkeypatch.setitem(samples_at.__globals__, "ROLLING_SAMPLES", {2: worth})
        found = search(profile, settings[1:], samples_factor=None)
        assert [c.samples for c in found.candidates] == [MEASURED_SAMPLES[2], MEASURED_SAMPLES[2] * worth]
        assert found.choice.setting.rolling == rolls == ("advance 0, rolling" in str(found))


def test_the_choice_is_the_least_time_to_a_goal() -> None:
    profile = random_profile(1)
    settings = candidates(profile, 4)
    fastest = search(profile, settings).choice
    assert fastest.setting.num_pipelines > 1  # or the test says nothing
    one = search(profile, settings).best(num_pipelines=1)
    assert one is not None
    worth = one.prediction.per_batch_s / fastest.prediction.per_batch_s
    for factor, expected in ((worth * 0.99, fastest.setting), (worth * 1.01, one.setting)):
        found = search(profile, settings, samples_factor=factor)
        assert found.choice.setting == expected
        assert "the least time to a goal of" in found.reason and f"x {factor:.2f}" in str(found)
    assert dataclasses.replace(fastest, samples=2.0).cost_s == 2 * fastest.cost_s


# -- trials: at which sizes to measure, and what measurements say ----------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "num_stages", "expected"),
    [
        ([1, 2, 4, 8, 16], 2, (16, (8, 4, 1))),
        ([1, 2, 4, 8, 16, 32, 64], 2, (16, (8, 4, 1))),  # with 64 most would be what an action costs anyway
        ([1, 2, 4, 8, 16, 32, 64], 4, (32, (8, 4, 1))),
        ([4, 8], 2, (8, (4,))),
        ([8], 2, (8, ())),
        ([64, 128], 2, (64, ())),
    ],
)
def test_profiles_are_made_with_many_micro_batches_and_the_fewest_and_some_in_between(
    counts: list[int], num_stages: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    assert trial_sizes(counts, num_stages) == expected

"""What a batch of parallel models is worth."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_avgpipe.tuning import candidates, search
from lightning_avgpipe.tuning.search import MEASURED_SAMPLES, ROLLING_SAMPLES, SamplesFactor, samples_at
from tests.profiles import random_profile


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

"""The tuner: what it predicts, the search, the choice within the memory, what it says, and its picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning import Choice, choices, printed_per_batch_s
from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.planning import Link
from lightning_avgpipe.schedule import StageCosts, build, simulate
from lightning_avgpipe.schedule.picture import pixels
from lightning_avgpipe.tuning.picture import draw
from lightning_avgpipe.tuning.predictors import Predictor, update_s
from lightning_avgpipe.tuning.profile import (
    Curve,
    HopProfile,
    Profile,
    Setting,
    StageMemory,
    StageProfile,
    Trial,
    from_json,
    to_json,
    trial_sizes,
)
from lightning_avgpipe.tuning.search import (
    MEASURED_SAMPLES,
    ROLLING_SAMPLES,
    Result,
    SamplesFactor,
    candidates,
    samples_at,
    search,
)
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


# -- predictions against simulations and recorded runs ---------------------------------------------------------------


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "predictions.json").read_text())
CLOSE = 1e-9


def balanced(
    utilisation: float, num_stages: int = 3, send_s: float = 0.25, latency_s: float = 0.125, in_turns: bool = False
) -> Profile:
    """Forwards of 1 s and backwards of 2 s at M=8; a message has 100 bytes."""
    memory = StageMemory(context=1000, model=300, reference=200, activations=800, transient=80, boundary=40)
    stage = StageProfile(Curve.constant(1.0, utilisation), Curve.constant(2.0, utilisation), memory)
    link = Link(send_s / 100, latency_s)
    hops = (HopProfile(100, 100, link),) * (num_stages - 1)
    return Profile(8, 8, (stage,) * num_stages, hops, in_turns, tuple(range(num_stages)))


@pytest.mark.parametrize("text", ["{}", '{"format": 9, "Profile": {}}', '{"format": 2, "Profile": {"stages": []}}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(TuningError, match="not a Profile that can be read"):
        from_json(Profile, text)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"seed{case['seed']}")
def test_profiles_survive_json_and_predictions_of_recorded_ones_are_golden(case: dict) -> None:
    profile = from_json(Profile, json.dumps(case["profile"]))
    assert profile == random_profile(case["seed"]) == from_json(Profile, to_json(profile))
    for m, n, advance, expected in case["simulator"]:
        found = Predictor(profile).predict(Setting(m, n, advance)).iteration_s
        assert found == pytest.approx(expected, rel=1e-9), (m, n, advance)
    for m, n, advance, expected in case["paper"]:
        found = n * printed_per_batch_s(profile, Setting(m, n, advance))
        assert found == pytest.approx(expected, rel=1e-9), (m, n, advance)


@pytest.mark.parametrize("utilisation", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("schedule", [("afab", 0), ("advance_forward", 0), ("advance_forward", 1)])
def test_with_one_pipeline_it_is_the_simulator_of_schedules(utilisation: float, schedule: tuple[str, int]) -> None:
    name, advance = schedule
    profile = balanced(utilisation)
    expected = simulate(build(name, 3, 8, advance), StageCosts.uniform(3, 1, 2, 0.25, 0.125)).iteration_s
    assert Predictor(profile).predict(Setting(8, 1, advance, name)).iteration_s == pytest.approx(expected, rel=CLOSE)


def test_a_full_device_takes_n_times_as_long_for_n_pipelines_and_an_empty_one_no_longer() -> None:
    for n in (1, 2, 3):
        setting = Setting(8, n, schedule="afab")
        full = Predictor(balanced(1.0, num_stages=1)).predict(setting)
        assert full.iteration_s == pytest.approx(n * 8 * 3, rel=CLOSE)
        assert full.per_batch_s == pytest.approx(8 * 3, rel=CLOSE)
        empty = Predictor(balanced(1e-6, 3, send_s=0.0)).predict(setting)
        assert empty.iteration_s == pytest.approx(10 * 3 + 4 * 0.125, rel=CLOSE)
        assert empty.per_batch_s == pytest.approx(empty.iteration_s / n)


def test_memory_counts_pipelines_stashes_and_one_reference() -> None:
    predicted = Predictor(balanced(0.5)).predict(Setting(4, 1, schedule="1f1b")).memory
    assert predicted == tuple(1000 + 300 + stash * 200 + 30 for stash in (3, 2, 1))
    predicted = Predictor(balanced(0.5)).predict(Setting(8, 2, schedule="afab")).memory
    assert predicted == (1000 + 200 + 2 * 300 + 2 * 800 + 2 * 15,) * 3


def test_rolling_pipelines_take_as_long_as_one_alone_until_a_device_is_full() -> None:
    predictor = Predictor(balanced(1.0, send_s=2.0, in_turns=True))
    alone_s = predictor.predict(Setting(4)).iteration_s
    work_s = 4 * 2 * 3.0  # of a batch of micro-batches twice the size
    for n in (2, 3, 4, 8):
        drained, rolling = (predictor.predict(Setting(4, n, rolling=rolls)) for rolls in (False, True))
        least_s = max(alone_s, n * work_s)
        assert least_s <= rolling.iteration_s <= 1.16 * least_s
        assert rolling.iteration_s < drained.iteration_s
    link_bound = Predictor(balanced(1.0, send_s=40.0, in_turns=True))
    assert 8 * 4 * 40 <= link_bound.predict(Setting(8, 4, rolling=True)).iteration_s <= 1.06 * 8 * 4 * 40


def test_rolling_pipelines_on_slow_links_gain_from_an_advance() -> None:
    """Two pipelines of six stages have enough work for all devices, but without an advance they wait for messages."""
    predictor = Predictor(balanced(1.0, num_stages=6, send_s=0.6, in_turns=True))
    without, one = (predictor.predict(Setting(8, 2, h, rolling=True)).iteration_s for h in (0, 1))
    work_s = 2 * 8 * 3.0
    assert without > 1.2 * work_s
    assert work_s <= one < 1.1 * work_s


def test_rolling_pipelines_keep_where_each_began() -> None:
    predictor = Predictor(balanced(1.0))
    for n in (2, 4):
        drained, rolling = (predictor.predict(Setting(8, n, rolling=rolls)) for rolls in (False, True))
        added = {more - less for more, less in zip(rolling.memory, drained.memory, strict=True)}
        assert added == {(n + 1) * 200}


@pytest.mark.parametrize("rolls", [False, True])
def test_models_that_divide_batches_are_predicted_as_ones_with_batches_of_half_the_size(rolls: bool) -> None:
    profile = balanced(0.5, in_turns=True)
    memory = profile.stages[0].memory
    halved = {name: getattr(memory, name) // 2 for name in ("activations", "transient", "boundary")}
    stage = dataclasses.replace(profile.stages[0], memory=dataclasses.replace(memory, **halved))
    half = dataclasses.replace(profile, num_microbatches=4, batch_size=4, stages=(stage,) * 3)
    expected = Predictor(half).predict(Setting(4, 2, 1, rolling=rolls))
    found = Predictor(profile).predict(Setting(4, 2, 1, rolling=rolls, split=True))
    assert (found.iteration_s, found.memory) == (expected.iteration_s, expected.memory)
    assert found.per_batch_s == found.iteration_s == 2 * expected.per_batch_s


def test_sums_over_tied_parameters_take_time_for_each_pipeline_unless_others_compute() -> None:
    for send_s, n, rolls, added in ((0.0, 1, False, 3), (0.0, 2, False, 6), (9.0, 2, True, 3), (0.0, 8, True, 0)):
        plain = balanced(1.0, send_s=send_s, in_turns=True)
        tied = dataclasses.replace(plain, tied_s=3.0)
        found = [Predictor(given).predict(Setting(4, n, rolling=rolls)).iteration_s for given in (plain, tied)]
        assert found[1] - found[0] == pytest.approx(added)


# -- recorded profiles: rows of benchmarks/tuning.py --json without the single rounds --------------------------------


ROWS = json.loads((Path(__file__).parents[1] / "golden" / "tuning.json").read_text())


def profile_of(row: dict[str, Any]) -> Profile:
    return from_json(Profile, json.dumps(row["profile"]))


def choices_of(row: dict[str, Any]) -> dict[str, Choice]:
    measured = {Setting(m, n, h): seconds for m, n, h, seconds in row["measured"]}
    return {choice.by: choice for choice in choices(profile_of(row), measured)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['workload']}-{row['megabits']}")
def test_recorded_runs_are_ranked_as_they_were_measured_and_the_choice_is_nearly_the_best(row: dict[str, Any]) -> None:
    found = choices_of(row)
    assert found["simulator"].rank_correlation > max(0.8, found["paper"].rank_correlation)
    chosen = search(profile_of(row), [Setting(m, n, h) for m, n, h, _ in row["measured"]]).choice.setting
    assert found["simulator"].setting == chosen
    assert found["simulator"].regret <= 0.03


def test_rules_of_thumb_and_the_printed_formula_choose_worse() -> None:
    mean = {
        by: statistics.mean(choices_of(row)[by].regret for row in ROWS)
        for by in ("simulator", "paper", "max-num", "max-size")
    }
    assert mean["simulator"] < min(mean["paper"], mean["max-num"], mean["max-size"]) - 0.05


# -- nothing is lost by bounds ----------------------------------------------------------------------------------------


EXACT = 1e-9


def random_settings(in_turns: bool) -> Iterator[tuple[Profile, Setting]]:
    for seed, n in itertools.product(range(8), (1, 2, 3, 5)):
        profile = random_profile(seed, in_turns)
        if seed % 4 == 3:
            profile = dataclasses.replace(profile, devices=tuple(k % 2 for k in range(profile.num_stages)))
        yield profile, Setting((33, 48, 64)[seed % 3], n, advance=seed % 2)


@pytest.mark.parametrize("in_turns", [False, True])
def test_no_simulation_is_below_its_bound(in_turns: bool) -> None:
    for profile, setting in random_settings(in_turns):
        predictor = Predictor(profile)
        small = dataclasses.replace(setting, num_microbatches=8)
        several = {False, setting.num_pipelines > 1}
        for schedule, rolling, split in itertools.product(("afab", "advance_forward"), several, several):
            setting = dataclasses.replace(small, schedule=schedule, rolling=rolling, split=split)
            bound, found = predictor.bound(setting), predictor.predict(setting)
            assert bound.iteration_s <= found.iteration_s * (1 + EXACT), (profile, setting)
            assert bound.memory == found.memory
            if not bound.at_least:
                assert bound.iteration_s == pytest.approx(found.iteration_s, rel=EXACT)


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_search_by_bounds_chooses_what_playing_everything_chooses(in_turns: bool) -> None:
    for seed in (1, 2, 5):
        profile = random_profile(seed, in_turns)
        settings = candidates(profile, 4, [4, 8, 16], rolling="auto")
        played = list(map(Predictor(profile).predict, settings))
        limit = sorted(max(p.memory) for p in played)[len(played) * 3 // 4]
        result = search(profile, settings, limit)
        assert any(candidate.prediction.at_least for candidate in result.candidates)
        for candidate, prediction in zip(result.candidates, played, strict=True):
            if candidate.prediction.at_least:
                assert candidate.prediction.per_batch_s <= prediction.per_batch_s * (1 + EXACT)
            else:
                assert candidate.prediction.per_batch_s == pytest.approx(prediction.per_batch_s, rel=EXACT)
        for n in range(1, 5):
            here = [p for s, p in zip(settings, played, strict=True) if s.num_pipelines == n and max(p.memory) <= limit]
            best = result.best(num_pipelines=n)
            if here:
                assert best is not None and not best.prediction.at_least
                assert best.prediction.per_batch_s == pytest.approx(min(p.per_batch_s for p in here), rel=EXACT)
        assert not result.choice.prediction.at_least


# -- calibration: what whole iterations took, in what is predicted and chosen --------------------------------------


RANDOM = random_profile(1)


def slowed(ratios: dict[int, float]) -> Profile:
    """With trials that took so many times what is simulated, by number of micro-batches."""
    trials = []
    for m, ratio in ratios.items():
        expected = Predictor(RANDOM).predict(Setting(m)).iteration_s - update_s(RANDOM, 1)
        trials.append(Trial(Setting(m), ratio * expected))
    return dataclasses.replace(RANDOM, trials=tuple(trials))


def test_at_the_sizes_of_trials_what_they_took_is_predicted() -> None:
    profile = slowed({16: 1.3, 4: 1.1})
    for trial in profile.trials:
        found = Predictor(profile).predict(trial.setting).iteration_s
        assert found == pytest.approx(trial.span_s + update_s(RANDOM, 1), rel=CLOSE)


def test_the_search_leaves_a_size_at_which_stages_wait_for_each_other() -> None:
    settings = candidates(RANDOM, 1)
    fastest = search(RANDOM, settings).choice.setting.num_microbatches
    others = sorted({setting.num_microbatches for setting in settings} - {fastest})
    profile = slowed({fastest: 10.0, **dict.fromkeys(others, 1.0)})
    result = search(profile, settings)
    assert result.choice.setting.num_microbatches != fastest
    assert result.best(num_microbatches=fastest).prediction.per_batch_s > result.choice.prediction.per_batch_s  # type: ignore[union-attr]

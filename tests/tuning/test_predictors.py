"""The predictor: what it must return at the profiled setting, in the limits, and against what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning import Choice, choices, printed_per_batch_s
from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.planning import Link
from lightning_avgpipe.schedule import StageCosts, build, simulate
from lightning_avgpipe.tuning.predictors import Predictor
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
)
from lightning_avgpipe.tuning.scaling import update_s
from lightning_avgpipe.tuning.search import candidates, search
from tests.profiles import random_profile

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

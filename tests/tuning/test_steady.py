"""The simulation of several pipelines: with nothing lost by counting periods and by bounds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from lightning_avgpipe.schedule import InTurns, SideBySide, build, simulate
from lightning_avgpipe.tuning import Profile, Setting, Simulator, candidates, predictors, search
from lightning_avgpipe.tuning.predictors import simulated_s
from lightning_avgpipe.tuning.scaling import loads_at
from tests.profiles import random_profile

EXACT = 1e-9


def random_settings(in_turns: bool) -> Iterator[tuple[Profile, Setting]]:
    for seed, n in itertools.product(range(8), (1, 2, 3, 5)):
        profile = random_profile(seed, in_turns)
        if seed % 4 == 3:
            profile = dataclasses.replace(profile, devices=tuple(k % 2 for k in range(profile.num_stages)))
        yield profile, Setting((33, 48, 64)[seed % 3], n, advance=seed % 2)


@pytest.mark.parametrize("in_turns", [False, True])
def test_at_an_even_pace_counting_micro_batches_is_playing_them(
    in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    monkeypatch.setattr(predictors, "build", lambda *args: (built.append(args[2]), build(*args))[1])
    counted = 0
    for profile, setting in random_settings(in_turns):
        loads, k, m = loads_at(profile, setting), profile.num_stages, setting.num_microbatches
        schedules = [build(setting.schedule, k, m, setting.advance)] * setting.num_pipelines
        played = simulate(schedules, loads, profile.devices, InTurns if in_turns else SideBySide).iteration_s
        built.clear()
        found = simulated_s(setting, loads, profile.devices, in_turns)
        assert found == pytest.approx(played, rel=EXACT), (profile, setting)
        counted += built[-1] < m
    assert counted > 8  # of 32; the others have no such pace, or come to it late


@pytest.mark.parametrize("in_turns", [False, True])
def test_no_simulation_is_below_its_bound(in_turns: bool) -> None:
    simulator = Simulator()
    for profile, setting in random_settings(in_turns):
        small = dataclasses.replace(setting, num_microbatches=8)
        for schedule in ("afab", "advance_forward"):
            setting = dataclasses.replace(small, schedule=schedule)
            (bound,) = simulator.bounds(profile, [setting])
            found = simulator.predict(profile, setting)
            assert bound.iteration_s <= found.iteration_s * (1 + EXACT), (profile, setting)
            assert bound.memory == found.memory
            if not bound.at_least:
                assert bound.iteration_s == pytest.approx(found.iteration_s, rel=EXACT)


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_search_by_bounds_chooses_what_playing_everything_chooses(in_turns: bool) -> None:
    for seed in (1, 2, 5):
        profile = random_profile(seed, in_turns)
        settings = candidates(profile, 4, [4, 8, 16])
        played = [Simulator().predict(profile, setting) for setting in settings]
        limit = sorted(max(p.memory) for p in played)[len(played) * 3 // 4]
        result = search(profile, settings, limit, Simulator())
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

"""The simulation of several pipelines: in the executor's order, with nothing lost by counting periods and by bounds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from benchmarks.predictors import random_profile
from lightning_avgpipe.schedule import Action, Schedule, StageCosts, build
from lightning_avgpipe.tuning import Profile, Setting, Simulator, candidates, search, sharing
from lightning_avgpipe.tuning.scaling import Loads, loads_at
from lightning_avgpipe.tuning.sharing import iteration_s, steady_iteration_s

EXACT = 1e-9


def in_turns_s(schedule: Schedule, num_pipelines: int, costs: StageCosts) -> float:
    """Slow and plain: from instant to instant, every idle device takes what the executor would take."""
    stages, last = range(schedule.num_stages), schedule.num_stages - 1
    left = {(k, n): list(schedule.rows[k]) for k in stages for n in range(num_pipelines)}
    there: dict[tuple[int, int, Action], float] = {}
    for n, i in itertools.product(range(num_pipelines), range(schedule.num_microbatches)):
        there[0, n, Action("F", i)] = there[last, n, Action("B", i)] = 0.0
    busy, link, now = [0.0] * len(stages), {}, 0.0
    while any(left.values()):
        for k in stages:
            ready = [(row[0], n) for (j, n), row in left.items() if row and j == k]
            ready = [(action, n) for action, n in ready if there.get((k, n, action), now + 1) <= now]
            if busy[k] > now or not ready:
                continue
            action, n = min(ready, key=lambda r: (r[0].kind != "B", r[0].micro_batch, r[1]))
            left[k, n].pop(0)
            forward = action.kind == "F"
            busy[k] = now + (costs.forward_s if forward else costs.backward_s)[k]
            to, hop = (k + 1, k) if forward else (k - 1, k - 1)
            if 0 <= to <= last:
                send_s = (costs.send_forward_s if forward else costs.send_backward_s)[hop]
                link[forward, hop] = max(busy[k], link.get((forward, hop), 0.0)) + send_s
                there[to, n, action] = link[forward, hop] + costs.latency_s[hop]
        later = [t for t in (*busy, *there.values()) if t > now]
        now = min(later, default=now)
    return max(busy)


COSTS = {
    "balanced": StageCosts.uniform(3, 1.0, 2.0),
    "slow links": StageCosts.uniform(3, 1.0, 2.0, 4.0, 0.5),
    "uneven": StageCosts([1.0, 3.0, 2.0], [2.5, 5.0, 1.0], [0.25, 2.0], [0.5, 1.5], [0.125, 0.0]),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("schedule", ["1f1b", "advance_forward", "afab"])
def test_devices_in_turns_choose_as_the_executor_does(costs: StageCosts, schedule: str) -> None:
    for m, n in itertools.product((1, 2, 5), (1, 2, 3)):
        rows = build(schedule, 3, m, 1)
        found = iteration_s(rows, n, Loads.of(costs, n), range(3), in_turns=True)
        assert found == pytest.approx(in_turns_s(rows, n, costs), rel=EXACT), (m, n)


def test_a_backward_that_is_ready_goes_before_another_pipelines_forward() -> None:
    """Stage 1 has two of them as soon as it has done one; pipeline 1's forward waits for it.

    ::

        stage 0 | F0 F0'          B0 B0'        with ' for pipeline 1
        stage 1 |    F0 B0 B0 F0' B0' B0'
    """
    costs = StageCosts([1, 1], [1, 2], [0], [0], [0])
    schedule = build("1f1b", 2, 1)
    assert iteration_s(schedule, 2, Loads.of(costs, 2), (0, 1), in_turns=True) == 1 + (1 + 2) + (1 + 2) + 1


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
    monkeypatch.setattr(sharing, "build", lambda *args: (built.append(args[2]), build(*args))[1])
    counted = 0
    for profile, setting in random_settings(in_turns):
        loads, k, m = loads_at(profile, setting), profile.num_stages, setting.num_microbatches
        played = iteration_s(
            build(setting.schedule, k, m, setting.advance), setting.num_pipelines, loads, profile.devices, in_turns
        )
        built.clear()
        found = steady_iteration_s(setting, k, loads, profile.devices, in_turns)
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

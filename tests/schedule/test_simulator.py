"""The simulator against expected values, and what must hold for any costs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    InTurns,
    Schedule,
    SideBySide,
    StageCosts,
    Timeline,
    build,
    first_advance,
    simulate,
    uneven_steps,
    warm_up,
)
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.schedule.turns import ReplicatedStageCosts

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())[
    "cases"
]


def name(case: dict[str, Any]) -> str:
    return f"K{case['K']}-M{case['M']}-c{case['c']}-lat{case['lat']}"


@pytest.mark.parametrize("case", GOLDEN, ids=name)
def test_golden_values(case: dict[str, Any]) -> None:
    costs = StageCosts.uniform(case["K"], case["f"], case["b"], case["c"], case["lat"])
    for key, schedule in {
        "afab": build("afab", case["K"], case["M"]),
        "one_f_one_b": build("1f1b", case["K"], case["M"]),
        "advance_forward": build("advance_forward", case["K"], case["M"], case["advance_forward"]["h"]),
    }.items():
        timeline = simulate(schedule, costs)
        assert timeline.iteration_s == pytest.approx(case[key]["T"], abs=1e-9), key
        assert list(timeline.peak_stash) == case[key]["peak"], key
    assert list(warm_up("1f1b", case["K"], case["M"])) == case["one_f_one_b"]["w"]
    expected = case["advance_forward"]
    assert list(warm_up("advance_forward", case["K"], case["M"], expected["h"])) == expected["w"]
    assert first_advance(uneven_steps(costs), case["M"], costs) == expected["h"]  # the smallest sufficient one


def times_by_advance(num_microbatches: int, costs: StageCosts) -> list[float]:
    """Iteration seconds for the advances 0 (1F1B) to 3."""
    num_stages = len(costs.forward_s)
    return [simulate(build("advance_forward", num_stages, num_microbatches, h), costs).iteration_s for h in range(4)]


def test_more_advance_is_never_slower_if_stages_are_equal_and_links_are_faster() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_stages, forward_s, backward_s = rng.randint(1, 5), rng.random(), 2 * rng.random()
        hops, shorter = num_stages - 1, min(forward_s, backward_s)
        costs = StageCosts(
            (forward_s,) * num_stages,
            (backward_s,) * num_stages,
            tuple(shorter * rng.random() for _ in range(hops)),
            tuple(shorter * rng.random() for _ in range(hops)),
            tuple(4 * rng.random() for _ in range(hops)),  # latency occupies nothing, so it may be any
        )
        times = times_by_advance(rng.randint(1, 10), costs)
        assert all(more <= less + 1e-9 for less, more in itertools.pairwise(times))


def test_advance_may_be_slower_if_a_link_is_busier_than_the_stages() -> None:
    assert times_by_advance(5, StageCosts.uniform(3, 1, 1, send_s=10)) == [102, 86, 94, 104]


ONE, TWO = build("advance_forward", 3, 6, 1), [build("1f1b", 2, 3)] * 2


SIMULATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "one pipeline": (ONE, {}),
    "iterations without a drain": (ONE, {"iterations": 3}),
    "two pipelines in turns": ([ONE] * 2, {"sharing": InTurns}),
    "two pipelines side by side": ([ONE] * 2, {"sharing": SideBySide}),
    "replicas": (TWO, {"replicas": [(0, 1), (2,)]}),
    "replicas without a drain": (TWO, {"replicas": [(0, 1), (2,)], "iterations": 3}),
    "two stages on a device": (TWO, {"devices": (0, 0)}),
}


@pytest.mark.parametrize("case", SIMULATED)
def test_every_action_and_message_is_there_once_after_its_causes_and_alone_on_its_device_or_link(case: str) -> None:
    schedules, options = SIMULATED[case]
    schedule, count = (schedules, 1) if isinstance(schedules, Schedule) else (schedules[0], len(schedules))
    times = count * options.get("iterations", 1) * schedule.num_microbatches * 2
    timeline = simulate(schedules, StageCosts.uniform(schedule.num_stages, 1, 2, 0.5, 0.25), **options)
    assert timeline.num_pipelines == count and len(timeline.spans) == schedule.num_stages * times
    assert len(timeline.transfers) == (schedule.num_stages - 1) * times
    if "iterations" not in options:
        assert [timeline.schedule(n).rows for n in range(count)] == [schedule.rows] * count
    for device in timeline.rows if options.get("sharing") is not SideBySide else ():
        mine = [s for s in timeline.spans if timeline.device_of(s.stage, s.action.micro_batch) == device]
        assert_apart([(s.begin_s, s.end_s) for s in mine])
    for link in {(t.hop, t.direction) for t in timeline.transfers} if "replicas" not in options else ():
        assert_apart([(t.begin_s, t.end_s) for t in timeline.transfers if (t.hop, t.direction) == link])
    begins = {(s.pipeline, s.iteration, s.stage, s.action): s.begin_s for s in timeline.spans}
    for t in timeline.transfers:
        assert t.end_s - t.begin_s == pytest.approx(0.5) and t.arrival_s == pytest.approx(t.end_s + 0.25)
        stage, kind = (t.hop + 1, FORWARD) if t.direction == "forward" else (t.hop, BACKWARD)
        assert begins[t.pipeline, t.iteration, stage, Action(kind, t.micro_batch)] >= t.arrival_s


def assert_apart(intervals: list[tuple[float, float]]) -> None:
    """None begins before the one before has ended."""
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(sorted(intervals)))


# -- several pipelines on shared devices -----------------------------------------------------------------------------


EXACT = 1e-9


def in_turns_s(schedule: Schedule, num_pipelines: int, costs: StageCosts) -> float:
    """Slow and plain: from instant to instant, every idle device takes what the executor would take."""
    stages, last = range(schedule.num_stages), schedule.num_stages - 1
    left = {(k, n): list(schedule.rows[k]) for k in stages for n in range(num_pipelines)}
    there: dict[tuple[int, int, Action], float] = {}
    for n, i in itertools.product(range(num_pipelines), range(schedule.num_microbatches)):
        there[0, n, Action(FORWARD, i)] = there[last, n, Action(BACKWARD, i)] = 0.0
    busy, link, now = [0.0] * len(stages), {}, 0.0
    while any(left.values()):
        for k in stages:
            ready = [(row[0], n) for (j, n), row in left.items() if row and j == k]
            ready = [(action, n) for action, n in ready if there.get((k, n, action), now + 1) <= now]
            if busy[k] > now or not ready:
                continue
            action, n = min(ready, key=lambda r: (r[0].kind is FORWARD, r[0].micro_batch, r[1]))
            left[k, n].pop(0)
            forward = action.kind is FORWARD
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
        found = simulate([rows] * n, costs).iteration_s
        assert found == pytest.approx(in_turns_s(rows, n, costs), rel=EXACT), (m, n)


def test_actions_that_fill_their_device_take_as_long_side_by_side_as_in_turns() -> None:
    costs, schedule = StageCosts([1], [2], [], [], []), build("1f1b", 1, 3)
    for n in (1, 2, 4):
        assert simulate([schedule] * n, costs, sharing=SideBySide).iteration_s == pytest.approx(n * 9, rel=EXACT)


def test_a_device_with_two_stages_does_the_work_of_both() -> None:
    timeline = simulate(build("1f1b", 2, 4), StageCosts.uniform(2, 1, 2), devices=(0, 0))
    assert timeline.iteration_s == 2 * 4 * 3
    assert timeline.bubble_fraction == 0 and timeline.replicas == ((0,), (0,))


@pytest.mark.parametrize("sharing", [InTurns, SideBySide])
def test_two_pipelines_stash_as_much_as_one_at_least_and_twice_as_much_at_most(sharing: type) -> None:
    costs = StageCosts.uniform(3, 1, 2, 0.5, 0.25)
    together, alone = (simulate(schedules, costs, sharing=sharing).peak_stash for schedules in ([ONE] * 2, [ONE]))
    assert all(one <= both <= 2 * one for both, one in zip(together, alone, strict=True))


# -- iterations that follow one another without a drain --------------------------------------------------------------


ITERATIONS = 24


def rolling(
    count: int, num_stages: int, num_microbatches: int, send_s: float = 0.0, latency_s: float = 0.0
) -> Timeline:
    costs = StageCosts.uniform(num_stages, 1, 2, send_s, latency_s)
    return simulate([build("1f1b", num_stages, num_microbatches)] * count, costs, iterations=ITERATIONS)


# K, M, send, latency; speed-ups of N = 2 and 3 with a drain, and rolling. (Where the limit is not reached, lanes wait
# for each other's updates, or for a link.)
SPEED_UPS = [
    ((4, 4, 0.0, 0.0), (1.27, 1.40), (1.75, 1.75)),
    ((2, 2, 0.5, 0.5), (1.29, 1.43), (1.83, 1.83)),
    ((4, 3, 0.0, 0.0), (1.33, 1.50), (2.00, 2.00)),
    ((3, 2, 0.3, 1.0), (1.48, 1.77), (1.95, 2.87)),
    ((2, 2, 0.5, 1.5), (1.37, 1.56), (2.00, 2.17)),
]


@pytest.mark.parametrize(("sizes", "drained", "rolled"), SPEED_UPS)
def test_rolling_pipelines_come_near_the_limit_of_the_bubble(
    sizes: tuple[int, int, float, float], drained: tuple[float, float], rolled: tuple[float, float]
) -> None:
    num_stages, num_microbatches, send_s, latency_s = sizes
    costs = StageCosts.uniform(num_stages, 1, 2, send_s, latency_s)
    schedule = build("1f1b", num_stages, num_microbatches)
    one = simulate(schedule, costs)
    limit = 1 / (1 - one.bubble_fraction)
    for count, before, after in zip((2, 3), drained, rolled, strict=True):
        together = simulate([schedule] * count, costs).iteration_s
        assert count * one.iteration_s / together == pytest.approx(before, abs=0.005)
        speed_up = count * one.iteration_s / rolling(count, *sizes).steady_s
        assert speed_up == pytest.approx(after, abs=0.005)
        assert speed_up <= limit * 1.001


def test_two_rolling_pipelines_are_idle_only_where_the_first_begins_and_the_last_ends() -> None:
    timeline = rolling(2, 4, 4)
    assert timeline.bubble_fraction == pytest.approx(0, abs=1e-9)
    assert simulate([build("1f1b", 4, 4)] * 2, StageCosts.uniform(4, 1, 2)).bubble_fraction > 0.25
    for stage in range(4):
        spans = sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: s.begin_s)
        gaps = [after.begin_s - before.end_s for before, after in itertools.pairwise(spans)]
        middle = gaps[len(gaps) // 4 : -len(gaps) // 4]
        assert max(middle) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("sharing", [SideBySide, InTurns])
def test_no_action_begins_before_the_updates_that_make_its_weights(sharing: type) -> None:
    costs = StageCosts.uniform(3, 1, 2, 0.3, 0.4)
    schedules = [build("1f1b", 3, 4), build("advance_forward", 3, 4, 1), build("afab", 3, 4)]
    timeline = simulate(schedules, costs, iterations=6, sharing=sharing)
    for stage in range(3):
        spans = [s for s in timeline.spans if s.stage == stage]
        for one, other in itertools.product(spans, spans):  # updates come in the order (iteration, pipeline)
            if (one.iteration, one.pipeline) <= (other.iteration - 1, other.pipeline):
                assert other.begin_s >= one.end_s - 1e-9


# One pipeline takes 6 s a batch on one stage, and 9 s on two, of which each works for 6 s.
@pytest.mark.parametrize(
    ("num_stages", "update_s", "steady_s"), [(1, 0.0, 12), (1, 4.0, 12), (1, 7.0, 14), (2, 2.0, 12), (2, 20.0, 40)]
)
def test_a_pipeline_waits_for_its_own_update_and_for_earlier_ones(
    num_stages: int, update_s: float, steady_s: float
) -> None:
    schedules, costs = [build("1f1b", num_stages, 2)] * 2, StageCosts.uniform(num_stages, 1, 2)
    timeline = simulate(schedules, costs, iterations=ITERATIONS, updates_s=[update_s] * num_stages)
    assert timeline.steady_s == pytest.approx(steady_s)


def test_at_least_one_iteration_is_simulated() -> None:
    with pytest.raises(ScheduleError, match="iterations=0"):
        simulate(build("1f1b", 2, 2), StageCosts.uniform(2, 1, 2), iterations=0)


def test_the_command_draws_rolling_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rolls = ["1f1b", "--stages", "3", "--microbatches", "3", "--pipelines", "2", "--iterations", "12"]
    assert main([*rolls, "--output", str(tmp_path / "rolling.json")]) == 0
    assert "iteration 18 s, idle 0.0%" in capsys.readouterr().out
    assert (tmp_path / "rolling.json").exists()


def test_a_message_with_latency_comes_late_and_occupies_its_link_no_longer() -> None:
    free = [[float("inf")] * 2] * 2
    stages = ReplicatedStageCosts([1, 1], [1.0, 1.0], [0.0, 0.0], [0.0], [0.0], free, latency_s=5.0)
    # F0 to F3 of stage 0 end at 1, 2, 3, 4; stage 1 begins at 6 and goes on without a pause, since no message waits
    assert stages.ends_s(build("afab", 2, 4))[1] == pytest.approx(10.0)

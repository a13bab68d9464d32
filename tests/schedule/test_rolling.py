"""Iterations that follow one another without a drain, simulated."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import SideBySide, StageCosts, Timeline, build, simulate
from lightning_avgpipe.schedule.__main__ import main

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
    assert timeline.steady_bubble_fraction == pytest.approx(0, abs=1e-9)
    assert simulate([build("1f1b", 4, 4)] * 2, StageCosts.uniform(4, 1, 2)).bubble_fraction > 0.25
    for stage in range(4):
        spans = sorted((s for s in timeline.spans if s.stage == stage), key=lambda s: s.begin_s)
        gaps = [after.begin_s - before.end_s for before, after in itertools.pairwise(spans)]
        middle = gaps[len(gaps) // 4 : -len(gaps) // 4]
        assert max(middle) == pytest.approx(0, abs=1e-9)


def ends(timeline: Timeline, stage: int) -> dict[tuple[int, int], float]:
    """Iteration and pipeline -> when the stage has done it."""
    found: dict[tuple[int, int], float] = {}
    for span in timeline.spans:
        if span.stage == stage:
            key = span.iteration, span.pipeline
            found[key] = max(span.end_s, found.get(key, 0.0))
    return found


@pytest.mark.parametrize("sharing", [SideBySide, None])
def test_no_action_begins_before_the_updates_that_make_its_weights(sharing: type[SideBySide] | None) -> None:
    costs = StageCosts.uniform(3, 1, 2, 0.3, 0.4)
    schedules = [build("1f1b", 3, 4), build("advance_forward", 3, 4, 1), build("afab", 3, 4)]
    options = {} if sharing is None else {"sharing": sharing}
    timeline = simulate(schedules, costs, iterations=6, **options)
    assert len(timeline.spans) == 3 * 3 * 4 * 2 * 6
    for stage in range(3):
        done = ends(timeline, stage)
        for span in (s for s in timeline.spans if s.stage == stage):
            for (t, n), end_s in done.items():  # updates come in the order (iteration, pipeline)
                if (t, n) <= (span.iteration - 1, span.pipeline):
                    assert span.begin_s >= end_s - 1e-9


def test_at_least_one_iteration_is_simulated() -> None:
    with pytest.raises(ScheduleError, match="iterations=0"):
        simulate(build("1f1b", 2, 2), StageCosts.uniform(2, 1, 2), iterations=0)


def test_the_command_draws_rolling_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rolls = ["1f1b", "--stages", "3", "--microbatches", "3", "--pipelines", "2", "--iterations", "12"]
    assert main([*rolls, "--output", str(tmp_path / "rolling.json")]) == 0
    assert "iteration 18 s, idle 0.0%" in capsys.readouterr().out
    assert (tmp_path / "rolling.json").exists()

"""Adaptive advance on made-up times: what it finds, what it never does, and when it begins anew."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import StageCosts, build, simulate, warm_up
from lightning_avgpipe.schedule.adaptive import DROPPED, WINDOW, AdaptiveAdvance, IterationShape, State

SHAPE = IterationShape(num_microbatches=32, num_pipelines=1, num_stages=4)


def is_chosen(state: State) -> bool:
    """Whether the search has ended."""
    return state.best is not None


def even(shape: IterationShape, advance: int) -> Sequence[int]:
    """The warm-up of equal stages."""
    return warm_up("advance_forward", shape.num_stages, shape.num_microbatches, advance)


def stash(shape: IterationShape, advance: int) -> Sequence[float]:
    """A byte for each stashed micro-batch."""
    return [min(shape.num_microbatches, w + 1) for w in even(shape, advance)]


def adaptive(start: int = 0, predicted_peak: Any = stash, memory_limit: float = math.inf) -> AdaptiveAdvance:
    return AdaptiveAdvance(start, predicted_peak, memory_limit, even)


def run(
    controller: AdaptiveAdvance, times: Callable[[int], float], iterations: int, shape: IterationShape = SHAPE
) -> list[int]:
    """The advance of each iteration, which takes ``times(advance)`` seconds."""
    used = []
    for _ in range(iterations):
        used.append(controller.advance(shape))
        controller.observe(shape, times(used[-1]))
    return used


def steady(times: Sequence[float]) -> Callable[[int], float]:
    """Times without noise; the last one for every larger advance."""
    return lambda advance: times[min(advance, len(times) - 1)]


def test_it_steps_by_one_after_ten_iterations_and_goes_back_once() -> None:
    controller = adaptive()
    window = DROPPED + WINDOW
    used = run(controller, steady([10, 8, 6, 6]), 5 * window)
    assert used == [0] * window + [1] * window + [2] * window + [3] * window + [2] * window
    state = controller.state(SHAPE)
    assert is_chosen(state)
    assert "6 s with advance 3 is no gain over 6 s with advance 2" in state.reason


def test_the_first_two_iterations_after_a_change_do_not_count() -> None:
    controller = adaptive()
    for seconds in [100, 100, *[10] * WINDOW, 100, 100, *[5] * WINDOW]:
        controller.observe(SHAPE, seconds)
    assert controller.advance(SHAPE) == 2


def test_memory_is_checked_on_every_stage_before_a_step() -> None:
    asked = []

    def predicted(shape: IterationShape, advance: int) -> Sequence[float]:
        asked.append(advance)
        return [1.0, 1.0 + advance, 1.0, 1.0]

    controller = adaptive(0, predicted, 3.0)
    assert max(run(controller, lambda advance: 10.0 / (1 + advance), 100)) == 2
    assert max(asked) == 3
    state = controller.state(SHAPE)
    assert is_chosen(state)
    assert "advance 3 would need 4 bytes on stage 1, the limit is 3" in state.reason


def test_a_first_advance_that_does_not_fit_is_lowered_and_none_at_all_is_an_error() -> None:
    assert adaptive(5, memory_limit=7).advance(SHAPE) == 1
    with pytest.raises(ScheduleError, match="advance 0 would need 4 bytes on stage 0, the limit is 3, even with no"):
        adaptive(5, memory_limit=3).advance(SHAPE)


@pytest.mark.parametrize(
    "other",
    [
        IterationShape(16, 1, 4),
        IterationShape(32, 2, 4),
        IterationShape(32, 1, 5),
        IterationShape(32, 1, 4, length_bucket=1),
    ],
    ids=["M", "N", "K", "length"],
)
def test_another_shape_begins_anew_and_a_known_one_goes_on(other: IterationShape) -> None:
    controller = adaptive()
    run(controller, steady([10, 8, 8]), 100)
    assert controller.state(other).ignored == DROPPED and not is_chosen(controller.state(other))
    assert controller.advance(other) == 0
    run(controller, steady([10, 10]), 25, other)
    assert controller.advance(other) == 0
    assert is_chosen(controller.state(SHAPE))
    assert controller.advance(SHAPE) == 1


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_drift_of_more_than_ten_per_cent_begins_anew_where_it_stands(factor: float) -> None:
    controller = adaptive()
    run(controller, steady([10, 8, 8]), 100)
    assert set(run(controller, steady([10, 8 * (1 + 0.09)]), 5 * WINDOW)) == {1}
    assert is_chosen(controller.state(SHAPE))
    used = run(controller, steady([10, 8 * factor, 6 * factor, 6 * factor]), 100)
    assert used[0] == 1
    assert set(used) == {1, 2, 3}
    assert controller.advance(SHAPE) == 2


def test_single_slow_iterations_are_no_drift() -> None:
    controller = adaptive()
    run(controller, steady([10, 10]), 40)
    for i in range(200):
        controller.observe(SHAPE, 50.0 if i % 3 == 0 else 10.0)
        assert is_chosen(controller.state(SHAPE))


def test_it_goes_on_from_any_state_that_was_saved() -> None:
    other = IterationShape(16, 1, 4, 3)
    controller = adaptive()
    rng = random.Random(0)
    kinds = set()
    for i in range(100):
        shape = SHAPE if i % 3 else other
        saved = json.loads(json.dumps(controller.state_dict()))
        resumed = adaptive()
        resumed.load_state_dict(saved)
        assert resumed.state(shape) == controller.state(shape)
        kinds.add((controller.state(shape).ignored > 0, is_chosen(controller.state(shape))))
        controller.observe(shape, steady([10, 8, 6, 6])(controller.advance(shape)) * rng.uniform(0.99, 1.01))
    assert kinds == {(True, False), (False, False), (True, True), (False, True)}


def random_times(seed: int) -> tuple[IterationShape, list[float]]:
    """A random pipeline of equal stages: its iteration seconds by advance."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randint(2, 6), rng.choice([4, 8, 12, 20])
    forward_s, backward_s = rng.uniform(0.5, 1.5), rng.uniform(0.5, 3.5)
    send_s = (forward_s + backward_s) * rng.choice([0, 0.1, 0.25, 0.5, 1, 1.5, 2])
    latency_s = (forward_s + backward_s) * rng.choice([0, 0, 0.1, 0.5, 1])
    costs = StageCosts.uniform(num_stages, forward_s, backward_s, send_s, latency_s)
    schedules = (build("advance_forward", num_stages, num_microbatches, h) for h in range(num_microbatches))
    shape = IterationShape(num_microbatches, 1, num_stages)
    return shape, [simulate(schedule, costs).iteration_s for schedule in schedules]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_it_finds_the_best_within_noise_in_99_of_100_runs(noise: float) -> None:
    """No advance is faster by more than 2.5%: two standard errors of two medians of 8 at 2% noise."""
    rng, found = random.Random(0), 0
    for shape, times in map(random_times, range(400)):
        controller = adaptive()
        for _ in range(1000):
            # now and then an iteration takes much longer
            slow = rng.uniform(1.2, 3) if rng.random() < 0.03 else 1.0
            seconds = steady(times)(controller.advance(shape)) * max(0.1, rng.gauss(1, noise)) * slow
            controller.observe(shape, seconds)
            if is_chosen(controller.state(shape)):
                break
        found += steady(times)(controller.advance(shape)) <= 1.025 * min(times)
    assert found >= 396


RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "advance_times.json").read_text())


@pytest.mark.parametrize("offset", range(12))
def test_recorded_times_of_real_processes_lead_to_the_fastest_advance(offset: int) -> None:
    """Times of four processes on slow links, from any of them on: which iterations count must not matter."""
    times = [itertools.cycle([*seconds[offset:], *seconds[:offset]]) for seconds in RECORDED["seconds"]]
    shape = IterationShape(RECORDED["microbatches"], 1, RECORDED["stages"])
    controller = adaptive()
    run(controller, lambda advance: next(times[advance]), 400, shape)
    medians = [statistics.median(seconds) for seconds in RECORDED["seconds"]]
    assert medians[controller.advance(shape)] <= 1.01 * min(medians)

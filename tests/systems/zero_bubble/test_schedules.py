"""Zero-bubble schedules: idleness as their papers have it for any durations, and never slower than 1F1B.

How they look, and what they stash, is in the gallery: tests/schedule/test_gallery.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lightning_avgpipe.schedule import StageCosts, Timeline, build, check, simulate
from lightning_avgpipe.systems.zero_bubble import halved
from tests.schedule.test_several_stages import stashed, thirds

SIZES = list(itertools.product(range(1, 6), range(1, 9)))  # K, M
SECONDS = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (1.0, 0.5, 1.0), (1.0, 1.0, 2.0), (1.0, 1.0, 0.0)]


def costs_of(num_stages: int, forward_s: float, input_s: float, weight_s: float) -> StageCosts:
    return halved(StageCosts.uniform(num_stages, forward_s, input_s + weight_s), (input_s,) * num_stages)


def idle_s(timeline: Timeline) -> list[float]:
    """Of each stage, from the begin of its first action to the end of its last."""
    spans = [[span for span in timeline.spans if span.stage == k] for k in range(timeline.num_stages)]
    return [
        max(s.end_s for s in of) - min(s.begin_s for s in of) - sum(s.end_s - s.begin_s for s in of) for of in spans
    ]


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (1.0, 2.0, 1.0)])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_stages_are_idle_for_as_long_as_the_papers_formulas_say(
    num_stages: int, seconds: tuple[float, float, float]
) -> None:
    """They hold where the weight half is not the longer one, for enough micro-batches."""
    f, i, w = seconds
    costs, num_microbatches = costs_of(num_stages, f, i, w), 3 * num_stages
    for name, each in {"1f1b": f + i + w, "zb_h1": f + i - w, "zb_h2": f + i - 2 * w}.items():
        timeline = simulate(build(name, num_stages, num_microbatches), costs)
        assert idle_s(timeline) == pytest.approx([(num_stages - 1 - k) * each for k in range(num_stages)]), name


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_every_size_is_complete_finishes_and_is_not_slower_than_1f1b(name: str) -> None:
    for k, m in SIZES:
        schedule, plain = build(name, k, m), build("1f1b", k, m)
        check(schedule)
        assert [len(row) for row in schedule] == [3 * m] * k
        for seconds in SECONDS:
            costs, least = costs_of(k, *seconds), m * sum(seconds) + (k - 1) * seconds[0]
            found = simulate(schedule, costs).iteration_s
            assert least - 1e-9 <= found <= simulate(plain, costs).iteration_s + 1e-9, (k, m, seconds)


def test_in_zbv_no_process_is_idle_between_its_first_action_and_its_last() -> None:
    for devices in (1, 2, 3, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            schedule = build("zbv", 2 * devices, num_microbatches)
            timeline = simulate(schedule, thirds(2 * devices))
            assert timeline.iteration_s == 6 * num_microbatches + devices - 1
            assert max(stashed(schedule)) <= 2 * devices  # of half the layers each: as the first stage of 1F1B


def test_in_zbv_messages_that_come_a_little_late_are_waited_for_at_the_ends_only() -> None:
    for devices in (2, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            late = replace(thirds(2 * devices), latency_s=(0.1,) * (2 * devices - 1))
            timeline = simulate(build("zbv", 2 * devices, num_microbatches), late)
            assert timeline.iteration_s == pytest.approx(6 * num_microbatches + 1.5 * (devices - 1))

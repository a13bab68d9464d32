"""Zero-bubble schedules: idleness and memory as their paper has them, and never slower than 1F1B."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lightning_avgpipe.schedule import StageCosts, Timeline, build, check, simulate
from lightning_avgpipe.systems.zero_bubble import halved
from tests.schedule import test_several_stages as several
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


def test_zb_h1_has_a_weight_gradient_behind_for_each_stage_before() -> None:
    assert str(build("zb_h1", 3, 4)) == (
        "stage 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
        "stage 1 | F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\n"
        "stage 2 | F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    )  # fmt: skip


def test_zb_h2_is_twice_as_far_ahead_and_behind() -> None:
    assert str(build("zb_h2", 2, 5)) == (
        "stage 0 | F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4\n"
        "stage 1 | F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4"
    )  # fmt: skip


def drawn(timeline: Timeline) -> list[str]:
    """A character for each second and stage."""
    rows = []
    for k in range(timeline.num_stages):
        cells = ["."] * round(timeline.iteration_s)
        for span in timeline.spans:
            if span.stage == k:
                cells[round(span.begin_s)] = span.action.kind.symbol
        rows.append("".join(cells))
    return rows


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


def test_zb_h1_stashes_as_many_as_the_first_stage_of_1f1b_and_zb_h2_nearly_twice_as_many() -> None:
    for k, m in SIZES:
        costs = StageCosts.uniform(k, 1, 2)
        one, h1, h2 = (set(simulate(build(name, k, m), costs).peak_stash) for name in ("1f1b", "zb_h1", "zb_h2"))
        assert h1 == {max(one)} == {min(m, k)}
        assert h2 == {min(m, 2 * k - 1)}


# -- several stages on each process ------------------------------------------------------------------------------------


def test_in_zbv_no_process_is_idle_between_its_first_action_and_its_last() -> None:
    for devices in (1, 2, 3, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            schedule = build("zbv", 2 * devices, num_microbatches)
            timeline = simulate(schedule, thirds(2 * devices))
            assert timeline.iteration_s == 6 * num_microbatches + devices - 1
            assert max(stashed(schedule)) <= 2 * devices  # of half the layers each: as the first stage of 1F1B
    assert several.drawn(simulate(build("zbv", 4, 4), thirds(4))) == [
        "FFFfiwfiwFIWfiwIWfiwIWIW.",
        ".FfFfiwFIWfiwFIWfiwIiIwWW",
    ]


def test_in_zbv_messages_that_come_a_little_late_are_waited_for_at_the_ends_only() -> None:
    for devices in (2, 4, 6):
        for num_microbatches in (2 * devices, 5 * devices):
            late = replace(thirds(2 * devices), latency_s=(0.1,) * (2 * devices - 1))
            timeline = simulate(build("zbv", 2 * devices, num_microbatches), late)
            assert timeline.iteration_s == pytest.approx(6 * num_microbatches + 1.5 * (devices - 1))


def test_dualpipev_pairs_a_forward_of_one_stage_with_a_backward_of_the_other() -> None:
    schedule = build("dualpipev", 8, 16)
    assert simulate(schedule, thirds(8)).iteration_s == 6 * 16 + 4
    assert max(stashed(schedule)) <= 9


def test_in_chimera_micro_batches_go_both_ways() -> None:
    schedule = build("chimera", 8, 4)
    assert schedule.devices == (0, 1, 2, 3, 3, 2, 1, 0) and schedule.length == 4
    assert [list(schedule.micro_batches(k)) for k in (0, 3, 4, 7)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert several.drawn(simulate(schedule, StageCosts.uniform(8, 1, 1))) == [
        "FF.fbfbB.B",
        ".FfFfbBbB.",
        ".fFfFBbBb.",
        "ff.FBFBb.b",
    ]
    assert stashed(schedule) == [3, 4, 4, 3]


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_chimera_is_idle_for_d_minus_2_of_equal_actions_and_with_longer_backwards_for_as_many_of_them(
    devices: int,
) -> None:
    for num_microbatches in (devices, 2 * devices, 4 * devices):
        schedule = build("chimera", 2 * devices, num_microbatches)
        timeline = simulate(schedule, StageCosts.uniform(2 * devices, 1, 1))
        assert timeline.iteration_s == 2 * num_microbatches + devices - 2
        assert max(stashed(schedule)) <= devices
    timeline = simulate(build("chimera", 2 * devices, devices), thirds(2 * devices))
    assert timeline.iteration_s == 3 * devices + 2 * (devices - 2)

"""Stages with nothing to train run forwards only; the simulator and the checks know it."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.schedule import (
    StageCosts,
    build,
    check,
    forward_only,
    num_forward_only,
    peak_stash,
    simulate,
)


def test_the_others_keep_their_rows() -> None:
    schedule = forward_only(build("1f1b", 3, 4), 1)
    assert str(schedule).splitlines() == [
        "stage 0 | F0 F1 F2 F3",
        "stage 1 | F0 F1 B0 F2 B1 F3 B2 B3",
        "stage 2 | F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert num_forward_only(schedule) == 1 and peak_stash(schedule) == (0, 2, 1)


@pytest.mark.parametrize("name", ["1f1b", "afab", "advance_forward", "zb_h1", "zb_h2"])
def test_they_neither_wait_for_gradients_nor_get_any(name: str) -> None:
    for num_stages, frozen, count in itertools.product((2, 4), (1, 3), (1, 4)):
        if frozen >= num_stages:
            continue
        schedule = forward_only(build(name, num_stages, count, 1), frozen)
        check(schedule)
        timeline = simulate([schedule] * 2, StageCosts.uniform(num_stages, 1.0, 2.0, 0.5, 0.1))
        assert len(timeline.spans) == 2 * sum(map(len, schedule.rows))
        hops = {(t.direction, t.hop) for t in timeline.transfers}
        assert hops == {("forward", k) for k in range(num_stages - 1)} | {
            ("backward", k) for k in range(frozen, num_stages - 1)
        }
        assert num_forward_only(timeline.schedule()) == frozen


def test_an_iteration_takes_as_long_as_those_that_train() -> None:
    costs = StageCosts.uniform(4, 1.0, 2.0)
    times = [simulate(forward_only(build("1f1b", 4, 8), frozen), costs).iteration_s for frozen in range(4)]
    assert times == [(8 + 3 - frozen) * 3.0 + frozen for frozen in range(4)]

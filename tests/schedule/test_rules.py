"""What follows from the kinds of actions, for any of them."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Schedule,
    StageCosts,
    build,
    check,
    forward_only,
    num_forward_only,
    peak_stash,
    simulate,
)
from lightning_avgpipe.systems.zero_bubble import INPUT_GRADIENT, WEIGHT_GRADIENT

F0, B0, I0, W0 = (Action(kind, 0) for kind in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT))
F1, B1 = Action(FORWARD, 1), Action(BACKWARD, 1)


def test_a_micro_batch_is_stashed_until_nothing_of_it_is_left() -> None:
    assert peak_stash([(F0, B0, F1), (F0, I0, F1), (F0, I0, W0, F1), (F0, F1)]) == (1, 2, 1, 0)


def test_a_stage_may_split_its_backwards_where_its_neighbour_does_not() -> None:
    mixed = Schedule("mixed", 2, 1, ((F0, B0), (F0, I0, W0)))
    check(mixed)
    timeline = simulate(mixed, StageCosts.uniform(2, 1, 2))
    # stage 1 sends after its input gradient already
    assert timeline.iteration_s == 1 + 1 + 1 + 2
    assert timeline.peak_stash == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((F0,), "stage 1 has 1 actions and misses B0"),
        ((F0, F0, B0), "stage 1 has 3 actions and repeats F0"),
        ((F0, B1), "stage 1 has 2 actions and misses B0; has no use for B1"),
        ((F0, I0), "misses W0"),
        ((F0, W0), "misses I0"),
        ((F0, B0, W0), "has no use for W0"),
        ((F0, I0, W0, W0), "repeats W0"),
    ],
)
def test_a_row_that_is_not_complete_is_named(row: tuple[Action, ...], message: str) -> None:
    by_hand = Schedule("by hand", 2, 1, ((F0, B0), row))
    with pytest.raises(ScheduleError, match=message):
        check(by_hand)
    with pytest.raises(ScheduleError, match=message):
        simulate(by_hand, StageCosts.uniform(2, 1, 1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((F0, B0, F1, B1), (F0, F1, B0, B1)), "stage 0 at B0, stage 1 at F1"),
        (((F0, B0, F1, B1), (B0, F0, F1, B1)), "stage 0 at B0, stage 1 at B0"),  # before its own forward
        (((F0, W0, I0),), "stage 0 at W0.*W waits for its own I"),
    ],
)
def test_a_schedule_that_does_not_end_says_where_it_stands(rows: tuple[tuple[Action, ...], ...], message: str) -> None:
    stuck = Schedule("by hand", len(rows), len(rows[0]) // 2, rows)
    with pytest.raises(DeadlockError, match=message):
        simulate(stuck, StageCosts.uniform(len(rows), 1, 1))


# -- stages with nothing to train run forwards only ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "afab", "advance_forward", "zb_h1", "zb_h2"])
def test_they_neither_wait_for_gradients_nor_get_any(name: str) -> None:
    for num_stages, frozen, count in itertools.product((2, 4), (1, 3), (1, 4)):
        if frozen >= num_stages:
            continue
        whole = build(name, num_stages, count, 1)
        schedule = forward_only(whole, frozen)
        check(schedule)
        assert schedule.rows[frozen:] == whole.rows[frozen:]
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

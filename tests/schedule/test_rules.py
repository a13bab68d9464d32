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


def test_a_micro_batch_is_stashed_until_nothing_of_it_is_left() -> None:
    f1 = Action(FORWARD, 1)
    assert peak_stash([(F0, B0, f1), (F0, I0, f1), (F0, I0, W0, f1), (F0, f1)]) == (1, 2, 1, 0)


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
        ((F0, I0), "misses W0"),
        ((F0, W0), "misses I0"),
        ((F0, B0, W0), "has no use for W0"),
        ((F0, I0, W0, W0), "repeats W0"),
    ],
)
def test_half_a_backward_is_named(row: tuple[Action, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(Schedule("by hand", 1, 1, (row,)))


def test_a_weight_gradient_before_its_input_gradient_is_a_deadlock_that_says_why() -> None:
    stuck = Schedule("by hand", 1, 1, ((F0, W0, I0),))
    with pytest.raises(DeadlockError, match=r"stage 0 at W0.*W waits for its own I"):
        simulate(stuck, StageCosts.uniform(1, 1, 2))


# -- stages with nothing to train run forwards only ------------------------------------------------------------------


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

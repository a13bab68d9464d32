"""What follows from the kinds of actions, for any of them."""

from __future__ import annotations

import pytest

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Schedule,
    StageCosts,
    check,
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

"""What follows from the kinds of actions, for any of them."""

from __future__ import annotations

import copy
import pickle

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
    peak_stash,
    simulate,
)
from lightning_avgpipe.schedule.kinds import COURSES, KINDS
from lightning_avgpipe.schedule.rules import in_words, needs, receiver, sender, urgency
from lightning_avgpipe.systems.zero_bubble import INPUT_GRADIENT, WEIGHT_GRADIENT, halved

F0, B0, I0, W0 = (Action(kind, 0) for kind in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT))


def test_a_kind_is_the_same_object_after_a_journey() -> None:
    for kind in KINDS:
        assert pickle.loads(pickle.dumps(kind)) is kind and copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(F0)) == F0


def test_kinds_have_symbols_and_names_of_their_own() -> None:
    for of in ("symbol", "name"):
        assert len({getattr(kind, of) for kind in KINDS}) == len(KINDS)
    costs = halved(StageCosts((7, 1), (5, 5), (0,), (0,), (0,)), (2, 2))
    assert {str(kind): costs.pieces(kind, 1) for kind in KINDS} == {
        symbol: ((seconds, 1.0),) for symbol, seconds in {"F": 1, "B": 5, "I": 2, "W": 3, "G": 1, "D": 8}.items()
    }


def test_every_course_of_training_frees_what_it_stashes_and_has_what_its_kinds_wait_for() -> None:
    for course in COURSES[1:]:
        assert sum(kind.stash for kind in course) == 0
        for i, kind in enumerate(course):
            assert set(kind.after) <= {before.counts_as or before for before in course[:i]}


def test_messages_go_to_neighbours_and_end_at_the_ends() -> None:
    assert [sender(FORWARD, k, 3) for k in range(3)] == [None, 0, 1]
    assert [receiver(FORWARD, k, 3) for k in range(3)] == [1, 2, None]
    for kind in (BACKWARD, INPUT_GRADIENT):
        assert [sender(kind, k, 3) for k in range(3)] == [1, 2, None]
        assert [receiver(kind, k, 3) for k in range(3)] == [None, 0, 1]
    assert {sender(WEIGHT_GRADIENT, k, 3) for k in range(3)} == {receiver(WEIGHT_GRADIENT, k, 3) for k in range(3)}
    assert needs(I0, 1, 3) == {(1, FORWARD, 0), (1, "backward", 0)}
    assert needs(W0, 1, 3) == {(1, INPUT_GRADIENT, 0)}


def test_backwards_go_first_and_weight_gradients_last() -> None:
    actions = [Action(kind, i) for i in (0, 1) for kind in (WEIGHT_GRADIENT, FORWARD, BACKWARD)]
    assert [str(action) for action in sorted(actions, key=urgency)] == ["B0", "B1", "F0", "F1", "W0", "W1"]


def test_what_an_action_waits_for_can_be_said() -> None:
    assert in_words(FORWARD) == "F waits for the stage before"
    assert in_words(INPUT_GRADIENT) == "I waits for its own F and for the stage after"
    assert in_words(WEIGHT_GRADIENT) == "W waits for its own I"


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


def seconds(costs: StageCosts) -> list[float]:
    return [costs.seconds(kind, 1) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD)]


def test_measured_costs_know_halves_and_sum_them_up() -> None:
    costs = halved(StageCosts.uniform(2, 1, 3, 0.5, 0.25), (2, 2))
    assert seconds(StageCosts.measured(simulate(build("zb_h1", 2, 4), costs))) == [2, 1, 3]
    assert seconds(StageCosts.measured(simulate(build("1f1b", 2, 4), costs))) == [1.5, 1.5, 3]


def test_an_input_gradient_does_not_take_longer_than_its_backward() -> None:
    with pytest.raises(ScheduleError, match=r"weight gradient=\[-1\]"):
        halved(StageCosts((1,), (2,), (), (), ()), (3,))

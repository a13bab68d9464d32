"""Schedules as data: their order, their bounds, and that they finish."""

from __future__ import annotations

import itertools
import random
import statistics

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
    first_advance,
    forward_only,
    from_warm_up,
    num_forward_only,
    peak_stash,
    simulate,
    stepped_warm_up,
    uneven_steps,
    warm_up,
)
from lightning_avgpipe.systems.zero_bubble import INPUT_GRADIENT, WEIGHT_GRADIENT


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "advance", "rows"),
    [
        ("1f1b", 3, 4, 0, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("afab", 2, 3, 0, ["F0 F1 F2 B0 B1 B2"] * 2),
        (
            # runs twice as far ahead as 1F1B
            "advance_forward", 3, 6, 1, [
                "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
            ],
        ),
        ("forward", 2, 3, 0, ["F0 F1 F2"] * 2),
    ],
)  # fmt: skip
def test_a_schedule_is_its_rows(
    name: str, num_stages: int, num_microbatches: int, advance: int, rows: list[str]
) -> None:
    found = str(build(name, num_stages, num_microbatches, advance))
    assert found.splitlines() == [f"stage {k} | {row}" for k, row in enumerate(rows)]


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_no_advance_is_1f1b_and_a_large_one_is_afab(num_stages: int, num_microbatches: int) -> None:
    none, far = (build("advance_forward", num_stages, num_microbatches, h) for h in (0, num_microbatches))
    assert none.rows == build("1f1b", num_stages, num_microbatches).rows
    assert far.rows[:-1] == build("afab", num_stages, num_microbatches).rows[:-1]


def finishes(rows: Schedule) -> bool:
    try:
        check(rows)
    except DeadlockError:
        return False
    return True


def test_a_warm_up_is_accepted_exactly_if_its_schedule_finishes() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(500):
        num_stages, num_microbatches = rng.randint(1, 6), rng.randint(1, 7)
        wanted = [rng.randint(0, num_microbatches) for _ in range(num_stages)]
        rows = tuple(from_warm_up([w], num_microbatches).rows[0] for w in wanted)  # each stage alone is fine
        by_hand = Schedule("by hand", num_stages, num_microbatches, rows)
        if finishes(by_hand):
            assert from_warm_up(wanted, num_microbatches).rows == rows
        else:
            refused += 1
            with pytest.raises(DeadlockError, match=r"must not increase from stage to stage:\nstage 0 \|"):
                from_warm_up(wanted, num_microbatches)
    assert 50 < refused < 450


def random_costs(rng: random.Random, num_stages: int) -> StageCosts:
    def times(count: int, largest: float) -> tuple[float, ...]:
        return tuple(rng.uniform(0, largest) for _ in range(count))

    hops = num_stages - 1
    return StageCosts(times(num_stages, 1), times(num_stages, 2), times(hops, 2), times(hops, 2), times(hops, 2))


def test_stash_never_exceeds_warm_up_plus_one() -> None:
    rng = random.Random(1)
    for _ in range(200):
        num_stages, num_microbatches, advance = rng.randint(1, 6), rng.randint(1, 12), rng.randint(0, 3)
        schedule = build("advance_forward", num_stages, num_microbatches, advance)
        timeline = simulate(schedule, random_costs(rng, num_stages))
        expected = warm_up("advance_forward", num_stages, num_microbatches, advance)
        for peak, ahead in zip(timeline.peak_stash, expected, strict=True):
            assert peak == min(num_microbatches, ahead + 1)


def uneven_warm_up(costs: StageCosts, num_microbatches: int) -> tuple[int, ...]:
    steps = uneven_steps(costs)
    return stepped_warm_up(steps, num_microbatches, max(steps, default=1) - 1)


def test_a_larger_advance_is_never_a_smaller_warm_up_and_never_a_deadlock() -> None:
    rng = random.Random(3)
    for _ in range(80):
        steps = [rng.randint(1, 6) for _ in range(rng.randint(0, 5))]
        num_microbatches = rng.randint(1, 20)
        before = [0] * (len(steps) + 1)
        for advance in range(10):
            ahead = stepped_warm_up(steps, num_microbatches, advance)
            assert all(a >= b for a, b in zip(ahead, before, strict=True))
            check(from_warm_up(ahead, num_microbatches))
            before = list(ahead)


def test_the_first_advance_is_never_slower_than_1f1b_and_stashes_what_it_says() -> None:
    rng = random.Random(4)
    gains = []
    for _ in range(200):
        costs = random_costs(rng, rng.randint(1, 5))
        num_stages, num_microbatches = len(costs.forward_s), rng.choice([1, 3, 8, 24])
        steps = uneven_steps(costs)
        advance = first_advance(steps, num_microbatches, costs)
        ahead = stepped_warm_up(steps, num_microbatches, advance)
        timeline = simulate(from_warm_up(ahead, num_microbatches), costs)
        plain = simulate(build("1f1b", num_stages, num_microbatches), costs)
        assert timeline.iteration_s <= plain.iteration_s
        assert all(peak <= w + 1 for peak, w in zip(timeline.peak_stash, ahead, strict=True))
        assert advance == 0 or timeline.iteration_s < plain.iteration_s
        gains.append(plain.iteration_s / timeline.iteration_s)
    assert statistics.mean(gains) > 1.2  # such links are slow


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("1f1b", 2, 0), "num_microbatches=0"),
        (lambda: build("1f1b", 0, 2), "num_stages=0"),
        (lambda: build("zigzag", 2, 2), "unknown schedule 'zigzag'; use one of 'advance_forward'"),
        (lambda: build("advance_forward", 2, 2, advance=-1), "advance=-1"),
        (lambda: from_warm_up([-1], 2), r"warm_up=\(-1,\)"),
        (lambda: StageCosts((1, 1), (1,), (), (), ()), "backward_s has 1 entries"),
        (lambda: uneven_warm_up(StageCosts.uniform(2, 1, 1), 0), "num_microbatches=0"),
        (lambda: StageCosts((1, 1), (1, 1), (1,), (-1,), (0,)), r"send_backward_s=\[-1\]: times must be finite"),
        (lambda: StageCosts.uniform(1, float("nan"), 1), r"forward_s=\[nan\]: times must be finite"),
        (lambda: StageCosts.uniform(0, 1, 1), "forward_s has no entries"),
        (lambda: Schedule("by hand", 2, 1, ((Action(FORWARD, 0),),)), "1 rows for 2 stages"),
        (lambda: simulate(build("1f1b", 3, 2), StageCosts.uniform(2, 1, 1)), "costs for 2 stages"),
    ],
)
def test_errors_name_what_was_found(call: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        call()  # type: ignore[operator]


# -- what follows from the kinds of actions, for any of them ---------------------------------------------------------


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

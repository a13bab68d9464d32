"""Which weights actions use, and how many copies that takes."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import BACKWARD, Span, StageCosts, policies
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.schedule.picture import chrome_trace
from lightning_avgpipe.systems.asynchronous.versions import PipeOptim, Place, Use
from tests.systems.asynchronous.policies import POLICIES


def uses(name: str, micro_batch: int, num_stages: int = 4, num_microbatches: int = 1) -> list[tuple[Use, Use]]:
    places = [Place(k, num_stages, num_microbatches) for k in range(num_stages)]
    return [POLICIES[name].uses(place, micro_batch) for place in places]


def test_a_forward_meets_what_the_backwards_before_it_have_made() -> None:
    assert [Place(k, 4).met(4) for k in range(4)] == [1, 2, 3, 4]
    assert [Place(k, 4).met(1) for k in range(4)] == [0, 0, 0, 1]
    assert [Place(k, 4).staleness(4) for k in range(4)] == [3, 2, 1, 0]
    assert [Place(0, 4, 4).staleness(i) for i in range(12)] == [0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0]


def test_what_each_policy_uses() -> None:
    now = Use(4)
    assert uses("flush", 4) == [(now, now)] * 4
    assert uses("stash", 4) == [(Use(v), Use(v)) for v in (1, 2, 3, 4)]
    assert uses("none", 4) == [(Use(v), now) for v in (1, 2, 3, 4)]
    assert uses("pipeoptim", 4) == [(Use(v, s), now) for v, s in ((1, 3), (2, 2), (3, 1), (4, 0))]
    assert uses("spectrain", 4) == [
        (Use(1, 3), Use(4)),
        (Use(2, 2), Use(4)),
        (Use(3, 2), Use(4, 1)),
        (Use(4, 1), Use(4, 1)),
    ]
    assert uses("spectrain_stashed", 4) == [(Use(v, s), Use(v, s)) for v, s in ((1, 3), (2, 2), (3, 1), (4, 0))]
    assert uses("2bw", 4, num_microbatches=4) == [(Use(0), Use(0))] * 4
    assert uses("2bw", 8, num_microbatches=4) == [(Use(1), Use(1))] * 4


def test_the_staleness_after_a_drain_is_less_than_in_the_steady_state() -> None:
    first = Place(0, 4)
    assert [PipeOptim().policy.uses(first, i)[0].ahead for i in range(5)] == [0, 1, 2, 3, 3]
    assert [PipeOptim(staleness="constant").policy.uses(first, i)[0].ahead for i in range(5)] == [3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stash", [4, 3, 2, 1]),
        ("spectrain", [2, 2, 2, 2]),
        ("spectrain_stashed", [5, 4, 3, 1]),
        ("pipeoptim", [2, 2, 2, 1]),
        ("none", [1, 1, 1, 1]),
    ],
)
def test_copies_of_the_weights_that_are_held(name: str, expected: list[int]) -> None:
    assert POLICIES[name].copies(4, 1) == expected


def test_2bw_holds_two_copies_and_stashing_no_more_if_batches_have_enough_micro_batches() -> None:
    assert POLICIES["2bw"].copies(4, 4) == [2, 2, 2, 2]
    assert POLICIES["stash"].copies(4, 4) == [2, 2, 2, 1]
    with pytest.raises(ScheduleError, match="num_microbatches=4"):
        POLICIES["2bw"].check(4, 3)


def test_an_increment_is_one_more_copy() -> None:
    assert PipeOptim(delta="increment").policy.copies(4, 1) == [3, 3, 3, 2]


@pytest.mark.parametrize("name", POLICIES)
def test_one_stage_uses_current_weights(name: str) -> None:
    if name == "2bw":
        return  # delays on purpose, see its own test
    place = Place(0, 1)
    assert all(POLICIES[name].uses(place, i) == (Use(i), Use(i)) for i in range(5))
    assert POLICIES[name].held(place) == 1


def test_asynchronous_updates_leave_no_bubble() -> None:
    costs = StageCosts.uniform(4, 1, 2)
    seconds = {name: policies.POLICIES[name].simulate(costs, 4, 24) for name in policies.POLICIES}
    assert seconds["flush"].steady_s == (4 + 3) * 3
    assert seconds["stash"].steady_s == seconds["2bw"].steady_s == 4 * 3
    assert seconds["stash"].steady_bubble_fraction == pytest.approx(0)
    assert seconds["pipeoptim"].steady_s == 4 * 4  # a forward is repeated in each backward


def test_iterations_of_a_policy_are_numbered_as_others_are() -> None:
    timeline = POLICIES["stash"].simulate(StageCosts.uniform(2, 1, 2), 2, 3)
    assert {(s.iteration, s.action.micro_batch) for s in timeline.spans} == set(itertools.product(range(3), range(2)))
    last = max((s for s in timeline.spans if s.stage == 0), key=lambda s: s.end_s)
    assert last == Span(0, last.action, last.begin_s, last.end_s, 0, 2)
    assert last.action.kind is BACKWARD
    assert chrome_trace(timeline)["traceEvents"]


def test_the_command_simulates_policies(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["1f1b", "--stages", "3", "--microbatches", "3", "--iterations", "12"]
    assert main([*one, "--policy", "stash"]) == 0
    assert "copies of the weights 2 2 1" in capsys.readouterr().out
    assert main([*one, "--policy", "stash", "--pipelines", "2"]) == 2
    assert "one pipeline" in capsys.readouterr().err

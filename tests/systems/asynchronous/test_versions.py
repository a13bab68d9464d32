"""Which weights actions use, and how many copies that takes."""

from __future__ import annotations

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import StageCosts, policies
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.systems.asynchronous.versions import PipeOptim, Place, Use
from tests.systems.asynchronous.policies import POLICIES


def uses(name: str, micro_batch: int, num_stages: int = 4, num_microbatches: int = 1) -> list[tuple[Use, Use]]:
    places = [Place(k, num_stages, num_microbatches) for k in range(num_stages)]
    return [POLICIES[name].uses(place, micro_batch) for place in places]


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


def test_asynchronous_updates_leave_no_bubble() -> None:
    costs = StageCosts.uniform(4, 1, 2)
    seconds = {name: policies.POLICIES[name].simulate(costs, 4, 24) for name in policies.POLICIES}
    assert seconds["flush"].steady_s == (4 + 3) * 3
    assert seconds["stash"].steady_s == seconds["2bw"].steady_s == 4 * 3
    assert seconds["stash"].steady_bubble_fraction == pytest.approx(0)
    assert seconds["pipeoptim"].steady_s == 4 * 4  # a forward is repeated in each backward


def test_the_command_simulates_policies(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["1f1b", "--stages", "3", "--microbatches", "3", "--iterations", "12"]
    assert main([*one, "--policy", "stash"]) == 0
    assert "copies of the weights 2 2 1" in capsys.readouterr().out
    assert main([*one, "--policy", "stash", "--pipelines", "2"]) == 2
    assert "one pipeline" in capsys.readouterr().err

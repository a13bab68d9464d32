"""Trials: at which sizes to measure, and what measurements say."""

from __future__ import annotations

import pytest

from lightning_avgpipe.tuning import (
    Curve,
    Device,
    HopProfile,
    Profile,
    Setting,
    StageMemory,
    StageProfile,
    candidates,
    search,
)
from lightning_avgpipe.tuning.trials import (
    best,
    refined,
    trial_sizes,
)
from tests.profiles import random_profile


@pytest.mark.parametrize(
    ("counts", "num_stages", "expected"),
    [
        ([1, 2, 4, 8, 16], 2, (16, (8, 4, 1))),
        ([1, 2, 4, 8, 16, 32, 64], 2, (16, (8, 4, 1))),  # with 64 most would be what an action costs anyway
        ([1, 2, 4, 8, 16, 32, 64], 4, (32, (8, 4, 1))),
        ([4, 8], 2, (8, (4,))),
        ([8], 2, (8, ())),
        ([64, 128], 2, (64, ())),
    ],
)
def test_profiles_are_made_with_many_micro_batches_and_the_fewest_and_some_in_between(
    counts: list[int], num_stages: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    assert trial_sizes(counts, num_stages) == expected


def test_the_fastest_of_those_that_were_tried_is_taken() -> None:
    profile = random_profile(1)
    result = search(profile, candidates(profile, 3))
    tried = best(result, 3)
    assert tried[0] == result.choice and len(set(tried)) == 3
    measured = {candidate.setting: seconds for candidate, seconds in zip(tried, (3.0, 1.0, 2.0), strict=True)}
    chosen = refined(result, measured)
    assert chosen.choice == tried[1]
    assert chosen.reason.startswith("1.00 s a batch, the shortest of 3 that were tried")
    assert str(chosen).count("chosen") == 1
    assert refined(result, {}) == result


def test_settings_that_only_stash_more_are_not_tried_beside_each_other() -> None:
    stage = StageProfile(Curve.constant(1.0, 1.0), Curve.constant(1.0, 1.0), StageMemory(0, 10, 10, 10))
    device = Device("one", 1000, in_turns=True)
    profile = Profile(16, 1, 16, (stage, stage), (HopProfile(0.0, 0.0),), device)  # an advance gains nothing
    tried = [candidate.setting for candidate in best(search(profile, candidates(profile, 1)), 3)]
    assert tried == [Setting(16), Setting(8), Setting(4)]

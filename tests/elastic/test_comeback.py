"""A group that has died and is started anew comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comeback import AFTER, NOBODY, Plan, again, check_alike, check_data, tell
from tests.processes import results
from tests.survival import Death


@pytest.mark.slow
def test_a_group_that_is_started_anew_trains_on_with_the_others_from_the_next_epoch_on(tmp_path: Path) -> None:
    plan = Plan()
    story = tell(tmp_path, plan, Death(3, "forward"), NOBODY)
    found = [*results(story.first[:2]), *results(story.later[0])]
    end = found[0]["epochs"]
    assert [process["epochs"] for process in found] == [end] * 4
    assert [process["leads"] for process in found] == [True, False, False, False]
    for epoch in range(end - AFTER, end):
        check_data(found, epoch)
    check_alike(found, again(tmp_path, plan, end - AFTER - 1, end))

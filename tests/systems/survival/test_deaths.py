"""Groups that die, wherever they are then, and come back: the others lose no step, and all have the same reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.averaging.models import assert_equal
from tests.systems.survival.live import BATCHES, live
from tests.systems.survival.runs import Event, Run, running


def stepped(group: int, start: int = 0) -> object:
    return lambda event: (event.group, event.rank, event.start, event.what) == (group, 0, start, "step")


def later(event: Event, run: Run, steps: int) -> Event:
    """The event of the same process some steps later."""
    until = event.facts["step"] + steps
    of = event.group, event.rank, event.start, event.what
    return run.until(lambda e: (e.group, e.rank, e.start, e.what) == of and e.facts["step"] >= until)


def check_all(run: Run, group: int) -> None:
    """Check that a group has made every step, at its place in the epochs."""
    steps = run.steps(group)
    assert [step for step, _, _ in steps] == list(range(1, len(steps) + 1))
    assert all((step - 1) == epoch * BATCHES + batch for step, epoch, batch in steps)


def dies_and_returns(run: Run, died: float, size: int = 2, limit_s: float = 60.0) -> None:
    """Group 1 has died: group 0 goes on, group 1 comes back, and both end with the same reference."""
    on = run.until(stepped(0), after=died + 0.2, limit_s=limit_s)
    for rank in range(size):
        run.until(lambda e, rank=rank: (e.group, e.rank, e.what) == (1, rank, "gone"), limit_s=limit_s)
    run.start(1, size)
    back = run.until(stepped(1, 1))
    assert back.facts["step"] >= on.facts["step"]  # where group 0 is, not where training began
    run.stop(back.facts["step"] + 60)
    results = [run.ends(group) for group in (0, 1)]
    assert_equal(results[0]["left"], results[1]["left"])
    assert results[0]["step"] == results[1]["step"]
    assert results[0]["epoch"] == results[1]["epoch"]
    check_all(run, 0)
    steps = run.steps(1, start=1)
    assert [step for step, _, _ in steps] == list(range(steps[0][0], steps[-1][0] + 1))
    # its first batch was numbered before it knew where the others are
    assert all((step - 1) == epoch * BATCHES + batch for step, epoch, batch in steps[1:])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "in a quorum", "before a sum", "before a commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_killed_comes_back(tmp_path: Path, phase: str, rank: int) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            fault = {"phase": phase, "at": 40, "rank": rank} if group == 1 else {}
            run.start(group, 2, **fault)
        died = run.until(lambda e: (e.group, e.rank, e.what) == (1, rank, "gone"))
        dies_and_returns(run, died.when)

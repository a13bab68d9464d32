"""Groups that die, wherever they are then, and come back: the others lose no step, and all have the same reference."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_avgpipe import Averaging
from tests.averaging.models import assert_equal
from tests.systems.survival.live import BATCHES, SUM_S, live
from tests.systems.survival.runs import Event, Run, running


def stepped(group: int, start: int = 0) -> Callable[[Event], bool]:
    return lambda event: (event.group, event.rank, event.start, event.what) == (group, 0, start, "step")


def check_all(run: Run, group: int, per_epoch: int = BATCHES) -> None:
    """Check that a group has made every step, at its place in the epochs."""
    steps = run.steps(group)
    assert [step for step, _, _ in steps] == list(range(1, len(steps) + 1))
    assert all((step - 1) == epoch * per_epoch + batch for step, epoch, batch in steps)


def dies_and_returns(run: Run, died: float, size: int = 2, limit_s: float = 60.0, **arguments: Any) -> None:
    """Group 1 has died: group 0 goes on, group 1 comes back, and both end with the same reference."""
    per_epoch = arguments.get("per_epoch", BATCHES) // arguments.get("num_pipelines", 1)
    on = run.until(stepped(0), after=died + 0.2, limit_s=limit_s)
    for rank in range(size):
        run.until(lambda e, rank=rank: (e.group, e.rank, e.what) == (1, rank, "gone"), limit_s=limit_s)
    run.start(1, size, stages=size, **arguments)
    back = run.until(stepped(1, 1))
    assert back.facts["step"] >= on.facts["step"]  # where group 0 is, not where training began
    run.stop(back.facts["step"] + 60)
    results = [run.ends(group) for group in (0, 1)]
    assert_equal(results[0]["left"], results[1]["left"])
    assert results[0]["step"] == results[1]["step"]
    assert results[0]["epoch"] == results[1]["epoch"]
    check_all(run, 0, per_epoch)
    steps = run.steps(1, start=1)
    assert [step for step, _, _ in steps] == list(range(steps[0][0], steps[-1][0] + 1))
    # its first batch was numbered before it knew where the others are
    assert all((step - 1) == epoch * per_epoch + batch for step, epoch, batch in steps[1:])


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_group_that_is_killed_at_any_time_comes_back(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    victims = choice.choice([[0], [1], [0, 1]])
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, 2)
        after = choice.randrange(2, 40)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= after)
        dies_and_returns(run, run.kill(1, victims))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_pipelines": 2}, {"averaging": Averaging(every=3)}])
def test_a_group_of_one_process_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1, **options)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        dies_and_returns(run, run.kill(1, [0]), 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("per_epoch", [1, 2])
def test_a_group_may_come_back_at_the_end_of_an_epoch(tmp_path: Path, per_epoch: int) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1, per_epoch=per_epoch)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        dies_and_returns(run, run.kill(1, [0]), 1, per_epoch=per_epoch)


@pytest.mark.slow
def test_the_first_group_may_die_and_the_next_one_saves(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1, saves=tmp_path / "saved")
        run.until(lambda e: stepped(0)(e) and e.facts["step"] >= 5)
        died = run.kill(0, [0])
        on = run.until(stepped(1), after=died + 0.2)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] > on.facts["step"] + 20)
        run.start(0, stages=1, saves=tmp_path / "saved")
        back = run.until(stepped(0, 1))
        run.stop(back.facts["step"] + 20)
        results = [run.ends(group) for group in (0, 1)]
    assert_equal(results[0]["left"], results[1]["left"])
    saved = {int(path.stem.partition("=")[2]) for path in (tmp_path / "saved").glob("step=*.ckpt")}
    assert {step for step in range(10, back.facts["step"], 10) if step > on.facts["step"]} <= saved


@pytest.mark.slow
def test_a_group_that_is_stopped_is_left_behind_and_comes_back_by_itself(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, 2)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        stopped = run.kill(1, [0, 1], signal.SIGSTOP)
        on = run.until(stepped(0), after=stopped + SUM_S + 1)
        run.until(lambda e: stepped(0)(e) and e.facts["step"] > on.facts["step"] + 5)
        woken = run.kill(1, [0, 1], signal.SIGCONT)
        back = run.until(lambda e: stepped(1)(e) and e.facts["step"] > on.facts["step"], after=woken)
        run.stop(back.facts["step"] + 40)
        results = [run.ends(group) for group in (0, 1)]
        assert abs(results[0]["step"] - results[1]["step"]) <= 1
        check_all(run, 0)


@pytest.mark.slow
def test_without_its_lighthouse_a_group_ends_and_names_it(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        run.lose_lighthouse()
        for group in (0, 1):
            event = run.until(lambda e, group=group: (e.group, e.what) == (group, "error"))
            assert f"group {group} waits for the other groups" in event.facts["error"]
            assert "the lighthouse at http://localhost" in event.facts["error"]

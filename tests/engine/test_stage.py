"""Stages run what they have a handler for, and say at once what they have none for."""

from __future__ import annotations

import pytest

from lightning_avgpipe.engine.stage import check_runnable
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import Action, Kind, Schedule, build
from lightning_avgpipe.schedule.recipes import trainable


def test_stages_can_run_every_schedule_that_can_be_built() -> None:
    for name in trainable():
        check_runnable(build(name, 4, 4))


def test_lines_of_stages_are_simulated_only() -> None:
    with pytest.raises(ScheduleError, match=r"'chimera' has 2 lines of stages, .* can be simulated only"):
        check_runnable(build("chimera", 4, 4))


def test_a_schedule_with_another_kind_of_actions_is_refused() -> None:
    nap = Kind("N", "nap", lambda costs, k: 0.0, None, None, (), 0, 0, "#000000")
    with pytest.raises(ScheduleError, match=r"'naps' has actions that stages cannot run: nap \(N\); they can run for"):
        check_runnable(Schedule("naps", 1, 1, ((Action(nap, 0),),)))

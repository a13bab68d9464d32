"""Schedules in which the first stages run forwards only: nothing on them is trained, so they need no gradients.

::

    stage 0 | F0 F1 F2 B0 F3 B1 B2 B3          stage 0 | F0 F1 F2 F3
    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3    ->    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3          stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

The rows of the other stages do not change, because their warm-up counts from the last stage.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.kinds import COURSES
from lightning_avgpipe.schedule.rules import trains


def forward_only(schedule: Schedule, stages: int) -> Schedule:
    """Return a schedule in which the first ``stages`` stages run forwards only.

    Args:
        schedule: schedule of training.
        stages: number of stages that run forwards only, fewer than K.
    """
    if not stages:
        return schedule
    rows = [tuple(a for a in row if a.kind in COURSES[0]) for row in schedule.rows[:stages]]
    ahead = (schedule.num_microbatches,) * stages + schedule.warm_up[stages:] if schedule.warm_up else ()
    left: list[tuple[int, ...]] = []
    for turns in schedule.turns:  # the remaining actions keep their order
        actions = {stage: iter(schedule.rows[stage]) for stage in turns}
        kept = [k for k in turns if next(actions[k]).kind in COURSES[0] or k >= stages]
        left.append(tuple(kept))
    return replace(schedule, rows=(*rows, *schedule.rows[stages:]), warm_up=ahead, turns=tuple(left))


def num_forward_only(schedule: Schedule) -> int:
    """Return how many stages, from the first, run forwards only while others train; 0 if nothing is trained."""
    training = [trains(row) for row in schedule.rows]
    return training.index(True) if any(training) else 0

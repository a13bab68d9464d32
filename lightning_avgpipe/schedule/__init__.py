"""Schedules are data: for each stage the order of its forwards and backwards.

1F1B with 3 stages and 4 micro-batches, one row per stage (time goes to the right)::

    stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

Build one with :func:`build`, print it with ``str``, and see when its actions run with :func:`simulate`. Nothing here
needs torch.
"""

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import (
    build,
    check,
    from_warm_up,
    stepped_warm_up,
    uneven_steps,
    uneven_warm_up,
    warm_up,
)
from lightning_avgpipe.schedule.simulator import StageCosts, first_advance, simulate, smallest_sufficient_advance
from lightning_avgpipe.schedule.timeline import Activity, Span, Timeline, Transfer

__all__ = [
    "Action",
    "Activity",
    "Schedule",
    "Span",
    "StageCosts",
    "Timeline",
    "Transfer",
    "build",
    "check",
    "first_advance",
    "from_warm_up",
    "simulate",
    "smallest_sufficient_advance",
    "stepped_warm_up",
    "uneven_steps",
    "uneven_warm_up",
    "warm_up",
]

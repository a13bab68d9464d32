"""Pipeline schedules as data: for each stage the order of its actions.

1F1B with 3 stages and 4 micro-batches, one row per stage (time goes to the right)::

    stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

Build a schedule with :func:`build`, print it with ``str``, and see when its actions run with :func:`simulate`. This
package does not need torch.
"""

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import forward_only, from_warm_up, of_function, warm_up, with_replicas
from lightning_avgpipe.schedule.choice import first_advance, stepped_warm_up, uneven_steps
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, Kind
from lightning_avgpipe.schedule.player import InTurns, SideBySide
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.rules import in_turn, num_forward_only, peak_stash
from lightning_avgpipe.schedule.simulator import check, simulate
from lightning_avgpipe.schedule.timeline import Activity, Span, Timeline, Transfer

__all__ = [
    "BACKWARD", "FORWARD", "Action", "Activity", "InTurns", "Kind", "Schedule", "SideBySide", "Span", "StageCosts",
    "Timeline", "Transfer", "build", "check", "first_advance", "forward_only", "from_warm_up", "in_turn",
    "num_forward_only", "of_function", "peak_stash", "simulate", "stepped_warm_up", "uneven_steps", "warm_up",
    "with_replicas",
]  # fmt: skip

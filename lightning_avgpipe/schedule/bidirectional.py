"""Schedules in which micro-batches go both ways: every process has a stage of each way, and the weights of both.

::

    D = 3 processes     0: stages 0, 5     1: stages 1, 4     2: stages 2, 3
    there               0 -> 1 -> 2        micro-batches 0, 2, 4, ...
    back                3 -> 4 -> 5        micro-batches 1, 3, 5, ...      stage D + k has the layers of stage k
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.greedy import greedy
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, KINDS

__all__ = ["chimera"]


def chimera(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Chimera: two copies of the model, in opposite directions; each fills what the other leaves idle.

    The order is found by playing it with equal times, in which the two never want a process at once. With them, f = b,
    a process is idle for D-2 of them, however many micro-batches there are; with longer backwards for (D-2) b if M = D,
    and longer if more follow, which the paper calls direct concatenation.

    Raises:
        ScheduleError: fewer than two micro-batches.
    Source: Chimera, Li and Hoefler, SC 2021, arXiv:2107.06925, section 3.
    """
    if num_microbatches < 2:
        raise ScheduleError(f"chimera sends micro-batches both ways, and needs two at least, not {num_microbatches}")
    devices = (*range(num_devices), *reversed(range(num_devices)))

    def prefers(stage: int, action: Action, stashed: int) -> Sequence[float] | None:
        if action.kind is BACKWARD:
            return 0, action.micro_batch
        return (1, action.micro_batch) if stashed < num_devices else None

    return greedy("chimera", num_microbatches, devices, (FORWARD, BACKWARD), prefers, dict.fromkeys(KINDS, 1), 2)

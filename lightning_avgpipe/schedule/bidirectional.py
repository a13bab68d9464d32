"""Schedules in which micro-batches travel in both directions: each process has a stage, and weights, for each.

::

    D = 3 processes     0: stages 0, 5     1: stages 1, 4     2: stages 2, 3
    there               0 -> 1 -> 2        micro-batches 0, 2, 4, ...
    back                3 -> 4 -> 5        micro-batches 1, 3, 5, ...      stage D + k has the layers of stage k
"""

from __future__ import annotations

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD
from lightning_avgpipe.schedule.rules import Event, needs, results


def chimera(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build Chimera: two copies of the model run in opposite directions, and each fills idle times of the other.

    The order is found by simulating with equal times, f = b, in which the two copies never need a process at the same
    time. Then a process is idle for D-2 actions, for any number of micro-batches. With longer backwards it is idle for
    (D-2) b if M = D, and longer for a larger M, which the paper calls direct concatenation.

    Raises:
        ScheduleError: fewer than two micro-batches.
    Source: Chimera, Li and Hoefler, SC 2021, arXiv:2107.06925, section 3.
    """
    if num_microbatches < 2:
        raise ScheduleError(f"chimera sends micro-batches both ways, and needs two at least, not {num_microbatches}")
    devices = (*range(num_devices), *reversed(range(num_devices)))
    # the next micro-batch of each stage and kind: they come in ascending order
    following = {(k, kind): k // num_devices for k in range(len(devices)) for kind in (FORWARD, BACKWARD)}
    happened: set[Event] = set()
    stash = [0] * num_devices
    orders: list[list[tuple[int, Action]]] = [[] for _ in devices[:num_devices]]
    while any(i < num_microbatches for i in following.values()):
        chosen: dict[int, tuple[int, Action]] = {}
        # backwards first, then the lowest micro-batch; an order found by simulation cannot deadlock
        for (k, kind), i in sorted(
            following.items(), key=lambda entry: (entry[0][1] is FORWARD, entry[1], entry[0][0])
        ):
            action, device = Action(kind, i), devices[k]
            fits = kind is BACKWARD or stash[device] < num_devices
            if i < num_microbatches and fits and device not in chosen and needs(action, k, num_devices) <= happened:
                chosen[device] = k, action
        if not chosen:
            raise ScheduleError(f"chimera: nothing can go on with {num_microbatches} micro-batches on {num_devices}")
        for device, (k, action) in chosen.items():
            orders[device].append((k, action))
            following[k, action.kind] += 2
            stash[device] += action.kind.stash
            happened |= results(action, k, num_devices)
    return Schedule.of_orders("chimera", num_microbatches, orders, 2)

"""Greedy orders: a schedule is played with actions of equal length, and each process does what its rules prefer.

Played so, an order cannot deadlock: what a process does has been possible when it was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import Kind
from lightning_avgpipe.schedule.rules import Event, needs, results

__all__ = ["greedy"]

Place = tuple[int, Action]  # an action, on a stage
Prefers = Callable[[int, Action, int], Sequence[float] | None]  # stage, action, stashed on its process: smallest first


def greedy(
    name: str,
    num_microbatches: int,
    devices: Sequence[int],
    course: Sequence[Kind],
    prefers: Prefers,
    ticks: dict[Kind, int],
    lines: int = 1,
) -> Schedule:
    """Play a schedule, and note in which order each process acts.

    Args:
        name: of the schedule.
        num_microbatches: M.
        devices: of each stage, shape ``(K,)``.
        course: the kinds of actions that treat a micro-batch on a stage.
        prefers: says how much a process likes to do an action now; None: it does not yet, unless nobody does anything.
        ticks: how long an action of each kind is taken to last.
        lines: of stages, as those of a schedule.
    """
    num_stages, count = len(devices), 1 + max(devices)
    length = num_stages // lines
    # of each stage and kind the next micro-batch: they come in ascending order
    following = {(k, kind): k // length for k in range(num_stages) for kind in course}
    happened: set[Event] = set()
    ends: list[tuple[int, Place]] = []
    free, stash = [0] * count, [0] * count
    orders: list[list[Place]] = [[] for _ in range(count)]
    now, left = 0, length * num_microbatches * len(course)
    while left:
        for end, (k, action) in [entry for entry in ends if entry[0] <= now]:
            ends.remove((end, (k, action)))
            happened |= results(action, k, length)
            stash[devices[k]] += min(0, action.kind.stash)
        able: list[list[tuple[Sequence[float], int, Action]]] = [[] for _ in range(count)]
        spare = []
        for (k, kind), i in following.items():
            action, device = Action(kind, i), devices[k]
            if i >= num_microbatches or free[device] > now or not needs(action, k, length) <= happened:
                continue
            liking = prefers(k, action, stash[device])
            (spare.append((k, action)) if liking is None else able[device].append((liking, k, action)))
        chosen = [min(of, key=lambda entry: (entry[0], entry[1]))[1:] for of in able if of]
        if not chosen and not ends:
            if not spare:
                raise ScheduleError(f"{name}: nothing can go on at {now}")
            chosen = [min(spare, key=lambda place: (place[1].micro_batch, -place[0]))]
        for k, action in chosen:
            device = devices[k]
            orders[device].append((k, action))
            following[k, action.kind] += lines
            free[device] = now + ticks[action.kind]
            stash[device] += max(0, action.kind.stash)
            ends.append((free[device], (k, action)))
            left -= 1
        now = min((end for end, _ in ends), default=now)
    return Schedule.of_orders(name, num_microbatches, orders, lines)

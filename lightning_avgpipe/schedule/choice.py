"""The automatic choice of a schedule, and of the first advance, by simulation with measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.builders import check_sizes, from_warm_up
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.recipes import RECIPES, build, devices_of
from lightning_avgpipe.schedule.simulator import simulate

SAFEST = "1f1b"  # needs the least memory
_LEAST_GAIN = 0.01  # by which a schedule must be faster than a simpler one, as a share of its time
_ROUNDING = 1e-12  # relative: times that differ by less differ only in the order of their additions


def fastest(
    costs: StageCosts,
    num_microbatches: int,
    devices: Sequence[int],
    fits: Callable[[Schedule], bool],
    splits: bool = True,
    there_and_back: bool = False,
) -> Schedule:
    """Simulate the schedules that can run, and return the fastest one, or the simplest of nearly equal ones.

    Args:
        costs: seconds per action and message.
        num_microbatches: M, number of micro-batches of an iteration.
        devices: device of each stage, shape ``(K,)``.
        fits: returns whether a schedule fits the memory. If none does, 1F1B is taken.
        splits: whether stages can split their backwards.
        there_and_back: whether stages may also be placed as a V; otherwise the schedule runs on ``devices``.
    """
    best, best_s = build(SAFEST, costs.num_stages, num_microbatches), float("inf")
    num_stages, hosts = costs.num_stages, len(set(devices))
    now: Placement = "loop" if list(devices) == [devices[k % hosts] for k in range(num_stages)] else "v"
    placements: set[Placement] = {now, "v"} if there_and_back else {now}
    for schedule in _candidates(costs, num_microbatches, hosts, splits, placements):
        if fits(schedule):
            here = schedule.devices if schedule.turns else devices
            seconds = simulate(schedule, costs.on(here) if hosts > 1 else costs, here).iteration_s
            if seconds < best_s * (1 - _LEAST_GAIN):
                best, best_s = schedule, seconds
    return best


def _candidates(
    costs: StageCosts, num_microbatches: int, hosts: int, splits: bool, placements: Collection[Placement]
) -> Iterator[Schedule]:
    num_stages, steps = costs.num_stages, uneven_steps(costs)
    yield build(SAFEST, num_stages, num_microbatches)
    if hosts == num_stages:  # the formula does not cover stages that share a process
        ahead = stepped_warm_up(steps, num_microbatches, first_advance(steps, num_microbatches, costs))
        yield from_warm_up(ahead, num_microbatches, "advance_forward")
    ranked = [(recipe.rank, name) for name, recipe in RECIPES.items() if recipe.rank is not None]
    for _, name in sorted(ranked):
        recipe = RECIPES[name]
        if (splits or not recipe.splits) and (recipe.needs == "any" or recipe.needs in placements):
            try:
                yield build(name, num_stages, num_microbatches, 0, devices_of(name, num_stages, hosts))
            except ScheduleError:  # it does not fit so many stages on each process
                continue


def uneven_steps(costs: StageCosts) -> tuple[int, ...]:
    """Return by how many forwards each stage should be ahead of the next, for stages of unequal cost.

    ``w_k - w_{k+1} = max(1, ceil((f_k + b_k + f_{k+1} + b_{k+1} + tau_f + tau_b) / P - 1))`` with P the largest of all
    stages' f + b and all transfers, and tau a hop's transfer plus latency. This is the number of micro-batches that
    pass while one goes over the hop and back.

    Args:
        costs: seconds per action and message.
    Returns:
        One number of forwards for each hop, shape ``(K-1,)``.
    """
    busy = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    period = max([*busy, *costs.send_forward_s, *costs.send_backward_s])
    steps = []
    for k in range(len(busy) - 1):
        travel = costs.send_forward_s[k] + costs.send_backward_s[k] + 2 * costs.latency_s[k]
        # a hair less than the quotient, so that an exact integer is not rounded up
        ahead = math.ceil((busy[k] + busy[k + 1] + travel) / period - 1 - 1e-9) if period > 0 else 1
        steps.append(max(1, ahead))
    return tuple(steps)


def stepped_warm_up(steps: Sequence[int], num_microbatches: int, advance: int) -> tuple[int, ...]:
    """Return the warm-up of advance h if hops need unequal steps.

    The largest step between neighbours is 1+h. From h = 0, which is 1F1B, the step of each hop grows with h up to its
    entry in ``steps``. When all hops have reached these, all steps grow further::

        steps = (1, 3)     h = 0: (1, 1)   h = 1: (1, 2)   h = 2: (1, 3)   h = 3: (2, 4)

    Equal steps give advance forward propagation, (K-1-k)(1+h). A larger h never gives a smaller warm-up.

    Args:
        steps: step of each hop, as :func:`uneven_steps` returns them, each at least 1.
        num_microbatches: M, number of micro-batches of an iteration.
        advance: h.
    Returns:
        The warm-up of each stage, shape ``(len(steps) + 1,)``.
    """
    check_sizes(len(steps) + 1, num_microbatches)
    beyond = max(0, 1 + advance - max(steps, default=1))
    result = [0]
    for step in reversed(steps):
        result.append(result[-1] + min(step, 1 + advance) + beyond)
    return tuple(min(num_microbatches, w) for w in reversed(result))


def first_advance(steps: Sequence[int], num_microbatches: int, costs: StageCosts) -> int:
    """Return the advance to begin with: the fastest by simulation, or the smallest of equally fast ones.

    The candidates are 0, which is 1F1B, to ``max(steps) - 1``, because more forwards ahead can be slower.

    Args:
        steps: step of each hop, as ``uneven_steps(costs)``.
        num_microbatches: M, number of micro-batches of an iteration.
        costs: seconds per action and message.
    """
    seconds = []
    for advance in range(min(num_microbatches, max(steps, default=1))):
        schedule = from_warm_up(stepped_warm_up(steps, num_microbatches, advance), num_microbatches)
        seconds.append(simulate(schedule, costs).iteration_s)
    return next(advance for advance, each in enumerate(seconds) if each <= min(seconds) * (1 + _ROUNDING))

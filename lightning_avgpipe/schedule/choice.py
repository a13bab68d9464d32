"""The automatic choice of a schedule: the fastest by simulation that the processes can run and that fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.advance import first_advance, stepped_warm_up, uneven_steps
from lightning_avgpipe.schedule.builders import from_warm_up
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.recipes import RECIPES, build, devices_of
from lightning_avgpipe.schedule.simulator import simulate

SAFEST = "1f1b"  # needs the least memory
_LEAST_GAIN = 0.01  # share of the time of a simpler schedule


def fastest(
    costs: StageCosts,
    num_microbatches: int,
    devices: Sequence[int],
    fits: Callable[[Schedule], bool],
    splits: bool = True,
    there_and_back: bool = False,
) -> Schedule:
    """Simulate the schedules that can run, and return the fastest; among nearly equal ones the simplest.

    Args:
        costs: seconds per action and message.
        num_microbatches: M, number of micro-batches of an iteration.
        devices: device of each stage, shape ``(K,)``.
        fits: returns whether a schedule fits the memory. 1F1B is taken if none does.
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

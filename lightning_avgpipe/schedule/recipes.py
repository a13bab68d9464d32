"""The recipes: every schedule that has a name, and the placement of stages that it needs.

Packages in ``systems`` add theirs to ``RECIPES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.builders import DEPTH_FIRST, NAMES, breadth_first, check_sizes, formula, interleaved
from lightning_avgpipe.schedule.kinds import Placement


@dataclass(frozen=True)
class Recipe:
    """A named schedule: how it is built, and where it can be used.

    Attributes:
        build: function of K, M, D processes and an advance that returns the schedule.
        needs: stages on each process: any number, several in a loop, or two in the shape of a V.
        rank: place among the schedules that the automatic choice compares, the simplest first; None: not compared.
        splits: whether it splits backwards, for which stages must keep their graphs.
        about: sentence for the documentation of the option ``schedule``.
    """

    build: Callable[[int, int, int, int], Schedule]
    needs: Literal["any", "loop", "v"]
    rank: int | None = None
    splits: bool = False
    about: str = ""

    @property
    def placement(self) -> Placement:
        """The placement of stages on processes."""
        return "v" if self.needs == "v" else "loop"


def _of_formula(name: str) -> Callable[[int, int, int, int], Schedule]:
    return lambda num_stages, num_microbatches, _, advance: formula(name, num_stages, num_microbatches, advance)


def of_devices(make: Callable[[int, int, int], Schedule]) -> Callable[[int, int, int, int], Schedule]:
    """Return the ``build`` of a recipe from a function of K, M and D."""
    return lambda num_stages, num_microbatches, num_devices, _: make(num_stages, num_microbatches, num_devices)


RECIPES: dict[str, Recipe] = {
    "advance_forward": Recipe(_of_formula("advance_forward"), "any"),
    "1f1b": Recipe(_of_formula("1f1b"), "any"),
    "afab": Recipe(_of_formula("afab"), "any", rank=70),
    "interleaved": Recipe(of_devices(interleaved), "loop", rank=10),
    "bfs": Recipe(of_devices(breadth_first), "loop", rank=20),
}


def devices_of(name: str, num_stages: int, hosts: int | None = None) -> int:
    """Return the number of processes for which a schedule is built.

    Args:
        name: name of the schedule.
        num_stages: K, number of stages.
        hosts: number of processes that host the stages; None: the number that suits the schedule best. A single process
            may run the actions of several in turns.
    Raises:
        ScheduleError: the schedule cannot place so many stages on so many processes.
    """
    needs = RECIPES[name].needs if name in RECIPES else "any"
    if needs == "any":
        return hosts or num_stages
    fitting = num_stages // 2 if needs == "v" or hosts is None else hosts
    found = f"schedule={name!r} with num_stages={num_stages} on {hosts or fitting} process{'es' * ((hosts or 2) > 1)}"
    if needs == "v" and (num_stages % 2 or hosts not in (None, 1, fitting)):
        use = f"use num_stages={2 * hosts}" if hosts and hosts > 1 else "use an even number of stages"
        raise ScheduleError(f"{found}: it needs two stages on each process; {use}")
    if needs == "loop" and (num_stages % fitting or num_stages < 2 * fitting):
        use = f"use num_stages={2 * (hosts or 1)} or another multiple of it"
        raise ScheduleError(f"{found}: it needs the same number of stages on each process, and several; {use}")
    return fitting


def build(
    name: str, num_stages: int, num_microbatches: int, advance: int = 0, num_devices: int | None = None
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: a name of ``RECIPES``, or ``"forward"`` (no backwards: evaluation).
        num_stages: K, at least 1.
        num_microbatches: M, at least 1.
        advance: h of ``"advance_forward"``; 0 is 1F1B, a large one AFAB on all stages but the last. The other names
            have none and ignore it.
        num_devices: number of processes, for schedules with several stages on each; None: two stages on each.
    Raises:
        ScheduleError: an invalid size, an unknown name, or a number of stages that does not fit the processes.
    """
    if name not in (*RECIPES, *NAMES, DEPTH_FIRST):
        known = ", ".join(map(repr, dict.fromkeys((*RECIPES, *NAMES))))
        raise ScheduleError(f"unknown schedule {name!r}; use one of {known}")
    if name not in RECIPES:
        return formula(name, num_stages, num_microbatches, advance)
    check_sizes(num_stages, num_microbatches)
    devices = devices_of(name, num_stages, num_devices)
    return RECIPES[name].build(num_stages, num_microbatches, devices, advance)

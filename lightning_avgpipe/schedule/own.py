"""Schedules that user code builds: a function returns rows, which are checked before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import check
from lightning_avgpipe.schedule.kinds import KINDS
from lightning_avgpipe.schedule.rules import check_can_run, trains

Rows = Sequence[str | Sequence[Action]]
Builder = Callable[[int, int], Schedule | Rows]


def parse(row: str) -> tuple[Action, ...]:
    """Parse the actions of a stage, such as ``"F0 F1 B0 B1"``.

    Raises:
        ScheduleError: a word is not an action.
    """
    kinds, actions = {kind.symbol: kind for kind in KINDS}, []
    for word in row.split():
        kind, number = kinds.get(word[0]), word[1:]
        if kind is None or not number.isdecimal():
            letters = ", ".join(f"{kind} ({kind.name})" for kind in KINDS)
            raise ScheduleError(f"{word!r} in the row {row!r} is no action; write a letter of {letters} and a number")
        actions.append(Action(kind, int(number)))
    return tuple(actions)


def of_function(function: Builder, num_stages: int, num_microbatches: int) -> Schedule:
    """Call a user's function, and check the schedule that it returns.

    Args:
        function: ``(num_stages, num_microbatches)`` -> a schedule, or one row of actions for each stage, as text or as
            actions.
        num_stages: K, number of stages.
        num_microbatches: M, number of micro-batches of an iteration.
    Raises:
        ScheduleError: the schedule has other sizes or no backwards, or an action is missing, repeated or out of range.
        DeadlockError: the stages cannot all finish. The message shows where each of them stops.
    """
    name = getattr(function, "__name__", type(function).__name__)
    made = function(num_stages, num_microbatches)
    if not isinstance(made, Schedule):
        if not isinstance(made, Iterable) or isinstance(made, str):
            raise ScheduleError(f"{name}({num_stages}, {num_microbatches}) gave {made!r}; return a row for each stage")
        rows = tuple(parse(row) if isinstance(row, str) else tuple(row) for row in made)
        made = Schedule(name, num_stages, num_microbatches, rows)
    if (made.num_stages, made.num_microbatches) != (num_stages, num_microbatches):
        raise ScheduleError(
            f"{name} was asked for {num_stages} stages and {num_microbatches} micro-batches, and gave a schedule of "
            f"{made.num_stages} and {made.num_microbatches}"
        )
    check(made)
    check_can_run(made)
    if not any(map(trains, made.rows)):
        raise ScheduleError(f"{name}({num_stages}, {num_microbatches}) has no backwards, and trains nothing")
    return made

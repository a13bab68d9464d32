"""Builders of synchronous schedules: by a warm-up per stage, with several stages on each process, or by user code.

With a warm-up, a stage runs ``w`` forwards, then pairs of a forward and a backward, then the remaining backwards;
micro-batches come in ascending order in both directions::

    w = 2, M = 5     F0 F1 | F2 B0  F3 B1  F4 B2 | B3 B4
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import ACTION_SEQUENCES, BACKWARD, FORWARD, KINDS, Kind
from lightning_avgpipe.schedule.rules import check_can_run, trains
from lightning_avgpipe.schedule.simulator import check

NAMES = ("advance_forward", "1f1b", "afab", "forward")
DEPTH_FIRST = "depth_first"  # overlaps nothing, so it is only for stages that all share one process


def formula(name: str, num_stages: int, num_microbatches: int, advance: int = 0) -> Schedule:
    """Build a schedule that a warm-up determines, by name.

    Args:
        name: ``"advance_forward"``, ``"1f1b"``, ``"afab"`` (all forwards, then all backwards), ``"forward"`` (no
            backwards: evaluation) or ``"depth_first"``.
        num_stages: K, at least 1.
        num_microbatches: M, at least 1.
        advance: h of ``"advance_forward"``; 0 is 1F1B, a large one AFAB on all stages but the last. The other names
            have none and ignore it.
    Raises:
        ScheduleError: an invalid size or an unknown name.
    Source: AFAB, GPipe, Huang et al., arXiv:1811.06965; 1F1B, Narayanan et al., arXiv:2104.04473; advance forward
        propagation, AvgPipe, Chen et al., PPoPP 2023, section 4.
    """
    if name == DEPTH_FIRST:
        return depth_first(num_stages, num_microbatches)
    ahead = warm_up(name, num_stages, num_microbatches, advance)
    if name == "forward":
        row = tuple(Action(FORWARD, i) for i in range(num_microbatches))
        return Schedule(name, num_stages, num_microbatches, (row,) * num_stages, ahead)
    return from_warm_up(ahead, num_microbatches, name)


def warm_up(name: str, num_stages: int, num_microbatches: int, advance: int = 0) -> tuple[int, ...]:
    """Return the number of forwards of each stage before its first backward, shape ``(num_stages,)``.

    AFAB and forward: M. 1F1B: min(M, K-1-k). Advance forward propagation: min(M, (K-1-k)(1+h)), so that neighbours
    differ by 1+h and each hop has that many messages in flight. Only differences between neighbours matter: the same
    extra on every stage would cost memory and gain nothing.
    """
    check_sizes(num_stages, num_microbatches)
    if name not in NAMES:
        raise ScheduleError(f"unknown schedule {name!r}; use one of {', '.join(map(repr, NAMES))}")
    if not isinstance(advance, int) or advance < 0:
        raise ScheduleError(f"advance={advance!r}: must be an integer of at least 0; 0 is 1F1B")
    if name in ("afab", "forward"):
        return (num_microbatches,) * num_stages
    return staircase(num_stages, num_microbatches, 1 + (advance if name == "advance_forward" else 0))


def staircase(num_stages: int, num_microbatches: int, step: int) -> tuple[int, ...]:
    """Return a warm-up in which each stage is ``step`` forwards ahead of the next, with none on the last stage."""
    return tuple(min(num_microbatches, (num_stages - 1 - k) * step) for k in range(num_stages))


def from_warm_up(warm_up: Sequence[int], num_microbatches: int, name: str = "custom") -> Schedule:
    """Build the schedule with a given warm-up.

    Args:
        warm_up: number of forwards of each stage before its first pair, shape ``(num_stages,)``.
        num_microbatches: M, number of micro-batches of an iteration.
        name: name of the schedule.
    Raises:
        ScheduleError: a warm-up is negative, or a size is below 1.
        DeadlockError: ``min(w_k, M-1)`` increases from stage k to stage k+1. Then stage k+1 waits for a forward that
            stage k starts only after a backward of stage k+1. The message shows the grid.
    """
    check_sizes(len(warm_up), num_microbatches)
    if any(w < 0 for w in warm_up):
        raise ScheduleError(f"warm_up={tuple(warm_up)}: counts of forwards must be at least 0")
    capped = tuple(min(w, num_microbatches) for w in warm_up)
    rows = tuple(tuple(_row(w, num_microbatches)) for w in capped)
    schedule = Schedule(name, len(warm_up), num_microbatches, rows, capped)
    effective = [min(w, num_microbatches - 1) for w in warm_up]
    for k, (here, after) in enumerate(itertools.pairwise(effective)):
        if here < after:
            raise DeadlockError(
                f"stage {k + 1} wants {after + 1} forwards before its first backward, but stage {k} waits for that "
                f"backward after {here + 1}; the warm-up must not increase from stage to stage:\n{schedule}"
            )
    return schedule


def depth_first(num_stages: int, num_microbatches: int) -> Schedule:
    """Build a schedule for stages of one process: one micro-batch after the other, through all stages and back.

    ::

        stage 0 | F0       B0 F1       B1
        stage 1 |    F0 B0       F1 B1
    """
    return from_warm_up((0,) * num_stages, num_microbatches, DEPTH_FIRST)


def with_replicas(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    """Return the schedule for stages whose replicas take micro-batches in turns.

    The warm-up grows so that each replica is as far ahead as a stage without replicas would be.

    Args:
        schedule: schedule of forwards and backwards that was built from a warm-up.
        replicas: number of replicas of each stage, shape ``(num_stages,)``; empty: one of each.
    """
    if max(replicas, default=1) == 1 or schedule.name == "forward":
        return schedule
    steps = [here - after for here, after in itertools.pairwise(schedule.warm_up)]
    ahead = [schedule.warm_up[-1]]
    for step, count in reversed(list(zip(steps, replicas[:-1], strict=True))):
        ahead.append(ahead[-1] + step * count)
    return from_warm_up(ahead[::-1], schedule.num_microbatches, schedule.name)


def forward_only(schedule: Schedule, stages: int) -> Schedule:
    """Return a schedule in which the first ``stages`` stages, of which nothing is trained, run forwards only.

    The rows of the other stages do not change, because their warm-up counts from the last stage::

        stage 0 | F0 F1 F2 B0 F3 B1 B2 B3          stage 0 | F0 F1 F2 F3
        stage 1 | F0 F1 B0 F2 B1 F3 B2 B3    ->    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
        stage 2 | F0 B0 F1 B1 F2 B2 F3 B3          stage 2 | F0 B0 F1 B1 F2 B2 F3 B3

    Args:
        schedule: schedule of training.
        stages: number of leading stages that run forwards only, less than K.
    """
    if not stages:
        return schedule
    rows = [tuple(a for a in row if a.kind in ACTION_SEQUENCES[0]) for row in schedule.rows[:stages]]
    ahead = (schedule.num_microbatches,) * stages + schedule.warm_up[stages:] if schedule.warm_up else ()
    left: list[tuple[int, ...]] = []
    for turns in schedule.turns:  # the remaining actions keep their order
        actions = {stage: iter(schedule.rows[stage]) for stage in turns}
        kept = [k for k in turns if next(actions[k]).kind in ACTION_SEQUENCES[0] or k >= stages]
        left.append(tuple(kept))
    return replace(schedule, rows=(*rows, *schedule.rows[stages:]), warm_up=ahead, turns=tuple(left))


def without_relays(schedule: Schedule) -> Schedule:
    """Return the schedule for a pipeline that cannot relay messages: 1F1B instead of a schedule with relays."""
    return formula("1f1b", schedule.num_stages, schedule.num_microbatches) if schedule.relays else schedule


def _row(warm_up: int, num_microbatches: int) -> Iterator[Action]:
    yield from (Action(FORWARD, i) for i in range(warm_up))
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            yield Action(FORWARD, warm_up + i)
        yield Action(BACKWARD, i)


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Check that there is at least one stage and one micro-batch; raise ScheduleError otherwise."""
    if num_stages < 1:
        raise ScheduleError(f"num_stages={num_stages}: a schedule needs at least one stage")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches}: a schedule needs at least one micro-batch")


# -- several stages on each process, placed in a loop ------------------------------------------------------------------
#
#     D = 2 processes, K = 4 stages, M = 4: what process 0 does, each action with its stage
#
#     interleaved   F0 F1 of 0, F0 F1 of 2, then in pairs  F2 of 0, B0 of 2, F3 of 0, B1 of 2, F2 of 2, B0 of 0, ...
#     bfs           F0 F1 F2 F3 of 0, then of 2, then B0 B1 B2 B3 of 2, then of 0


def interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build interleaved 1F1B, which is idle for the share D/K of the time for which 1F1B is idle.

    Micro-batches go through all stages of a process in groups of D, with forwards and backwards in turns, and process d
    is ``2 (D-1-d) + (K/D - 1) D`` forwards ahead. Where M is not a multiple of D, some groups are larger.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    total = num_microbatches * num_stages // num_devices
    count = max(1, num_microbatches // num_devices)
    firsts = [num_microbatches * group // count for group in range(count + 1)]
    largest = max(after - first for first, after in itertools.pairwise(firsts))
    orders = []
    for device in range(num_devices):
        mine = range(device, num_stages, num_devices)
        forwards = list(_by_groups(FORWARD, mine, firsts))
        backwards = list(_by_groups(BACKWARD, mine[::-1], firsts))
        ahead = min(total, 2 * (num_devices - 1 - device) + (len(mine) - 1) * largest)
        pairs = zip(forwards[ahead:], backwards, strict=False)
        orders.append([*forwards[:ahead], *(place for pair in pairs for place in pair), *backwards[total - ahead :]])
    return Schedule.of_orders("interleaved", num_microbatches, orders)


def breadth_first(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build looped breadth-first: AFAB stage by stage, so that a stage's weights can be fetched and sent once.

    It is as little idle as interleaved 1F1B, but stashes all micro-batches.

    Source: Breadth-First Pipeline Parallelism, Lamy-Poirier, arXiv:2211.05953.
    """
    orders = []
    for device in range(num_devices):
        mine = range(device, num_stages, num_devices)
        everything = (0, num_microbatches)
        orders.append([*_by_groups(FORWARD, mine, everything), *_by_groups(BACKWARD, mine[::-1], everything)])
    return Schedule.of_orders("bfs", num_microbatches, orders)


def _by_groups(kind: Kind, stages: Sequence[int], firsts: Sequence[int]) -> Iterator[tuple[int, Action]]:
    """Yield the actions group by group: the micro-batches of a group go through all stages before the next group."""
    for first, after in itertools.pairwise(firsts):
        for stage in stages:
            yield from ((stage, Action(kind, i)) for i in range(first, after))


# -- rows that user code makes -----------------------------------------------------------------------------------------

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
            raise ScheduleError(
                f"{word!r} in the row {row!r} is not an action; write a letter of {letters} and a number"
            )
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

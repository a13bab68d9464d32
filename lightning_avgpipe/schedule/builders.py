"""Builders of synchronous schedules by one formula: a warm-up per stage.

A stage runs ``w`` forwards, then pairs of a forward and a backward, then the remaining backwards; micro-batches come
in ascending order in both directions::

    w = 2, M = 5     F0 F1 | F2 B0  F3 B1  F4 B2 | B3 B4
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.forward_only import num_forward_only
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, KINDS
from lightning_avgpipe.schedule.rules import Event, course, courses, in_words, needs, results, trains, turns_of, urgency

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


def in_turn(row: Sequence[Action], first: int, every: int) -> tuple[Action, ...]:
    """Return the actions of one replica from the row of its stage: every ``every``-th micro-batch from ``first`` on."""
    return tuple(action for action in row if action.micro_batch % every == first)


def without_relays(schedule: Schedule) -> Schedule:
    """Return the schedule for a pipeline that cannot relay messages: 1F1B instead of a schedule with relays."""
    return formula("1f1b", schedule.num_stages, schedule.num_microbatches) if schedule.relays else schedule


def _row(warm_up: int, num_microbatches: int) -> Iterator[Action]:
    yield from (Action(FORWARD, i) for i in range(warm_up))
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            yield Action(FORWARD, warm_up + i)
        yield Action(BACKWARD, i)


def check(schedule: Schedule) -> None:
    """Check that a schedule has every action once on every stage, and that it does not deadlock.

    Raises:
        ScheduleError: an action is missing, repeated or out of range.
        DeadlockError: the stages cannot all finish. The message shows where each of them stops.
    """
    _check_complete(schedule)
    left = [deque(row) for row in schedule.rows]
    turns, relays, length = turns_of(schedule), schedule.relays, schedule.length
    happened: set[Event] = set()
    moved = True
    while moved:
        moved = False
        for k, rest in enumerate(left):
            mine = turns.get(k)
            while rest and (mine is None or mine[0] == k) and needs(rest[0], k, length) <= happened:
                happened |= results(rest.popleft(), k, length, relays)
                moved = True
                if mine is not None:
                    mine.popleft()
    stuck = [f"stage {k} at {rest[0]}" for k, rest in enumerate(left) if rest]
    if stuck:
        used = {action.kind for row in schedule.rows for action in row}
        raise DeadlockError(
            f"no action can start any more: {', '.join(stuck)}. {'; '.join(in_words(k) for k in KINDS if k in used)}. "
            f"Reorder these rows:\n{schedule}"
        )


def _check_complete(schedule: Schedule) -> None:
    """Check that every stage treats each of its micro-batches completely and once."""
    training = any(map(trains, schedule.rows))
    first = num_forward_only(schedule)
    for stage, row in enumerate(schedule.rows):
        numbers, both = schedule.micro_batches(stage), training and stage >= first
        usual = [{Action(kind, i) for kind in kinds for i in numbers} for kinds in courses(both)]
        count = Counter(row)
        if len(count) == len(row) and count.keys() in usual:
            continue
        # a stage may treat some micro-batches with whole backwards and others with split ones
        wanted = {Action(kind, i) for i in numbers for kind in course([k for k in KINDS if (k, i) in count], both)}
        wrong = {
            "misses": wanted - count.keys(),
            "repeats": {action for action, times in count.items() if times > 1},
            "has no use for": count.keys() - wanted,
        }
        texts = [f"{verb} {', '.join(map(str, sorted(a, key=urgency)))}" for verb, a in wrong.items() if a]
        if texts:
            raise ScheduleError(
                f"stage {stage} has {len(row)} actions and {'; '.join(texts)}; give it each of {len(wanted)} actions "
                "once"
            )


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Check that there is at least one stage and one micro-batch; raise ScheduleError otherwise."""
    if num_stages < 1:
        raise ScheduleError(f"num_stages={num_stages}: a schedule needs at least one stage")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches}: a schedule needs at least one micro-batch")

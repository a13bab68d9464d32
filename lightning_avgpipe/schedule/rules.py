"""Rules that follow from the kinds of actions: which goes first, what a stage may run, and how much a row stashes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import ACTION_SEQUENCES, Kind

CHECKS: list[Callable[[Schedule], None]] = []  # of further kinds: raise ScheduleError if stages cannot run a schedule


def in_words(kind: Kind) -> str:
    """Return in words what an action waits for, such as ``"B waits for its own F and for the stage after"``."""
    words = [f"for its own {own}" for own in kind.after]
    if kind.consumes is not None:
        words.append(f"for the stage {'before' if kind.consumes == 'forward' else 'after'}")
    return f"{kind} waits {' and '.join(words)}"


def urgency(action: Action) -> tuple[int, int]:
    """Return a sort key: of the actions that may run on a device, the one with the smallest key goes first.

    Backwards go before forwards, and lower micro-batches before higher ones.
    """
    return action.kind.priority, action.micro_batch


def sequences(training: bool) -> Sequence[tuple[Kind, ...]]:
    """Return the sequences of kinds that a stage may run on a micro-batch."""
    return ACTION_SEQUENCES[1:] if training else ACTION_SEQUENCES[:1]


def sequence(found: Collection[Kind], training: bool) -> tuple[Kind, ...]:
    """Return the sequence of kinds that has most in common with the kinds found for a micro-batch on a stage."""
    return max(sequences(training), key=lambda kinds: sum(kind in kinds for kind in found))


def trains(row: Iterable[Action]) -> bool:
    """Return whether a row has backwards."""
    return any(action.kind is not ACTION_SEQUENCES[0][0] for action in row)


def num_forward_only(schedule: Schedule) -> int:
    """Return how many leading stages run forwards only while others train; 0 if nothing is trained."""
    training = [trains(row) for row in schedule.rows]
    return training.index(True) if any(training) else 0


def in_turn(row: Sequence[Action], first: int, every: int) -> tuple[Action, ...]:
    """Return the actions of one replica from the row of its stage: every ``every``-th micro-batch from ``first`` on."""
    return tuple(action for action in row if action.micro_batch % every == first)


def turns_of(schedule: Schedule, iterations: int = 1) -> dict[int, deque[int]]:
    """Return for each stage that takes turns the turns of its process; stages of a process share one deque."""
    return {stage: turns for turns in [deque(order * iterations) for order in schedule.turns] for stage in set(turns)}


def check_hosted(schedule: Schedule, owners: Sequence[int]) -> None:
    """Check that stages which take turns are on one process.

    Args:
        schedule: schedule of all stages.
        owners: rank of the process of each stage, shape ``(K,)``.
    Raises:
        ScheduleError: stages that take turns are on several processes.
    """
    for turns in schedule.turns:
        if len({owners[stage] for stage in turns}) > 1:
            hosted = ", ".join(f"stage {stage} on rank {owners[stage]}" for stage in sorted(set(turns)))
            raise ScheduleError(
                f"the stages {', '.join(map(str, sorted(set(turns))))} take turns in the schedule {schedule.name!r}, "
                f"but they are on several processes: {hosted}; use num_stages and devices that put them on one"
            )


def check_can_run(schedule: Schedule) -> None:
    """Check that stages can run a schedule; raise ScheduleError otherwise."""
    for check in CHECKS:
        check(schedule)


def peak_stash(rows: Iterable[Iterable[Action]]) -> tuple[int, ...]:
    """Return the largest number of stashed micro-batches of each stage, shape ``(K,)``; 0 for rows without backwards.

    Actions of a stage do not overlap, so the order of its row alone decides how much it stashes. A micro-batch counts
    until all of its stash is freed, although less is kept after a part of its backward.
    """
    peaks = []
    for row in rows:
        held = peak = 0
        actions = tuple(row)
        for action in actions:
            held += action.kind.stash
            peak = max(peak, held)
        peaks.append(peak if trains(actions) else 0)
    return tuple(peaks)

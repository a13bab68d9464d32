"""Builders: every synchronous schedule here is one formula, a warm-up per stage.

A stage runs ``w`` forwards, then pairs of a forward and a backward, then the remaining backwards; micro-batches come
in ascending order in both directions::

    w = 2, M = 5     F0 F1 | F2 B0  F3 B1  F4 B2 | B3 B4
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule

if TYPE_CHECKING:
    from lightning_avgpipe.schedule.simulator import StageCosts

__all__ = [
    "NAMES",
    "build",
    "check",
    "from_warm_up",
    "stepped_warm_up",
    "uneven_steps",
    "uneven_warm_up",
    "warm_up",
]

NAMES = ("advance_forward", "1f1b", "afab", "forward")


def build(name: str, num_stages: int, num_microbatches: int, advance: int = 0) -> Schedule:
    """Build a schedule by name.

    Args:
        name: ``"advance_forward"``, ``"1f1b"``, ``"afab"`` (all forwards, then all backwards) or ``"forward"`` (no
            backwards: evaluation).
        num_stages: K, at least 1.
        num_microbatches: M, at least 1.
        advance: h of ``"advance_forward"``; 0 is 1F1B, a large one AFAB on all stages but the last. The other names
            have none and ignore it.
    Raises:
        ScheduleError: a size or name that is none.
    Source: AFAB, GPipe, Huang et al., arXiv:1811.06965; 1F1B, Narayanan et al., arXiv:2104.04473; advance forward
        propagation, AvgPipe, Chen et al., PPoPP 2023, section 4.
    """
    ahead = warm_up(name, num_stages, num_microbatches, advance)
    if name == "forward":
        row = tuple(Action("F", i) for i in range(num_microbatches))
        return Schedule(name, num_stages, num_microbatches, (row,) * num_stages, ahead)
    return from_warm_up(ahead, num_microbatches, name)


def warm_up(name: str, num_stages: int, num_microbatches: int, advance: int = 0) -> tuple[int, ...]:
    """Forwards before the first backward, per stage: shape ``(num_stages,)``.

    AFAB and forward: M. 1F1B: min(M, K-1-k). Advance forward propagation: min(M, (K-1-k)(1+h)), so that neighbours
    differ by 1+h and each hop has that many messages in flight. Only differences between neighbours matter: the same
    extra on every stage would cost memory and gain nothing.
    """
    _check_sizes(num_stages, num_microbatches)
    if name not in NAMES:
        raise ScheduleError(f"unknown schedule {name!r}; use one of {', '.join(map(repr, NAMES))}")
    if not isinstance(advance, int) or advance < 0:
        raise ScheduleError(f"advance={advance!r}: must be an integer of at least 0; 0 is 1F1B")
    if name in ("afab", "forward"):
        return (num_microbatches,) * num_stages
    step = 1 + (advance if name == "advance_forward" else 0)
    return tuple(min(num_microbatches, (num_stages - 1 - k) * step) for k in range(num_stages))


def uneven_steps(costs: StageCosts) -> tuple[int, ...]:
    """How many forwards each stage should be ahead of the next, shape ``(K-1,)``, for stages of unequal cost.

    ``w_k - w_{k+1} = max(1, ceil((f_k + b_k + f_{k+1} + b_{k+1} + tau_f + tau_b) / P - 1))`` with P the largest of all
    stages' f + b and all transfers, and tau a hop's transfer plus latency: so many micro-batches pass while one makes
    the round over the hop.
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
    """The warm-up of advance h where hops deserve unequal steps, shape ``(len(steps) + 1,)``.

    The largest step between neighbours is 1+h. From h = 0, which is 1F1B, each hop's step grows with h until it is what
    ``steps`` asks for, and when all have got there, all grow on::

        steps = (1, 3)     h = 0: (1, 1)   h = 1: (1, 2)   h = 2: (1, 3)   h = 3: (2, 4)

    Equal steps give advance forward propagation, (K-1-k)(1+h). A larger h is never a smaller warm-up.

    Args:
        steps: of the hops, as :func:`uneven_steps` finds them, each at least 1.
        num_microbatches: M.
        advance: h.
    """
    _check_sizes(len(steps) + 1, num_microbatches)
    beyond = max(0, 1 + advance - max(steps, default=1))
    result = [0]
    for step in reversed(steps):
        result.append(result[-1] + min(step, 1 + advance) + beyond)
    return tuple(min(num_microbatches, w) for w in reversed(result))


def uneven_warm_up(costs: StageCosts, num_microbatches: int) -> tuple[int, ...]:
    """The warm-up of advance forward propagation for stages of unequal cost, shape ``(num_stages,)``."""
    steps = uneven_steps(costs)
    return stepped_warm_up(steps, num_microbatches, max(steps, default=1) - 1)


def from_warm_up(warm_up: Sequence[int], num_microbatches: int, name: str = "custom") -> Schedule:
    """Build the schedule with this warm-up.

    Args:
        warm_up: forwards before the first pair, shape ``(num_stages,)``.
        num_microbatches: M.
        name: of the schedule.
    Raises:
        DeadlockError: ``min(w_k, M-1)`` increases from a stage to the next, which then waits for a forward that this
            one only starts after a backward of that stage; shows the grid.
    """
    _check_sizes(len(warm_up), num_microbatches)
    if any(w < 0 for w in warm_up):
        raise ScheduleError(f"warm_up={tuple(warm_up)}: counts of forwards must be at least 0")
    capped = tuple(min(w, num_microbatches) for w in warm_up)
    rows = tuple(_row(w, num_microbatches) for w in capped)
    schedule = Schedule(name, len(warm_up), num_microbatches, rows, capped)
    effective = [min(w, num_microbatches - 1) for w in warm_up]
    for k, (here, after) in enumerate(itertools.pairwise(effective)):
        if here < after:
            raise DeadlockError(
                f"stage {k + 1} wants {after + 1} forwards before its first backward, but stage {k} waits for that "
                f"backward after {here + 1}; the warm-up must not increase from stage to stage:\n{schedule}"
            )
    return schedule


def check(schedule: Schedule) -> None:
    """Check a schedule that was made by hand: every action once on every stage, and no deadlock.

    Raises:
        ScheduleError: an action is missing, repeated or out of range.
        DeadlockError: the stages cannot all finish; shows where each of them stops.
    """
    _check_sizes(schedule.num_stages, schedule.num_microbatches)
    wanted = {Action("F", i) for i in range(schedule.num_microbatches)}
    if any(action.kind == "B" for row in schedule.rows for action in row):
        wanted |= {Action("B", i) for i in range(schedule.num_microbatches)}
    for k, row in enumerate(schedule.rows):
        _check_complete(k, row, wanted)
    left = [deque(row) for row in schedule.rows]
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for k, rest in enumerate(left):
            while rest and _inputs(k, rest[0], schedule.num_stages) <= done:
                done.add((k, rest.popleft()))
                moved = True
    stuck = [f"stage {k} at {rest[0]}" for k, rest in enumerate(left) if rest]
    if stuck:
        raise DeadlockError(
            f"no action can start any more: {', '.join(stuck)}. F waits for the same F one stage before, "
            f"B for its own F and for the same B one stage after; reorder these rows:\n{schedule}"
        )


def _check_complete(stage: int, row: tuple[Action, ...], wanted: set[Action]) -> None:
    count = Counter(row)
    wrong = {
        "misses": sorted(wanted - set(row)),
        "repeats": sorted(action for action, times in count.items() if times > 1),
        "has no use for": sorted(set(row) - wanted),
    }
    found = [f"{verb} {', '.join(map(str, actions))}" for verb, actions in wrong.items() if actions]
    if found:
        raise ScheduleError(
            f"stage {stage} has {len(row)} actions and {'; '.join(found)}; give it each of {len(wanted)} actions once"
        )


def _inputs(stage: int, action: Action, num_stages: int) -> set[tuple[int, Action]]:
    """What must have happened before an action, besides the actions before it in its row."""
    if action.kind == "F":
        return {(stage - 1, action)} if stage > 0 else set()
    needed = {(stage, Action("F", action.micro_batch))}
    if stage < num_stages - 1:
        needed.add((stage + 1, action))
    return needed


def _row(warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    row = [Action("F", i) for i in range(warm_up)]
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            row.append(Action("F", warm_up + i))
        row.append(Action("B", i))
    return tuple(row)


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1:
        raise ScheduleError(f"num_stages={num_stages}: a schedule needs at least one stage")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches}: a schedule needs at least one micro-batch")

"""The simulator: when each action of a schedule runs, and how long an iteration takes.

The model: a stage does one action at a time, in the order of its row. Each hop has two links, one per direction, that
do not disturb each other. A message queues at its link when its action ends, occupies the link for its transfer time,
and arrives after the latency. Sending costs the stage nothing. A stage stashes a micro-batch from the start of its
forward to the end of its backward; without a backward it stashes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import build, check, from_warm_up, stepped_warm_up
from lightning_avgpipe.schedule.timeline import Span, Timeline, Transfer, peak_stash

__all__ = ["StageCosts", "first_advance", "least_possible_s", "simulate", "smallest_sufficient_advance"]

# Relative; times that differ by less differ only in the order of their additions.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class StageCosts:
    """Seconds per micro-batch.

    Attributes:
        forward_s: of each stage, shape ``(K,)``.
        backward_s: of each stage, shape ``(K,)``.
        send_forward_s: time for which values occupy the link of each hop, shape ``(K-1,)``.
        send_backward_s: the same for gradients, shape ``(K-1,)``.
        latency_s: of each hop, in either direction, shape ``(K-1,)``.
    Raises:
        ScheduleError: no stage, lengths that do not fit together, or a time that is negative or not finite.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    latency_s: Sequence[float]

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if num_stages == 0:
            raise ScheduleError("forward_s has no entries; give one per stage, at least one")
        wanted = {"backward_s": num_stages} | dict.fromkeys(
            ("send_forward_s", "send_backward_s", "latency_s"), num_stages - 1
        )
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                raise ScheduleError(
                    f"{name} has {len(getattr(self, name))} entries, but needs {length}: forward_s has {num_stages}"
                )
        for name in ("forward_s", *wanted):
            if not all(0 <= seconds < math.inf for seconds in getattr(self, name)):
                raise ScheduleError(f"{name}={list(getattr(self, name))}: times must be finite and not negative")

    @classmethod
    def uniform(
        cls, num_stages: int, forward_s: float, backward_s: float, send_s: float = 0.0, latency_s: float = 0.0
    ) -> StageCosts:
        """Equal stages and hops; ``send_s`` per hop and direction."""
        send = (send_s,) * (num_stages - 1)
        latency = (latency_s,) * (num_stages - 1)
        return cls((forward_s,) * num_stages, (backward_s,) * num_stages, send, send, latency)

    @classmethod
    def measured(cls, timeline: Timeline) -> StageCosts:
        """Medians of what a timeline shows; 0 for what does not occur in it, such as messages within a device."""
        stages, hops = range(timeline.num_stages), range(timeline.num_stages - 1)

        def action_s(stage: int, kind: str) -> float:
            return _median(s.end_s - s.begin_s for s in timeline.spans if (s.stage, s.action.kind) == (stage, kind))

        def send_s(hop: int, direction: str) -> float:
            return _median(t.end_s - t.begin_s for t in timeline.transfers if (t.hop, t.direction) == (hop, direction))

        return cls(
            tuple(action_s(k, "F") for k in stages),
            tuple(action_s(k, "B") for k in stages),
            tuple(send_s(hop, "forward") for hop in hops),
            tuple(send_s(hop, "backward") for hop in hops),
            tuple(_median(t.arrival_s - t.end_s for t in timeline.transfers if t.hop == hop) for hop in hops),
        )


def _median(seconds: Iterable[float]) -> float:
    found = list(seconds)
    return max(0.0, statistics.median(found)) if found else 0.0


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Predict when each action runs.

    Args:
        schedule: every action once per stage.
        costs: seconds per action and message.
    Returns:
        The timeline of one iteration; each action and message is looked at once.
    Raises:
        ScheduleError: costs for another number of stages, or a schedule that is not complete.
        DeadlockError: a stage waits for something that never comes; shows the grid.
    """
    num_stages = schedule.num_stages
    if len(costs.forward_s) != num_stages:
        raise ScheduleError(f"costs for {len(costs.forward_s)} stages, but the schedule has {num_stages}")
    check(schedule)  # so the loop below gets to the end of every row
    clock = [0.0] * num_stages
    position = [0] * num_stages
    link_free = {("forward", k): 0.0 for k in range(num_stages)} | {("backward", k): 0.0 for k in range(num_stages)}
    arrival: dict[tuple[int, Action], float] = {}  # when a stage's action may begin
    spans: list[Span] = []
    transfers: list[Transfer] = []
    # A stage runs as far as its inputs have arrived; what it sends may set its neighbours going.
    awake = list(range(num_stages))
    while awake:
        k = awake.pop()
        row = schedule.rows[k]
        while position[k] < len(row):
            action = row[position[k]]
            needs_message = k > 0 if action.kind == "F" else k < num_stages - 1
            if needs_message and (k, action) not in arrival:
                break
            begin = max(clock[k], arrival.get((k, action), 0.0))
            duration = costs.forward_s[k] if action.kind == "F" else costs.backward_s[k]
            clock[k] = begin + duration
            position[k] += 1
            spans.append(Span(k, action, begin, clock[k]))
            neighbour = k + 1 if action.kind == "F" else k - 1
            if 0 <= neighbour < num_stages:
                transfer = _send(k, action, clock[k], costs, link_free)
                transfers.append(transfer)
                arrival[neighbour, action] = transfer.arrival_s
                awake.append(neighbour)
    return Timeline(num_stages, tuple(spans), tuple(transfers), peak_stash(schedule))


def _send(
    stage: int, action: Action, now: float, costs: StageCosts, link_free: dict[tuple[str, int], float]
) -> Transfer:
    direction: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
    hop = stage if direction == "forward" else stage - 1
    seconds = costs.send_forward_s[hop] if direction == "forward" else costs.send_backward_s[hop]
    begin = max(now, link_free[direction, hop])
    link_free[direction, hop] = begin + seconds
    return Transfer(hop, direction, action.micro_batch, begin, begin + seconds, begin + seconds + costs.latency_s[hop])


def smallest_sufficient_advance(num_stages: int, num_microbatches: int, costs: StageCosts) -> int:
    """The smallest advance h whose iteration is as short as that of any advance.

    Searched, not bisected: more advance can also be slower, when a transfer takes longer than a forward or a backward,
    or when the stages are uneven. An extra forward then delays a backward that another stage waits for.

    Args:
        num_stages: K.
        num_microbatches: M; beyond h = M - 1 nothing changes any more.
        costs: seconds per action and message.
    """
    schedules = (build("advance_forward", num_stages, num_microbatches, h) for h in range(num_microbatches))
    return _first_of_the_fastest(schedules, num_microbatches, costs)


def first_advance(steps: Sequence[int], num_microbatches: int, costs: StageCosts) -> int:
    """The advance to begin with where costs are measured: up to what ``steps`` asks for, the smallest of the fastest.

    Never slower than 1F1B, which more forwards ahead can be.

    Args:
        steps: of the hops, as ``uneven_steps(costs)``.
        num_microbatches: M.
        costs: seconds per action and message.
    """
    advances = range(min(num_microbatches, max(steps, default=1)))
    schedules = (from_warm_up(stepped_warm_up(steps, num_microbatches, h), num_microbatches) for h in advances)
    return _first_of_the_fastest(schedules, num_microbatches, costs)


def _first_of_the_fastest(schedules: Iterable[Schedule], num_microbatches: int, costs: StageCosts) -> int:
    bound = least_possible_s(costs, num_microbatches)
    best, best_s = 0, math.inf
    for index, schedule in enumerate(schedules):
        seconds = simulate(schedule, costs).iteration_s
        if seconds < best_s * (1 - _ROUNDING):
            best, best_s = index, seconds
        if best_s <= bound * (1 + _ROUNDING):
            break
    return best


def least_possible_s(costs: StageCosts, num_microbatches: int) -> float:
    """No schedule is faster: each stage waits for its first value, does its work, and its last gradient travels home.

    ::

        stage 0 | F0                      B_
        stage 1 |    F0                B_
        stage 2 |       F0 ... M(f+b) B_       <- busy without a pause
    """
    before = least = 0.0  # the way to stage k and back, for one micro-batch
    for k, (forward_s, backward_s) in enumerate(zip(costs.forward_s, costs.backward_s, strict=True)):
        least = max(least, before + num_microbatches * (forward_s + backward_s))
        before += forward_s + backward_s
        if k < len(costs.latency_s):
            before += costs.send_forward_s[k] + costs.send_backward_s[k] + 2 * costs.latency_s[k]
    return least

"""The simulator of schedules: when each action of each pipeline runs, and how long an iteration takes.

It plays the schedules, see :mod:`~lightning_avgpipe.schedule.player`. A stage stashes a micro-batch from the start of
its forward to the end of the last part of its backward; without a backward it stashes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.costs import CostModel, StageCosts
from lightning_avgpipe.schedule.kinds import KINDS
from lightning_avgpipe.schedule.player import Player, Sharing, play
from lightning_avgpipe.schedule.rules import num_forward_only, peak_stash, sequence, sequences, trains, urgency
from lightning_avgpipe.schedule.timeline import Span, Timeline, Transfer


def simulate(
    schedules: Schedule | Sequence[Schedule],
    costs: CostModel,
    devices: Sequence[int] = (),
    sharing: type[Sharing] | None = None,
    iterations: int = 1,
    replicas: Sequence[Sequence[int]] = (),
    updates_s: Sequence[float] = (),
) -> Timeline:
    """Predict when each action runs.

    Args:
        schedules: schedule of each pipeline, or of the only one. All pipelines begin at once.
        costs: seconds per action and message.
        devices: device of each stage, shape ``(K,)``; default: ``devices`` of the first schedule.
        sharing: how a device serves several lanes; default: ``InTurns``. With ``SideBySide``, turns of schedules are
            ignored.
        iterations: number of iterations that follow one another without a drain.
        replicas: devices that take the micro-batches of each stage in turns, shape ``(K, any)``; default: only the
            device in ``devices``. Each pair of replicas of neighbouring stages has links of its own.
        updates_s: seconds that an update takes on each stage, shape ``(K,)``, for which a pipeline waits before its
            next iteration if several pipelines go on without a drain; default: none.
    Returns:
        The timeline of all iterations.
    Raises:
        ScheduleError: no iteration, costs for another number of stages, or a schedule that is not complete.
        DeadlockError: a stage waits for a message that is never sent. The message shows the grid.
    """
    if iterations < 1:
        raise ScheduleError(f"iterations={iterations}: at least one is simulated")
    schedules = [schedules] if isinstance(schedules, Schedule) else schedules
    for schedule in {id(schedule): schedule for schedule in schedules}.values():
        if costs.num_stages != schedule.num_stages:
            raise ScheduleError(f"costs for {costs.num_stages} stages, but the schedule has {schedule.num_stages}")
        _check_complete(schedule)
    hosts = replicas or [(device,) for device in devices or schedules[0].devices]
    return _timeline(play(schedules, costs, hosts, sharing, iterations, updates_s), tuple(map(tuple, hosts)))


def _timeline(player: Player, hosts: tuple[tuple[int, ...], ...]) -> Timeline:
    spans = [
        Span(lane.stage, Action(action.kind, i), begin_s, end_s, lane.pipeline, t)
        for lane in player.lanes
        for action, (begin_s, end_s) in zip(lane.row, lane.spans, strict=True)
        for t, i in [divmod(action.micro_batch, player.sizes[lane.pipeline])]
    ]
    transfers = tuple(
        Transfer(hop, direction, i, s, s + link.occupied_s, s + link.occupied_s + link.latency_s, n, t)
        for (direction, hop, _, _), link in player.links.items()
        for s, n, number in link.begins
        for t, i in [divmod(number, player.sizes[n])]
    )
    if len(player.lanes) == len(hosts):
        peaks = peak_stash(lane.row for lane in player.lanes)
    else:
        spans.sort(key=lambda span: (span.stage, span.end_s))
        found: list[list[list[Action]]] = [[[] for _ in devices] for devices in hosts]  # actions of each replica
        for span in sorted(spans, key=lambda s: (s.begin_s, 1) if s.action.kind.stash > 0 else (s.end_s, 0)):
            rows = found[span.stage]
            rows[span.action.micro_batch % len(rows)].append(span.action)
        peaks = tuple(max(peak_stash(replicas)) for replicas in found)
    return Timeline(len(hosts), tuple(spans), transfers, peaks, hosts)


def check(schedule: Schedule) -> None:
    """Check that a schedule has every action once on every stage, and that it does not deadlock.

    Raises:
        ScheduleError: an action is missing, repeated or out of range.
        DeadlockError: the stages cannot all finish. The message shows where each of them stops.
    """
    _check_complete(schedule)
    costs = StageCosts.uniform(schedule.num_stages, 0.0, 0.0)
    play([schedule], costs, [(device,) for device in schedule.devices])


def _check_complete(schedule: Schedule) -> None:
    """Check that every stage runs all actions of each of its micro-batches, once each."""
    training = any(map(trains, schedule.rows))
    first = num_forward_only(schedule)
    numbers = range(schedule.num_microbatches)
    for stage, row in enumerate(schedule.rows):
        both = training and stage >= first
        usual = [{Action(kind, i) for kind in kinds for i in numbers} for kinds in sequences(both)]
        count = Counter(row)
        if len(count) == len(row) and count.keys() in usual:
            continue
        # a stage may run whole backwards for some micro-batches and split ones for others
        wanted = {Action(kind, i) for i in numbers for kind in sequence([k for k in KINDS if (k, i) in count], both)}
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

"""Several pipelines on shared devices: in turns in the executor's order, or side by side at the speed that is left."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    InTurns,
    Schedule,
    SideBySide,
    StageCosts,
    build,
    simulate,
)

EXACT = 1e-9


def in_turns_s(schedule: Schedule, num_pipelines: int, costs: StageCosts) -> float:
    """Slow and plain: from instant to instant, every idle device takes what the executor would take."""
    stages, last = range(schedule.num_stages), schedule.num_stages - 1
    left = {(k, n): list(schedule.rows[k]) for k in stages for n in range(num_pipelines)}
    there: dict[tuple[int, int, Action], float] = {}
    for n, i in itertools.product(range(num_pipelines), range(schedule.num_microbatches)):
        there[0, n, Action(FORWARD, i)] = there[last, n, Action(BACKWARD, i)] = 0.0
    busy, link, now = [0.0] * len(stages), {}, 0.0
    while any(left.values()):
        for k in stages:
            ready = [(row[0], n) for (j, n), row in left.items() if row and j == k]
            ready = [(action, n) for action, n in ready if there.get((k, n, action), now + 1) <= now]
            if busy[k] > now or not ready:
                continue
            action, n = min(ready, key=lambda r: (r[0].kind is FORWARD, r[0].micro_batch, r[1]))
            left[k, n].pop(0)
            forward = action.kind is FORWARD
            busy[k] = now + (costs.forward_s if forward else costs.backward_s)[k]
            to, hop = (k + 1, k) if forward else (k - 1, k - 1)
            if 0 <= to <= last:
                send_s = (costs.send_forward_s if forward else costs.send_backward_s)[hop]
                link[forward, hop] = max(busy[k], link.get((forward, hop), 0.0)) + send_s
                there[to, n, action] = link[forward, hop] + costs.latency_s[hop]
        later = [t for t in (*busy, *there.values()) if t > now]
        now = min(later, default=now)
    return max(busy)


COSTS = {
    "balanced": StageCosts.uniform(3, 1.0, 2.0),
    "slow links": StageCosts.uniform(3, 1.0, 2.0, 4.0, 0.5),
    "uneven": StageCosts([1.0, 3.0, 2.0], [2.5, 5.0, 1.0], [0.25, 2.0], [0.5, 1.5], [0.125, 0.0]),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("schedule", ["1f1b", "advance_forward", "afab"])
def test_devices_in_turns_choose_as_the_executor_does(costs: StageCosts, schedule: str) -> None:
    for m, n in itertools.product((1, 2, 5), (1, 2, 3)):
        rows = build(schedule, 3, m, 1)
        found = simulate([rows] * n, costs).iteration_s
        assert found == pytest.approx(in_turns_s(rows, n, costs), rel=EXACT), (m, n)


def test_actions_that_fill_their_device_take_as_long_side_by_side_as_in_turns() -> None:
    costs, schedule = StageCosts([1], [2], [], [], []), build("1f1b", 1, 3)
    for n in (1, 2, 4):
        assert simulate([schedule] * n, costs, sharing=SideBySide).iteration_s == pytest.approx(n * 9, rel=EXACT)


def test_a_device_with_two_stages_does_the_work_of_both() -> None:
    timeline = simulate(build("1f1b", 2, 4), StageCosts.uniform(2, 1, 2), devices=(0, 0))
    assert timeline.iteration_s == 2 * 4 * 3
    assert timeline.bubble_fraction == 0 and timeline.devices == (0, 0)
    spans = sorted((span.begin_s, span.end_s) for span in timeline.spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("sharing", [InTurns, SideBySide])
def test_a_timeline_of_several_pipelines_has_every_action_and_message_and_their_stash(sharing: type) -> None:
    costs, schedule = StageCosts.uniform(3, 1, 2, 0.5, 0.25), build("advance_forward", 3, 4, 1)
    timeline = simulate([schedule] * 2, costs, sharing=sharing)
    assert (
        timeline.num_pipelines == 2
        and len(timeline.spans) == 2 * 3 * 4 * 2
        and len(timeline.transfers) == 2 * 2 * 4 * 2
    )
    assert [timeline.schedule(n).rows for n in (0, 1)] == [schedule.rows] * 2
    alone = simulate(schedule, costs).peak_stash
    for both, one in zip(timeline.peak_stash, alone, strict=True):
        assert one <= both <= 2 * one
    for transfer in timeline.transfers:
        assert transfer.end_s - transfer.begin_s == pytest.approx(0.5) and transfer.arrival_s == transfer.end_s + 0.25

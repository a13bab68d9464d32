"""The simulator against expected values, and what must hold for any costs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    StageCosts,
    build,
    first_advance,
    simulate,
    uneven_steps,
    warm_up,
)

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())[
    "cases"
]


def name(case: dict[str, Any]) -> str:
    return f"K{case['K']}-M{case['M']}-c{case['c']}-lat{case['lat']}"


def costs_of(case: dict[str, Any]) -> StageCosts:
    return StageCosts.uniform(case["K"], case["f"], case["b"], case["c"], case["lat"])


@pytest.mark.parametrize("case", GOLDEN, ids=name)
def test_golden_values(case: dict[str, Any]) -> None:
    costs = costs_of(case)
    for key, schedule in {
        "afab": build("afab", case["K"], case["M"]),
        "one_f_one_b": build("1f1b", case["K"], case["M"]),
        "advance_forward": build("advance_forward", case["K"], case["M"], case["advance_forward"]["h"]),
    }.items():
        timeline = simulate(schedule, costs)
        assert timeline.iteration_s == pytest.approx(case[key]["T"], abs=1e-9), key
        assert list(timeline.peak_stash) == case[key]["peak"], key
    assert list(warm_up("1f1b", case["K"], case["M"])) == case["one_f_one_b"]["w"]
    expected = case["advance_forward"]
    assert list(warm_up("advance_forward", case["K"], case["M"], expected["h"])) == expected["w"]


@pytest.mark.parametrize("case", GOLDEN, ids=name)
def test_the_first_advance_is_the_smallest_sufficient_one(case: dict[str, Any]) -> None:
    costs = costs_of(case)
    assert first_advance(uneven_steps(costs), case["M"], costs) == case["advance_forward"]["h"]


def times_by_advance(num_microbatches: int, costs: StageCosts) -> list[float]:
    """Iteration seconds for the advances 0 (1F1B) to 3."""
    num_stages = len(costs.forward_s)
    return [simulate(build("advance_forward", num_stages, num_microbatches, h), costs).iteration_s for h in range(4)]


def test_more_advance_is_never_slower_if_stages_are_equal_and_links_are_faster() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_stages, forward_s, backward_s = rng.randint(1, 5), rng.random(), 2 * rng.random()
        hops, shorter = num_stages - 1, min(forward_s, backward_s)
        costs = StageCosts(
            (forward_s,) * num_stages,
            (backward_s,) * num_stages,
            tuple(shorter * rng.random() for _ in range(hops)),
            tuple(shorter * rng.random() for _ in range(hops)),
            tuple(4 * rng.random() for _ in range(hops)),  # latency occupies nothing, so it may be any
        )
        times = times_by_advance(rng.randint(1, 10), costs)
        assert all(more <= less + 1e-9 for less, more in itertools.pairwise(times))


def test_advance_may_be_slower_if_a_link_is_busier_than_the_stages() -> None:
    assert times_by_advance(5, StageCosts.uniform(3, 1, 1, send_s=10)) == [102, 86, 94, 104]


def test_actions_of_a_stage_and_messages_of_a_link_do_not_overlap() -> None:
    costs = StageCosts.uniform(3, 1, 2, 1.5, 0.5)
    timeline = simulate(build("advance_forward", 3, 6, 1), costs)
    assert len(timeline.spans) == 3 * 6 * 2
    assert len(timeline.transfers) == 2 * 6 * 2
    for stage in range(3):
        spans = sorted((s.begin_s, s.end_s) for s in timeline.spans if s.stage == stage)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for hop in range(2):
        for direction in ("forward", "backward"):
            busy = sorted((t.begin_s, t.end_s) for t in timeline.transfers if (t.hop, t.direction) == (hop, direction))
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(busy))
    begins = {(s.stage, s.action): s.begin_s for s in timeline.spans}
    for transfer in timeline.transfers:
        assert transfer.arrival_s == pytest.approx(transfer.end_s + 0.5)
        forward = transfer.direction == "forward"
        stage = transfer.hop + 1 if forward else transfer.hop
        assert begins[stage, Action(FORWARD if forward else BACKWARD, transfer.micro_batch)] >= transfer.arrival_s


@pytest.mark.parametrize("iterations", [1, 3])
def test_replicas_take_micro_batches_in_turns_also_of_several_pipelines(iterations: int) -> None:
    costs, schedule = StageCosts.uniform(2, 1, 2, 0.5, 0.25), build("1f1b", 2, 3)
    timeline = simulate([schedule] * 2, costs, iterations=iterations, replicas=[(0, 1), (2,)])
    assert timeline.rows == (0, 1, 2) and len(timeline.spans) == 2 * 2 * 3 * 2 * iterations
    begins = {(s.pipeline, s.iteration, s.stage, s.action): s.begin_s for s in timeline.spans}
    for device in timeline.rows:  # a replica does one action at a time
        mine = [s for s in timeline.spans if timeline.device_of(s.stage, s.action.micro_batch) == device]
        busy = sorted((s.begin_s, s.end_s) for s in mine)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(busy))
    for t in timeline.transfers:
        stage, kind = (1, FORWARD) if t.direction == "forward" else (0, BACKWARD)
        assert begins[t.pipeline, t.iteration, stage, Action(kind, t.micro_batch)] >= t.arrival_s

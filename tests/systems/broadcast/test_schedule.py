"""Broadcast forward: who is what, what a message takes through a mid, and when it gains over 1F1B."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import FORWARD, StageCosts, build, check, of_function, simulate
from lightning_avgpipe.systems.broadcast.schedule import Broadcast


def test_every_size_is_complete_and_finishes() -> None:
    for num_stages, num_microbatches in itertools.product(range(1, 9), range(1, 9)):
        schedule = Broadcast()(num_stages, num_microbatches)
        check(schedule)
        found = simulate(schedule, StageCosts.uniform(num_stages, 1, 2)).iteration_s
        assert found == 3 * (num_microbatches + num_stages - 1) + (num_microbatches - 1) * (num_stages > 2)


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_a_message_takes_two_latencies_and_one_and_a_segment_of_transfers_through_a_mid(segments: int) -> None:
    costs = StageCosts.uniform(3, 1, 2, send_s=4, latency_s=0.25)
    spans = simulate(Broadcast(segments)(3, 1), costs).spans
    (leaf,) = (span for span in spans if span.stage == 2 and span.action.kind.counts_as is FORWARD)
    assert leaf.begin_s == pytest.approx(1 + 2 * 0.25 + (1 + 1 / segments) * 4)
    assert leaf.end_s - leaf.begin_s == 2  # the mid's forward and its own
    (graph,) = (span for span in spans if span.stage == 1 and span.action.kind.counts_as is FORWARD)
    assert graph.begin_s == pytest.approx(1 + 0.25 + 4)


@pytest.mark.parametrize(("ratio", "gain"), [(0, 0.84), (0.5, 1.00), (1, 1.07), (2, 1.11)])
def test_it_gains_where_a_transfer_takes_longer_than_half_a_forward(ratio: float, gain: float) -> None:
    costs = StageCosts.uniform(12, 1, 2, send_s=ratio)
    assert Broadcast().gain(costs, 16) == pytest.approx(gain, abs=0.006)


def test_weights_that_are_on_their_way_when_a_value_wants_to_pass_delay_it() -> None:
    costs = StageCosts.uniform(3, 1, 2, send_s=2)
    iteration_s, first_s = simulate(Broadcast()(3, 4), costs).iteration_s, 1 + 2 / 8
    for copy_s, late_s in ((1, 0), (first_s, 0), (5, 5 - first_s)):
        gain = Broadcast().gain(costs, 4, copy_s=(0, copy_s))
        assert gain == pytest.approx(simulate(build("1f1b", 3, 4), costs).iteration_s / (iteration_s + late_s))


@pytest.mark.parametrize(
    "rows",
    [
        ("F0 F1 B0 B1", "F0 B0 G1 B1", "D0 B0 D1 B1"),  # not always
        ("F0 F1 B0 B1", "G0 B0 G1 B1", "F0 B0 F1 B1"),  # the last stage lacks what the mid would send
        ("F0 F1 B0 B1", "F0 B0 F1 B1", "D0 B0 D1 B1"),  # it has what it needs already
        ("F0 F1 B0 B1", "F0 F1 B0 B1", "G0 B0 G1 B1"),  # there is nobody behind the last stage
    ],
)
def test_who_builds_graphs_late_has_one_before_that_sends_and_one_behind_that_runs_both(rows: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"a stage that runs graph \(G\) runs no other forwards, has one that"):
        of_function(lambda num_stages, num_microbatches: rows, 3, 2)


def test_it_can_be_trained_with() -> None:
    assert of_function(Broadcast(), 4, 4).relays == {2}
    assert of_function(Broadcast(), 2, 4).rows == build("1f1b", 2, 4).rows  # nobody is in the middle
    with pytest.raises(ScheduleError, match="segments=0"):
        Broadcast(0)

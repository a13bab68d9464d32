"""Processes of a cluster, here threads, do things together, hear what rank 0 says, and end together."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence, Sized
from datetime import timedelta
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.batches import BatchStream
from lightning_avgpipe.comm.channel import MemoryChannel, Traffic
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import sum_in_order
from lightning_avgpipe.comm.control import ControlChannel
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.probe import measure_bandwidth, pairings, time_trips
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.errors import ConfigurationError, PeerError
from tests import processes
from tests.threads import CPU, Blown, Injector, alone, results, run

THREE = StageMap.on(DeviceLayout(3), 3)
TWO_GROUPS = StageMap.on(DeviceLayout(4), 2)  # ranks 0, 1 and 2, 3


# -- other stages on the same processes ------------------------------------------------------------------------------

FOUR = StageMap.on(DeviceLayout(4), 4)
SHARED = FOUR.placed([(2, 3), (0, 1)])


@pytest.mark.parametrize("action", ["join replicas", "connect forward 0"])
def test_an_error_while_processes_come_to_share_stages_is_named(action: str) -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank == 1:
            injector.fail_at(1, action)
        cluster.rearrange(SHARED)
        cluster.world.barrier()

    injector = Injector()
    outcomes = run(FOUR, work, injector)
    assert isinstance(outcomes[1], Blown)
    for other in (0, 2, 3):
        told(outcomes[other], "rank 1 (stage 1, replica 1), which ", "the other processes to connect", "has blown")


# -- what rank 0 says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage_map", [THREE, TWO_GROUPS], ids=["one group", "two groups"])
def test_a_request_of_any_process_is_obeyed_by_all_at_the_same_message(stage_map: StageMap) -> None:
    def work(cluster: Cluster) -> Any:
        obeyed: list[tuple[str, int]] = []
        number = 0
        cluster.control.when_agreed(lambda request: obeyed.append((request, number)))
        if cluster.world.rank == stage_map.world_size - 1:
            cluster.watch.request("stop")
        while not cluster.control.agreed("stop"):
            number += 1
            cluster.control.relay(None, None)
        return obeyed

    found = results(run(stage_map, work))
    assert all(obeyed == found[0] for obeyed in found) and found[0][0][0] == "stop"


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_left_before_its_end_disturbs_no_other() -> None:
    def work(cluster: Cluster) -> Any:
        batches, got = cluster.batches, []
        first = batches.begin()
        got.append(batches.pass_on(first, "a0").item)
        if cluster.reads:
            batches.pass_on(first, "a1")
        second = batches.begin(instead_of=first)
        got += [batches.pass_on(second, f"b{i}").item for i in range(2)]
        return got

    assert results(run(THREE, work)) == [["a0", "b0", "b1"]] * 3


class Counted(MemoryChannel):
    """Counts the receives that are posted and not used."""

    posted = 0

    def expect(self, count: int, observers: Sequence[Traffic] = ()) -> None:
        self.posted += count

    def get(self) -> Message:
        self.posted -= 1
        assert self.posted >= 0
        return super().get()


def test_batches_do_not_wait_until_they_are_asked_for_and_no_receive_is_left() -> None:
    channel, control = Counted(), ControlChannel(0, alone(1).waits)
    source, sink = BatchStream(control, CPU, {1: channel}), BatchStream(control, CPU, inbox=channel)
    for first, count in ((0, 5), (5, 1), (6, 0), (6, 9)):  # streams of several epochs
        streams = source.begin(), sink.begin()
        for i in range(first, first + count):
            source.pass_on(streams[0], {"i": i})
            assert sink.pass_on(streams[1]).item == {"i": i}
            assert channel.posted >= 2  # those of two pipelines may come
    source.close()
    sink.close()
    assert channel.posted == 0 and not channel.ready()


def test_no_process_leaves_before_all_have_come_to_the_end() -> None:
    left = threading.Event()

    def work(cluster: Cluster) -> bool:
        cluster.group.barrier()
        if cluster.world.rank:
            return left.wait(0.2)
        cluster.close()
        left.set()
        return True

    assert results(run(TWO_GROUPS, work)) == [True, False, False, False]


def test_streams_that_end_early_leave_nothing_behind() -> None:
    channel, control = MemoryChannel(), ControlChannel(0, alone(1).waits)
    source, sink = BatchStream(control, CPU, {1: channel}), BatchStream(control, CPU, inbox=channel)
    held, streams = [], (None, None)
    for _ in range(20):
        streams = source.begin(streams[0]), sink.begin(streams[1])
        for i in range(3):
            source.pass_on(streams[0], i)
        assert [sink.pass_on(streams[1]).item for _ in range(2)] == [0, 1]  # not the last one
        held.append([sum(len(v) for v in vars(end).values() if isinstance(v, Sized)) for end in (source, sink)])
    assert held[-1] == held[1]


# -- agreement -------------------------------------------------------------------------------------------------------


def test_who_asks_for_something_else_is_named() -> None:
    def work(cluster: Cluster) -> None:
        cluster.confirm(f"reconfigure(num_pipelines={2 + (cluster.rank == 1)})", "in on_train_batch_end")

    for outcome in run(THREE, work):
        assert isinstance(outcome, ConfigurationError | PeerError)
        assert "num_pipelines=3) on rank 1 (stage 1); every rank must ask for the same" in str(outcome) or (
            "was called on rank 1 (stage 1)" in str(outcome)
        )


# -- links: every two processes measure theirs, and nobody two at a time -----------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_two_meet_once_in_the_fewest_rounds(count: int) -> None:
    found = list(pairings(count))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({member for pair in pairs for member in pair}) == 2 * len(pairs) for pairs in found)
    assert len([pairs for pairs in found if pairs]) == (0 if count == 1 else count - 1 + count % 2)


def test_every_process_knows_all_links() -> None:
    one, *others = results(run(THREE, lambda cluster: measure_bandwidth(cluster.group)))
    assert others == [one, one]
    for u, row in enumerate(one):
        assert [math.isinf(speed) for speed in row] == [u == v for v in range(3)]
        assert all(speed > 0 for speed in row)


# -- failures --------------------------------------------------------------------------------------------------------

WAITS = {
    "a collective": lambda cluster: cluster.group.barrier("the barrier 'x'"),
    "rank 0": lambda cluster: [cluster.control.broadcast() for _ in range(2)],
    "a batch": lambda cluster: cluster.batches.pass_on(cluster.batches.begin()),
    "connections": lambda cluster: cluster.transport.widen(2),
}


def told(outcome: Any, *texts: str) -> None:
    assert isinstance(outcome, PeerError), outcome
    assert all(text in str(outcome) for text in texts), outcome


@pytest.mark.parametrize("wait", WAITS)
def test_an_error_of_one_process_reaches_all_that_wait(wait: str) -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank == 0:
            with cluster.watch.during("thinks"):
                raise Blown("the fuse has blown")
        WAITS[wait](cluster)

    blown, *others = run(THREE, work)
    assert isinstance(blown, Blown)
    for outcome in others:
        told(
            outcome, "rank 0 (stage 2), which thinks, failed: Blown: the fuse has blown", "Noticed by rank", "waits for"
        )


def allocate_too_much() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def test_a_process_without_memory_says_so_and_nobody_speaks_of_connections() -> None:
    def work(cluster: Cluster) -> None:
        cluster.group.together("a collective", allocate_too_much if cluster.rank == 0 else cluster.group.barrier)

    zero, one, _ = run(THREE, work)
    assert "can't allocate memory" in str(zero) and not isinstance(zero, PeerError)
    told(one, "rank 0 (stage 2), which waits for the other processes in a collective, failed: RuntimeError: ")
    assert "can't allocate memory" in str(one) and "connection" not in str(one)


@pytest.mark.parametrize(
    ("rank", "action", "doing"),
    [(1, "join world", "waits for the other processes to connect"),
     (2, "connect news", "the other processes to connect"), (1, "connect forward 0", "to connect pipeline 0"),
     (2, "connect backward 0 of pipeline 1", "to connect pipeline 1")],
)  # fmt: skip
def test_an_error_while_processes_connect_is_named(rank: int, action: str, doing: str) -> None:
    outcomes = run(THREE, lambda cluster: cluster.transport.widen(2), Injector().fail_at(rank, action))
    assert isinstance(outcomes[rank], Blown)
    for other in {0, 1, 2} - {rank}:
        told(outcomes[other], f"rank {rank} (stage {2 - rank}), which ", doing, "Blown: the fuse has blown")


def test_silence_ends_after_the_timeout_with_what_all_do() -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank == 0:
            with cluster.watch.during("is stuck"):
                while True:
                    cluster.watch.check_after_round()
        else:
            cluster.control.broadcast()

    zero, one, two = run(THREE, work, timeout=timedelta(seconds=0.3))
    texts = [str(outcome) for outcome in (one, two)]
    assert any("waits for rank 0's news, and nothing arrived for 0.3 s" in text for text in texts)
    assert any("rank 0 (stage 2) is stuck (at test_cluster.py" in text for text in texts)
    assert isinstance(zero, PeerError)


# -- links are timed by trips there and back, of which some wait by chance -------------------------------------------


class Journey:
    """A link with a clock of its own.

    Args:
        per_byte: seconds of a byte, there and back.
        late: numbers of trips that are late by 0.3 s, as if a packet had been sent again.
    """

    def __init__(self, per_byte: float, late: tuple[int, ...] = ()) -> None:
        self.per_byte, self.late = per_byte, late
        self.trips, self.now_s = 0, 0.0

    def trip(self, size: int) -> None:
        self.now_s += 1e-4 + size * self.per_byte + 0.3 * (self.trips in self.late)
        self.trips += 1

    def now(self) -> float:
        return self.now_s


@pytest.mark.parametrize("per_byte", [1e-9, 2e-8, 1.6e-7, 1.6e-6])  # 2 Gbit/s .. 10 Mbit/s, there and back
@pytest.mark.parametrize("late", [(), (0,), (1,), (4,), (5,), (8,)])
def test_a_trip_that_is_late_by_chance_does_not_count(per_byte: float, late: tuple[int, ...]) -> None:
    journey = Journey(per_byte, late)
    found, message_s = time_trips(journey.trip, journey.now)
    assert found == pytest.approx(per_byte, rel=1e-3)
    assert message_s == pytest.approx(1e-4 + 64 * per_byte)


def test_a_link_of_100_megabits_is_timed_in_a_fifth_of_a_second() -> None:
    journey = Journey(1.6e-7)
    time_trips(journey.trip, journey.now)
    assert journey.now_s <= 0.2


# -- terms that lie anywhere are summed in their own order, bit for bit as in one process ----------------------------


LIMIT = timedelta(seconds=30)


def terms(count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Of very different sizes, so that another order has another sum."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(length, generator=generator) * 10.0**i).to(dtype) for i in range(count)]


# whose process has which term, the length of terms, and their type
CASES: list[tuple[tuple[int, ...], int, torch.dtype]] = [
    ((0, 1), 7, torch.float32),
    ((1, 0), 8, torch.bfloat16),
    ((1, 0, 2, 0), 10, torch.float32),
    ((0, 1, 0), 2**23 + 3, torch.float32),  # in two parts
    ((0, 1), 5, torch.complex64),
    ((1, 0), 9, torch.float16),
    ((2, 1, 0, 0, 1), 1, torch.complex64),
]


def summed(rank: int) -> list[bool]:
    """Whether the sum of each case has the bits of one process, where this process has terms."""
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=LIMIT)
    found = []
    for sources, length, dtype in CASES:
        group, given = dist.new_group(range(max(sources) + 1)), terms(len(sources), length, dtype)
        if mine := [term for term, source in zip(given, sources, strict=True) if source == rank]:
            total = sum_in_order(mine, sources, group)
            found.append(torch.equal(total, reduce(torch.add, given)))
    return found


def test_terms_are_added_in_their_order(tmp_path: Path) -> None:
    assert processes.each(3, summed, folder=tmp_path) == [[True] * 7, [True] * 7, [True] * 2]
    sources, length, dtype = CASES[2]
    given = terms(len(sources), length, dtype)
    assert not torch.equal(reduce(torch.add, given), reduce(torch.add, given[::-1])), "the order makes a difference"

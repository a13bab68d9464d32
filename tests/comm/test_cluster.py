"""Processes of a cluster, here threads, do things together, hear what rank 0 says, and end together."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.probe import offset_in
from lightning_avgpipe.comm.topology import DeviceLayout, Edge, StageMap
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.utils.placeholder import Absent
from tests.threads import Blown, Injector, Killed, results, run

THREE = StageMap.on(DeviceLayout(3), 3)
TWO_GROUPS = StageMap.on(DeviceLayout(4), 2)  # ranks 0, 1 and 2, 3


# -- together --------------------------------------------------------------------------------------------------------


def test_objects_reach_whom_they_are_for() -> None:
    def work(cluster: Cluster) -> Any:
        group, item = cluster.group, {"rank": cluster.rank, "text": "x" * 100 * cluster.rank}
        return group.broadcast(item, 2)["rank"], len(group.gather_objects(item)), group.exchange_objects(cluster.rank)

    assert results(run(THREE, work)) == [(2, 3, [0, 1, 2]), (2, 1, [0, 1, 2]), (2, 1, [0, 1, 2])]


def test_tensors_are_summed_and_go_from_one_to_another() -> None:
    def work(cluster: Cluster) -> Any:
        group, arrived = cluster.group, []
        total = group.sum(torch.tensor([1.0, group.rank]))

        def pass_on() -> None:
            group.peer((group.rank + 1) % 3).send(torch.full((2, 3), float(group.rank), dtype=torch.float64))
            arrived.append(group.peer((group.rank - 1) % 3).receive(torch.empty(2, 3, dtype=torch.float64)))

        group.together("a round", pass_on)
        return total.tolist(), float(arrived[0][1, 2])

    assert results(run(THREE, work)) == [([3.0, 3.0], 2.0), ([3.0, 3.0], 0.0), ([3.0, 3.0], 1.0)]


def test_groups_their_leaders_and_replicas_meet_each_among_themselves() -> None:
    def work(cluster: Cluster) -> Any:
        assert cluster.replica_group is not None
        weights = [torch.tensor([float(cluster.world.rank)]), torch.ones(2, dtype=torch.float64)]
        return (
            cluster.world.exchange_objects(cluster.stages),
            cluster.group.exchange_objects(cluster.world.rank),
            cluster.leaders.exchange_objects(cluster.world.rank),
            cluster.replica_group.members.exchange_objects(weights[0].item()),
            (cluster.stage_map.num_stages - 1 in cluster.stages, cluster.reads, cluster.group_number),
        )

    found = results(run(TWO_GROUPS, work))
    stages = [(1,), (0,), (1,), (0,)]
    assert [f[0] for f in found] == [stages] * 4
    assert [f[1] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f[2] for f in found] == [[0, 2], [1], [0, 2], [3]]
    assert [f[3] for f in found] == [[0.0, 2.0], [1.0, 3.0]] * 2
    assert [f[4] for f in found] == [
        (True, True, 0), (False, False, 0), (True, True, 1), (False, False, 1)
    ]  # fmt: skip


def test_clocks_of_one_host_agree() -> None:
    for offset in results(run(THREE, lambda cluster: offset_in(cluster.group))):
        assert abs(offset.offset_s) <= offset.error_s


def test_links_are_timed_between_neighbours_once() -> None:
    def work(cluster: Cluster) -> Any:
        links = cluster.links(cluster.stage_map)
        return links, links is cluster.links(cluster.stage_map)

    (links, once), *_ = results(run(StageMap.on(DeviceLayout(2), 2), work))
    assert once and len(links) == 1 and links[0].latency > 0


def test_a_cluster_is_opened_again_and_again() -> None:
    def work(cluster: Cluster) -> Any:
        cluster.transport.widen(2)
        return cluster.control.publish(cluster.rank), cluster.group.exchange_objects(cluster.rank)

    assert results(run(THREE, work, runs=3)) == [(0, [0, 1, 2])] * 3


# -- channels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage_map", [StageMap(3), StageMap.on(DeviceLayout(3), 3), StageMap.on(DeviceLayout(2), 4)])
def test_edges_do_not_mix_and_keep_the_order(stage_map: StageMap) -> None:
    last = stage_map.num_stages - 1

    def work(cluster: Cluster) -> list[tuple[Edge, list[int]]]:
        cluster.transport.widen(2)
        inboxes = []
        for pipeline in range(2):
            for stage in cluster.stages:
                ends = cluster.transport.ends(pipeline, stage)
                assert (ends.values is None) == (ends.to_previous is None) == (stage == 0)
                assert (ends.to_next is None) == (ends.gradients is None) == (stage == last)
                for outbox, code in ((ends.to_next, 0), (ends.to_previous, 1)):
                    for i in range(3) if outbox is not None else ():
                        outbox.put(Message(i, (torch.tensor([pipeline, stage, code]),)))
                if ends.values is not None:
                    inboxes.append((Edge(pipeline, stage - 1, "forward"), ends.values))
                if ends.gradients is not None:
                    inboxes.append((Edge(pipeline, stage, "backward"), ends.gradients))
        for edge, inbox in inboxes:
            inbox.expect(3)
            for i in range(3):
                cluster.waits.until(inbox.ready, f"waits for {edge}")
                message = inbox.get()
                assert message.micro_batch == i and message.tensors[0] is not None
                assert message.tensors[0].tolist() == [edge.pipeline, edge.source, int(edge.direction == "backward")]
        return [edge for edge, _ in inboxes]

    edges = {edge for found in results(run(stage_map, work)) for edge in found}
    assert edges == {Edge(n, hop, way) for n in range(2) for hop in range(last) for way in ("forward", "backward")}


# -- other stages on the same processes ------------------------------------------------------------------------------

FOUR = StageMap.on(DeviceLayout(4), 4)
SHARED = FOUR.placed([(2, 3), (0, 1)])
LAYOUTS = [SHARED, FOUR.placed([(0, 1, 2, 3)]), FOUR, SHARED, FOUR]


def passed_on(cluster: Cluster) -> list[int]:
    """Four micro-batches go from the first stage to the last, in turns; returns those that come here."""
    received = []
    for stage in cluster.stages:
        ends, (first, every) = cluster.transport.ends(0, stage), cluster.stage_map.share(stage, cluster.rank)
        mine = range(first, 4, every)
        if ends.values is not None:
            ends.values.expect(len(mine))
        for i in mine:
            if ends.values is not None:
                cluster.waits.until(ends.values.ready, "waits for a value")
                received.append(ends.values.get().micro_batch)
            if ends.to_next is not None:
                ends.to_next.put(Message(i, (torch.zeros(1),)))
    return received


def test_processes_share_stages_and_have_them_alone_again() -> None:
    def work(cluster: Cluster) -> Any:
        found = []
        for layout in LAYOUTS:
            cluster.rearrange(layout)
            members = None if cluster.replicas is None else cluster.replicas.members.exchange_objects(cluster.rank)
            found.append((members, passed_on(cluster)))
        return found

    found = results(run(FOUR, work))
    everything = [0, 1, 2, 3]
    alone = [(None, everything)] * 3 + [(None, [])]
    halved = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], []), ([2, 3], [])]
    assert [[of[i] for of in found] for i in range(len(LAYOUTS))] == [
        halved, [(everything, [])] * 4, alone, halved, alone
    ]  # fmt: skip


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


def test_what_rank_zero_publishes_reaches_all_in_order() -> None:
    def work(cluster: Cluster) -> list[Any]:
        return [cluster.control.publish((i, torch.tensor([i])) if cluster.rank == 0 else None) for i in (1, 2)]

    assert results(run(THREE, work)) == [[(1, torch.tensor([1])), (2, torch.tensor([2]))]] * 3


def test_what_is_relayed_reaches_all_groups_and_each_group_its_own() -> None:
    def work(cluster: Cluster) -> Any:
        common = "for all" if cluster.world.rank == 0 else None
        return cluster.control.relay(common, f"of group {cluster.group_number}" if cluster.rank == 0 else None)

    found = results(run(TWO_GROUPS, work))
    assert found == [("for all", f"of group {number}") for number in (0, 0, 1, 1)]


def test_reports_reach_rank_zero_and_nobody_waits() -> None:
    def work(cluster: Cluster) -> list[tuple[int, str]]:
        arrived = []
        for i in range(2):
            arrived += cluster.control.report(f"{cluster.rank}.{i}")
        cluster.group.barrier()  # now all have arrived
        return arrived + cluster.control.report("end")

    zero, one, _ = results(run(THREE, work))
    assert one == []
    assert [item for rank, item in zero if rank == 1][:2] == ["1.0", "1.1"]
    assert {rank for rank, _ in zero} == {0, 1, 2}


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


@pytest.mark.parametrize("reader", [0, 2])
def test_each_process_gets_what_it_needs_of_a_batch(reader: int) -> None:
    needs = {0: {"x", "y"}, 1: {"y"}, 2: {"x"}}

    def work(cluster: Cluster) -> set[str]:
        stream = cluster.batches.begin()
        batch = {name: torch.ones(3, 2) for name in "xyz"} if cluster.reads else None
        passed = cluster.batches.pass_on(
            stream, batch, lambda _, rank: frozenset(f"['{name}']" for name in needs[rank])
        )
        item = cluster.batches.accept(passed)
        assert all(tensor.shape == (3, 2) for tensor in item.values())
        return {name for name, tensor in item.items() if not isinstance(tensor, Absent)}

    found = results(run(StageMap(3, ((0, 1, 2),), reader), work))
    assert found == [set("xyz") if rank == reader else needs[rank] for rank in range(3)]


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


# -- agreement -------------------------------------------------------------------------------------------------------


def test_what_all_ask_for_is_confirmed() -> None:
    results(run(THREE, lambda cluster: cluster.confirm("reconfigure(num_pipelines=2)", "at a batch")))


def test_who_asks_for_something_else_is_named() -> None:
    def work(cluster: Cluster) -> None:
        cluster.confirm(f"reconfigure(num_pipelines={2 + (cluster.rank == 1)})", "in on_train_batch_end")

    for outcome in run(THREE, work):
        assert isinstance(outcome, ConfigurationError | PeerError)
        assert "num_pipelines=3) on rank 1 (stage 1); every rank must ask for the same" in str(outcome) or (
            "was called on rank 1 (stage 1)" in str(outcome)
        )


def test_who_does_not_ask_is_named() -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank != 2:
            cluster.confirm("reconfigure()", "in on_train_batch_end")

    zero, one, _ = run(THREE, work, timeout=timedelta(seconds=1))
    for outcome in (zero, one):
        assert "not on rank 2 (stage 0) within 0.5 s; every rank must call it: in on_train_batch_end" in str(outcome)


# -- failures --------------------------------------------------------------------------------------------------------

WAITS = {
    "a collective": lambda cluster: cluster.group.barrier("the barrier 'x'"),
    "rank 0": lambda cluster: [cluster.control.publish() for _ in range(2)],
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


@pytest.mark.slow
def test_a_process_that_is_killed_is_missed_by_all() -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank == 1:
            raise Killed
        cluster.group.barrier()
        cluster.control.publish()

    zero, _, two = run(THREE, work)
    for outcome in (zero, two):
        told(outcome, "waits for the other processes in a barrier")
        assert re.search("connection closed by rank 1|connection to rank 1 broke", str(outcome)), outcome
        assert "rank 1 (stage 1) does not answer" in str(outcome)


def test_silence_ends_after_the_timeout_with_what_all_do() -> None:
    def work(cluster: Cluster) -> None:
        if cluster.rank == 0:
            with cluster.watch.during("is stuck"):
                while True:
                    cluster.watch.look()
        else:
            cluster.control.publish()

    zero, one, two = run(THREE, work, timeout=timedelta(seconds=0.3))
    texts = [str(outcome) for outcome in (one, two)]
    assert any("waits for rank 0's news, and nothing arrived for 0.3 s" in text for text in texts)
    assert any("rank 0 (stage 2) is stuck (at test_cluster.py" in text for text in texts)
    assert isinstance(zero, PeerError)

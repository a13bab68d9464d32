"""What groups do together is done by all that are left, or by none."""

from __future__ import annotations

from typing import Any

import torch

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.errors import PeerError
from tests import threads

THREE_GROUPS = StageMap(1, ((0,), (1,), (2,)))


def together(cluster: Cluster) -> Any:
    """Two sums, a broadcast and a gathering over groups; in between the process of group 1 fails."""
    assert cluster.meetings is not None
    before = int(cluster.world.sum(torch.tensor(1)))
    cluster.meetings.membership.begun = True
    if cluster.world.rank == 1 and before:
        raise threads.Blown("the fuse has blown")
    number = int(cluster.world.sum(torch.tensor(1)))
    told = cluster.world.broadcast(f"rank {cluster.group_number}")
    return before, number, told, cluster.world.exchange_objects(cluster.world.rank), cluster.world.ranks


def test_what_broke_with_a_group_is_done_again_without_it() -> None:
    first, failed, last = threads.run(THREE_GROUPS, together, min_groups=2)
    assert first == last == (3, 2, "rank 0", [0, 1], (0, 2))
    assert isinstance(failed, threads.Blown)


def averaged(cluster: Cluster) -> Any:
    """A sum that is under way when the process of group 1 fails, and one after it."""
    assert cluster.meetings is not None and cluster.replica_group is not None
    cluster.world.barrier()
    cluster.meetings.membership.begun = True
    if cluster.world.rank == 1:
        raise threads.Blown("the fuse has blown")
    found = []
    for _ in range(2):
        tensor = torch.ones(1)
        end = cluster.replica_group.begin_sum([tensor])
        counts = cluster.replica_group.settle()
        if counts:
            end()
        found.append((counts, tensor.item()))
    return found, cluster.stage_map.num_groups, cluster.meetings.groups


def test_a_sum_counts_for_all_or_for_none_and_groups_leave_with_it() -> None:
    first, failed, last = threads.run(THREE_GROUPS, averaged, min_groups=2)
    assert first == last == ([(False, 1.0), (True, 2.0)], 2, (0, 2))
    assert isinstance(failed, threads.Blown)


def leads_fails(cluster: Cluster) -> Any:
    """The first process fails; the others tell who leads then, and what it has to say."""
    assert cluster.meetings is not None
    led: list[int] = []
    cluster.when_leading = lambda: led.append(cluster.world.ranks[0])
    cluster.world.barrier()
    cluster.meetings.membership.begun = True
    if cluster.leads:
        raise threads.Blown("the fuse has blown")
    group = cluster.meetings.membership.group
    told, own = cluster.channels.control.relay(f"of group {group}", group)
    return led, cluster.leads, told, own, cluster.world.gather_objects(cluster.world.ranks)


def test_without_group_0_all_end_with_the_reason_if_it_keeps_the_store() -> None:
    _, second = threads.run(StageMap(1, ((0,), (1,))), leads_fails, min_groups=1)
    assert isinstance(second, PeerError) and "cannot go on without group 0" in str(second)


def test_without_group_0_the_next_one_leads_if_the_store_is_kept_by_somebody_else() -> None:
    _, second, third = threads.run(THREE_GROUPS, leads_fails, min_groups=1, keeper="the keeper")
    assert second == ([1], True, "of group 1", 1, [(1, 2), (1, 2)])
    assert third == ([], False, "of group 1", 2, [(1, 2)])

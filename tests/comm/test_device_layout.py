"""Processes that share devices form groups of which none has a device twice."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch

from lightning_avgpipe.comm import waits
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap, subsets
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.device import DevicePort

ARRANGEMENTS = [
    (DeviceLayout(devices, nodes, sharing), num_stages)
    for devices, nodes, sharing, num_stages in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 6, 8))
    if num_stages % (devices * nodes) == 0 or devices * nodes % num_stages == 0
]


def test_groups_of_one_process_per_device_are_consecutive_ranks() -> None:
    assert DeviceLayout(4).groups(4) == DeviceLayout(4).groups(8) == ((0, 1, 2, 3),)
    assert DeviceLayout(4).groups(2) == ((0, 1), (2, 3))
    assert DeviceLayout(2, nodes=2).groups(4) == ((0, 1, 2, 3),)
    assert DeviceLayout(1).groups(4) == ((0,),)


def test_processes_that_share_a_device_are_in_different_groups() -> None:
    assert DeviceLayout(2, sharing=2).groups(2) == ((0, 1), (2, 3))
    assert DeviceLayout(1, sharing=3).groups(2) == ((0,), (1,), (2,))
    assert DeviceLayout(4, sharing=2).groups(2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert DeviceLayout(2, nodes=2, sharing=2).groups(4) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(("device_layout", "num_stages"), ARRANGEMENTS, ids=str)
def test_every_process_is_in_one_group_and_no_group_has_a_device_twice(
    device_layout: DeviceLayout, num_stages: int
) -> None:
    groups = device_layout.groups(num_stages)
    assert sorted(itertools.chain(*groups)) == list(range(device_layout.world_size))
    assert groups[0][0] == 0  # where loggers are
    assert list(groups) == sorted(groups)
    for ranks in groups:
        places = [
            (rank // device_layout.node_size, device_layout.device_of(rank % device_layout.node_size)) for rank in ranks
        ]
        assert list(ranks) == sorted(ranks)
        assert len(set(places)) == len(places) == device_layout.group_size(num_stages)
    for replica_group in zip(*groups, strict=True):
        assert min(replica_group) == replica_group[0]  # from whom the others copy


def test_a_process_too_many_is_told_what_there_is() -> None:
    with pytest.raises(
        ConfigurationError, match="local rank 4, but devices=2, processes_per_device=2 make 4 processes"
    ):
        DeviceLayout(2, sharing=2).device_of(4)


@pytest.mark.parametrize(
    ("device_layout", "num_stages"),
    [(DeviceLayout(2, sharing=2), 2), (DeviceLayout(2, sharing=2), 4), (DeviceLayout(1, sharing=2), 2),
     (DeviceLayout(4, sharing=2), 2), (DeviceLayout(2, nodes=2, sharing=3), 4)],
    ids=str,
)  # fmt: skip
def test_no_communicator_has_a_device_twice(
    device_layout: DeviceLayout, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(
        torch.distributed, "new_group", lambda ranks, timeout, backend, pg_options: made.append((ranks, backend))
    )
    monkeypatch.setattr(waits, "port_of", DevicePort)  # such devices there need not be
    by_rank = []
    for rank in range(device_layout.world_size):
        made.clear()
        local_rank = rank % device_layout.node_size
        device = torch.device("cuda", device_layout.device_of(local_rank))
        stage_map, timeout = StageMap.on(device_layout, num_stages), timedelta(seconds=1)
        network = ProcessGroups(rank, device, timeout, "nccl")
        cluster = Cluster(stage_map, Process(rank, device, timeout.total_seconds(), network))
        cluster.connect(subsets(stage_map, range(cluster.group.world_size)), "all")  # as tied parameters do
        by_rank.append(list(made))
        assert rank == cluster.group.ranks[cluster.rank] == cluster.world.rank
        assert cluster.replica_group is not None and rank in cluster.replica_group.members.ranks
        assert cluster.replica_group.members.ranks[cluster.replica_group.members.rank] == rank
    assert all(groups == by_rank[0] for groups in by_rank)  # every process takes part in making every one
    across = [ranks for ranks, backend in by_rank[0] if "nccl" in backend and len(ranks) > 1]
    assert bool(across) == (device_layout.num_devices > 1)
    for ranks in across:
        places = [(r // device_layout.node_size, device_layout.device_of(r % device_layout.node_size)) for r in ranks]
        assert len(set(places)) == len(places)

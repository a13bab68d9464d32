"""The topology says who hosts what and who meets whom; no group has a device twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_avgpipe.comm import waits
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap, names, pairs, subsets
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.device import DevicePort
from tests.threads import CPU

ARRANGEMENTS = [
    (DeviceLayout(devices, nodes, sharing), num_stages)
    for devices, nodes, sharing, num_stages in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 6, 8))
    if num_stages % (devices * nodes) == 0 or devices * nodes % num_stages == 0
]


def places(device_layout: DeviceLayout, ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Node and device of each rank."""
    size = device_layout.node_size
    return [(rank // size, device_layout.device_of(rank % size)) for rank in ranks]


def test_every_process_is_in_one_group_and_no_group_has_a_device_twice() -> None:
    for device_layout, num_stages in ARRANGEMENTS:
        groups, case = device_layout.groups(num_stages), (device_layout, num_stages)
        assert sorted(itertools.chain(*groups)) == list(range(device_layout.world_size)), case
        assert groups[0][0] == 0, case  # where loggers are
        assert list(groups) == sorted(groups), case
        for ranks in groups:
            assert list(ranks) == sorted(ranks), case
            here = places(device_layout, ranks)
            assert len(set(here)) == len(here) == device_layout.group_size(num_stages), case
        for averaging_group in zip(*groups, strict=True):
            assert min(averaging_group) == averaging_group[0], case  # from whom the others copy


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
    started: list[str] = []

    class Group:
        def __init__(self, ranks: list[int], timeout: Any, backend: str, pg_options: Any) -> None:
            self._backend = backend
            made.append((ranks, backend))

        def allreduce(self, tensors: Any) -> Any:
            started.append(self._backend)
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "new_group", Group)
    monkeypatch.setattr(waits, "port_of", DevicePort)  # such devices there need not be
    by_rank = []
    for rank in range(device_layout.world_size):
        made.clear()
        started.clear()
        local_rank = rank % device_layout.node_size
        device = torch.device("meta", device_layout.device_of(local_rank))
        stage_map, timeout = StageMap.on(device_layout, num_stages), timedelta(seconds=1)
        network = ProcessGroups(rank, device, timeout, "nccl")
        cluster = Cluster(stage_map, Process(rank, device, timeout.total_seconds(), network))
        cluster.connect(subsets(stage_map, range(cluster.group.world_size)), "all")  # as tied parameters do
        by_rank.append(list(made))
        own = [backend for ranks, backend in made if "nccl" in backend and len(ranks) > 1 and rank in ranks]
        assert started == own  # each communicator, before anything else runs on the device
        assert rank == cluster.group.ranks[cluster.rank] == cluster.world.rank
        assert cluster.averaging_group is not None and rank in cluster.averaging_group.members.ranks
        assert cluster.averaging_group.members.ranks[cluster.averaging_group.members.rank] == rank
    assert all(groups == by_rank[0] for groups in by_rank)  # every process takes part in making every one
    across = [ranks for ranks, backend in by_rank[0] if "nccl" in backend and len(ranks) > 1]
    assert bool(across) == (device_layout.num_devices > 1)
    for ranks in across:
        assert len(set(places(device_layout, ranks))) == len(ranks)


# -- stage maps --------------------------------------------------------------------------------------------------------


STAGE_MAPS = [
    StageMap.on(DeviceLayout(2), 4), StageMap.on(DeviceLayout(4), 2), StageMap.on(DeviceLayout(2, sharing=2), 4),
    StageMap.on(DeviceLayout(1), 3), StageMap.on(DeviceLayout(2, nodes=2, sharing=3), 4),
    StageMap.on(DeviceLayout(8, stage_replicas=(2, 1, 1)), 3), StageMap.on(DeviceLayout(3, stage_replicas=(1, 2)), 2),
    StageMap.on(DeviceLayout(8, replicas=2), 4), StageMap.on(DeviceLayout(2, sharing=2, replicas=4), 3),
]  # fmt: skip


@pytest.mark.parametrize("stage_map", STAGE_MAPS, ids=str)
def test_every_stage_has_its_processes_and_every_process_its_stages(stage_map: StageMap) -> None:
    assert stage_map.owner(stage_map.num_stages - 1) == stage_map.layout[0][0] == 0  # the last stage is on rank 0
    for stage in range(stage_map.num_stages):
        assert stage_map.owner(stage) == stage_map.ranks(stage)[0]
        hosts = [rank for rank in range(stage_map.group_size) if stage in stage_map.stages(rank)]
        assert sorted(stage_map.ranks(stage)) == hosts
    ranks = [rank for members in stage_map.layout for rank in members]
    assert sorted(ranks) == list(range(stage_map.world_size))
    assert all(stage_map.layout[n][p] == rank for rank in ranks for n, p in [stage_map.position(rank)])


def test_replicas_take_devices_from_stages_and_not_from_each_other() -> None:
    assert StageMap.on(DeviceLayout(4, replicas=2), 4).layout == ((0, 1), (2, 3))  # two stages on each device
    assert StageMap.on(DeviceLayout(2, sharing=2, replicas=2), 2).layout == ((0, 1), (2, 3))


def test_replicas_of_stages_share_micro_batches() -> None:
    stage_map = StageMap.on(DeviceLayout(12, stage_replicas=(3, 2, 1)), 3)
    assert stage_map.layout == (tuple(range(6)), tuple(range(6, 12)))
    assert [stage_map.ranks(k) for k in range(3)] == [(3, 4, 5), (1, 2), (0,)]
    assert stage_map.share(0, 4) == (1, 3)
    assert sorted(pairs(stage_map, 0, 1)) == [(a, b) for a in (3, 4, 5) for b in (1, 2)]
    last = StageMap.on(DeviceLayout(3, stage_replicas=(1, 2)), 2)
    assert [last.ranks(1), last.ranks(1, trains=False), last.owner(1)] == [(0, 1), (0,), 0]
    assert names(stage_map)[10] == "rank 10 (stage 0, replica 1 of group 1)"


# -- who meets whom ----------------------------------------------------------------------------------------------------


def test_replicas_are_numbered_as_they_meet() -> None:
    """Also where groups end in the middle of a node, so that not every position of the groups ascends."""
    device_layout = DeviceLayout(3, nodes=2, sharing=2, replicas=3)
    stage_map = StageMap.on(device_layout, 2)
    assert stage_map.layout[:3] == ((0, 1), (2, 6), (3, 4))
    for rank in range(stage_map.world_size):
        replicas = Cluster(stage_map, Process(rank, CPU, 1.0, ProcessGroups(rank, CPU, timedelta(1)))).replicas
        assert replicas is not None and replicas.members.ranks[replicas.group_number] == rank

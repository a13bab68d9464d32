"""Processes that share devices form groups of which none has a device twice."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch

from lightning_avgpipe.comm.device_layout import Arrangement
from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.errors import ConfigurationError

ARRANGEMENTS = [
    (Arrangement(devices, nodes, sharing), num_stages)
    for devices, nodes, sharing, num_stages in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 6, 8))
    if num_stages % (devices * nodes) == 0 or devices * nodes % num_stages == 0
]


def test_groups_of_one_process_per_device_are_consecutive_ranks() -> None:
    assert Arrangement(4).groups(4) == Arrangement(4).groups(8) == ((0, 1, 2, 3),)
    assert Arrangement(4).groups(2) == ((0, 1), (2, 3))
    assert Arrangement(2, nodes=2).groups(4) == ((0, 1, 2, 3),)
    assert Arrangement(1).groups(4) == ((0,),)


def test_processes_that_share_a_device_are_in_different_groups() -> None:
    assert Arrangement(2, sharing=2).groups(2) == ((0, 1), (2, 3))
    assert Arrangement(1, sharing=3).groups(2) == ((0,), (1,), (2,))
    assert Arrangement(4, sharing=2).groups(2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Arrangement(2, nodes=2, sharing=2).groups(4) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(("arrangement", "num_stages"), ARRANGEMENTS, ids=str)
def test_every_process_is_in_one_group_and_no_group_has_a_device_twice(
    arrangement: Arrangement, num_stages: int
) -> None:
    groups = arrangement.groups(num_stages)
    assert sorted(itertools.chain(*groups)) == list(range(arrangement.world_size))
    assert groups[0][0] == 0  # where loggers are
    assert list(groups) == sorted(groups)
    for ranks in groups:
        places = [
            (rank // arrangement.node_size, arrangement.device_of(rank % arrangement.node_size)) for rank in ranks
        ]
        assert list(ranks) == sorted(ranks)
        assert len(set(places)) == len(places) == arrangement.group_size(num_stages)
    for siblings in zip(*groups, strict=True):
        assert min(siblings) == siblings[0]  # from whom the others copy


def test_a_process_too_many_is_told_what_there_is() -> None:
    with pytest.raises(
        ConfigurationError, match="local rank 4, but devices=2, processes_per_device=2 make 4 processes"
    ):
        Arrangement(2, sharing=2).device_of(4)


@pytest.mark.parametrize(
    ("arrangement", "num_stages"),
    [(Arrangement(2, sharing=2), 2), (Arrangement(2, sharing=2), 4), (Arrangement(1, sharing=2), 2),
     (Arrangement(4, sharing=2), 2), (Arrangement(2, nodes=2, sharing=3), 4)],
    ids=str,
)  # fmt: skip
def test_no_communicator_has_a_device_twice(
    arrangement: Arrangement, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout, backend: made.append((ranks, backend)))
    by_rank = []
    for rank in range(arrangement.world_size):
        made.clear()
        local_rank = rank % arrangement.node_size
        device = torch.device("cuda", arrangement.device_of(local_rank))
        mesh = Mesh(
            num_stages, rank, arrangement.world_size, device, timedelta(seconds=1), "nccl", arrangement=arrangement
        )
        mesh.connections.subset(range(mesh.world_size))  # as tied parameters do
        by_rank.append(list(made))
        assert rank == mesh.ranks[mesh.rank] == mesh.world.rank
        assert mesh.siblings is not None and rank in mesh.siblings.members.ranks
        assert mesh.siblings.members.ranks[mesh.siblings.members.rank] == rank
    assert all(groups == by_rank[0] for groups in by_rank)  # every process takes part in making every one
    across = [ranks for ranks, backend in by_rank[0] if "nccl" in backend and len(ranks) > 1]
    assert bool(across) == (arrangement.num_devices > 1)
    for ranks in across:
        places = [(r // arrangement.node_size, arrangement.device_of(r % arrangement.node_size)) for r in ranks]
        assert len(set(places)) == len(places)

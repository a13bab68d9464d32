"""The stage map says who hosts what, in one group or several."""

from __future__ import annotations

import pytest

from lightning_avgpipe.comm.topology import DeviceLayout, StageMap, names, pairs
from lightning_avgpipe.errors import ConfigurationError

LAYOUTS = [
    StageMap.on(DeviceLayout(2), 4), StageMap.on(DeviceLayout(4), 2), StageMap.on(DeviceLayout(2, sharing=2), 4),
    StageMap.on(DeviceLayout(1), 3), StageMap.on(DeviceLayout(2, nodes=2, sharing=3), 4),
    StageMap.on(DeviceLayout(8, stage_replicas=(2, 1, 1)), 3), StageMap.on(DeviceLayout(3, stage_replicas=(1, 2)), 2),
    StageMap.on(DeviceLayout(8, replicas=2), 4), StageMap.on(DeviceLayout(2, sharing=2, replicas=4), 3),
]  # fmt: skip


@pytest.mark.parametrize("stage_map", LAYOUTS, ids=str)
def test_every_stage_has_its_processes_and_every_process_its_stages(stage_map: StageMap) -> None:
    for stage in range(stage_map.num_stages):
        assert stage_map.owner(stage) == stage_map.ranks(stage)[0]
        hosts = [rank for rank in range(stage_map.group_size) if stage in stage_map.stages(rank)]
        assert sorted(stage_map.ranks(stage)) == hosts
    ranks = [rank for members in stage_map.layout for rank in members]
    assert sorted(ranks) == list(range(stage_map.world_size))
    assert all(stage_map.layout[n][p] == rank for rank in ranks for n, p in [stage_map.position(rank)])


@pytest.mark.parametrize("stage_map", LAYOUTS, ids=str)
def test_the_last_stage_is_on_rank_zero(stage_map: StageMap) -> None:
    assert stage_map.owner(stage_map.num_stages - 1) == stage_map.layout[0][0] == 0


def test_names_tell_stages_and_groups() -> None:
    assert names(StageMap.on(DeviceLayout(2), 4))[1] == "rank 1 (stages 0, 2)"
    assert names(StageMap.on(DeviceLayout(4), 2))[3] == "rank 3 (stage 0 of group 1)"


def test_groups_of_a_team_are_replicas() -> None:
    stage_map = StageMap.on(DeviceLayout(8, replicas=2), 2)
    assert stage_map.layout == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert names(stage_map)[7] == "rank 7 (stage 0 of group 3, replica 1)"
    assert names(StageMap.on(DeviceLayout(4, replicas=2), 2))[3] == "rank 3 (stage 0 of replica 1)"


def test_replicas_take_devices_from_stages_and_not_from_each_other() -> None:
    assert StageMap.on(DeviceLayout(4, replicas=2), 4).layout == ((0, 1), (2, 3))  # two stages on each device
    assert StageMap.on(DeviceLayout(2, sharing=2, replicas=2), 2).layout == ((0, 1), (2, 3))
    with pytest.raises(ConfigurationError, match="replicas=2 of 2 stages on 5 devices: each replica has 2 of them"):
        StageMap.on(DeviceLayout(5, replicas=2), 2)


def test_replicas_of_stages_share_micro_batches() -> None:
    stage_map = StageMap.on(DeviceLayout(12, stage_replicas=(3, 2, 1)), 3)
    assert stage_map.layout == (tuple(range(6)), tuple(range(6, 12)))
    assert [stage_map.ranks(k) for k in range(3)] == [(3, 4, 5), (1, 2), (0,)]
    assert stage_map.share(0, 4) == (1, 3)
    assert sorted(pairs(stage_map, 0, 1)) == [(a, b) for a in (3, 4, 5) for b in (1, 2)]
    last = StageMap.on(DeviceLayout(3, stage_replicas=(1, 2)), 2)
    assert [last.ranks(1), last.ranks(1, trains=False), last.owner(1)] == [(0, 1), (0,), 0]
    assert names(stage_map)[10] == "rank 10 (stage 0, replica 1 of group 1)"


@pytest.mark.parametrize(
    ("devices", "replicas", "num_stages", "message"),
    [
        (5, (3, 1), 2, r"replicas=\[3, 1\] needs 4 devices, or a multiple"),
        (4, (3, 1), 3, r"names 2 stages, but num_stages=3"),
    ],
)
def test_replicas_of_stages_that_do_not_fit_are_refused(
    devices: int, replicas: tuple[int, ...], num_stages: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StageMap.on(DeviceLayout(devices, stage_replicas=replicas), num_stages)


def test_a_map_is_a_value() -> None:
    assert StageMap.on(DeviceLayout(2), 2) == StageMap(2, ((0, 1),))


def test_a_number_of_stages_that_does_not_fit_the_devices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"num_stages=3 on 2 devices: .* use num_stages=2"):
        StageMap.on(DeviceLayout(2), 3)

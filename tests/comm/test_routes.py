"""Who meets: each process with those that it needs, in an order that is the same for all."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.comm.topology import StageMap, all_parties, control_routes, counterparts

GROUPS = StageMap(2, ((0, 1), (2, 3)))
REPLICAS = StageMap(2, ((0, 1), (2, 3)), replicas=2)


def met(stage_map: StageMap) -> list[tuple[str, tuple[int, ...]]]:
    return [(party.what, party.ranks) for party in all_parties(stage_map)]


def test_teams_meet_position_by_position_to_average() -> None:
    groups = [("world", (0, 1, 2, 3)), ("group", (0, 1)), ("group", (2, 3)), ("leaders", (0, 2))]
    assert met(GROUPS) == [*groups, ("teams", (0, 2)), ("teams", (1, 3))]
    assert met(REPLICAS) == [*groups, ("replicas", (0, 2)), ("replicas", (1, 3))]


def test_processes_that_share_devices_meet_on_the_host() -> None:
    for shares in (False, True):
        found = counterparts(replace(GROUPS, shares_devices=shares), position=0, replica=0)
        assert (found.ranks, found.on_host) == ((0, 2), shares)


def test_the_replicas_of_single_stages_meet() -> None:
    assert met(StageMap(2, ((0, 1, 2),), stage_replicas=(2, 1))) == [("world", (0, 1, 2)), ("replicas", (1, 2))]


def test_news_come_from_the_first_process_through_the_leaders() -> None:
    found = {(str(route), route.source, route.target) for route in control_routes(GROUPS)}
    own = {(what, a, b) for first in (0, 2) for what, a, b in (
        ("news", first, first + 1), ("reports", first + 1, first), ("batches", first, first + 1))}  # fmt: skip
    assert found == own | {("relay", 0, 2)}

"""Every two processes measure their link, and nobody two at a time."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from lightning_avgpipe.comm.probe import measure_bandwidth, pairings
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from tests.threads import results, run


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_two_meet_once_in_the_fewest_rounds(count: int) -> None:
    found = list(pairings(count))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({member for pair in pairs for member in pair}) == 2 * len(pairs) for pairs in found)
    assert len([pairs for pairs in found if pairs]) == (0 if count == 1 else count - 1 + count % 2)


def test_every_process_knows_all_links() -> None:
    one, *others = results(run(StageMap.on(DeviceLayout(3), 3), lambda cluster: measure_bandwidth(cluster.group)))
    assert others == [one, one]
    for u, row in enumerate(one):
        assert [math.isinf(speed) for speed in row] == [u == v for v in range(3)]
        assert all(speed > 0 for speed in row)

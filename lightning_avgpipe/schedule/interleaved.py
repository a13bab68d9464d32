"""Schedules with several stages on each process, placed in a loop: interleaved 1F1B, and breadth-first.

::

    D = 2 processes, K = 4 stages, M = 4: what process 0 does, each action with its stage

    interleaved   F0 F1 of 0, F0 F1 of 2, then in pairs  F2 of 0, B0 of 2, F3 of 0, B1 of 2, F2 of 2, B0 of 0, ...
    bfs           F0 F1 F2 F3 of 0, then of 2, then B0 B1 B2 B3 of 2, then of 0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, Kind

Place = tuple[int, Action]


def interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build interleaved 1F1B, which is idle for the share D/K of the time for which 1F1B is idle.

    Micro-batches go through all stages of a process in groups of D, with forwards and backwards in turns, and process d
    is ``2 (D-1-d) + (K/D - 1) D`` forwards ahead. Where M is not a multiple of D, some groups are larger.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    total = num_microbatches * num_stages // num_devices
    count = max(1, num_microbatches // num_devices)
    firsts = [num_microbatches * group // count for group in range(count + 1)]
    largest = max(after - first for first, after in itertools.pairwise(firsts))
    orders = []
    for device in range(num_devices):
        mine = range(device, num_stages, num_devices)
        forwards = list(_by_groups(FORWARD, mine, firsts))
        backwards = list(_by_groups(BACKWARD, mine[::-1], firsts))
        ahead = min(total, 2 * (num_devices - 1 - device) + (len(mine) - 1) * largest)
        pairs = zip(forwards[ahead:], backwards, strict=False)
        orders.append([*forwards[:ahead], *(place for pair in pairs for place in pair), *backwards[total - ahead :]])
    return Schedule.of_orders("interleaved", num_microbatches, orders)


def breadth_first(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build looped breadth-first: AFAB stage by stage, so that a stage's weights can be fetched and sent once.

    It is idle as little as interleaved 1F1B, but stashes all micro-batches.

    Source: Breadth-First Pipeline Parallelism, Lamy-Poirier, arXiv:2211.05953.
    """
    orders = []
    for device in range(num_devices):
        mine = range(device, num_stages, num_devices)
        everything = (0, num_microbatches)
        orders.append([*_by_groups(FORWARD, mine, everything), *_by_groups(BACKWARD, mine[::-1], everything)])
    return Schedule.of_orders("bfs", num_microbatches, orders)


def _by_groups(kind: Kind, stages: Sequence[int], firsts: Sequence[int]) -> Iterator[Place]:
    """Yield the actions group by group: the micro-batches of a group go through all stages before the next group."""
    for first, after in itertools.pairwise(firsts):
        for stage in stages:
            yield from ((stage, Action(kind, i)) for i in range(first, after))

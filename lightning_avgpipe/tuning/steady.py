"""The time of an iteration of a setting, simulated only until it becomes periodic.

Once all actions repeat with a period, every further micro-batch adds a period and need not be simulated::

    stage 0 | F0 F1  F2 B0  F3 B1  F4 B2  F5 B3 | B4 B5
                            |--P--|--P--|--P--|         on every stage of every pipeline
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_avgpipe.schedule import BACKWARD, FORWARD, InTurns, Kind, SideBySide, build
from lightning_avgpipe.schedule.player import PlayedLane, Player
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.tuning.scaling import Loads
from lightning_avgpipe.tuning.setting import Setting

_EVEN = 4  # number of last actions of a lane that must have the same distance
_ROUNDING = 1e-9  # share of a period
_ROLLING = 8  # number of simulated iterations, of which those in the middle are counted


def steady_iteration_s(
    setting: Setting, num_stages: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """Return the seconds until the last action of all pipelines has ended.

    Args:
        setting: setting with the schedule and the number of pipelines, which all begin at once.
        num_stages: K, number of stages.
        loads: times of one micro-batch on each stage and hop.
        devices: device of each stage, shape ``(K,)``.
        in_turns: whether a device runs one action at a time.
    """
    m = setting.num_microbatches
    schedule = build(setting.schedule, num_stages, m, setting.advance)
    sharing = InTurns if in_turns else SideBySide
    player = Player([schedule] * setting.num_pipelines, loads, [(device,) for device in devices], sharing)
    ahead = schedule.warm_up[0]
    for backwards in range(_EVEN, m - ahead, _EVEN):
        player.run(ahead + 2 * backwards)
        ends = [_ends(lane) for lane in player.lanes]
        begun = 1 + max(len(of[FORWARD]) for of in ends[::num_stages])
        period = _period(ends, player.now)
        if period is not None and begun < m:
            rest = build(setting.schedule, num_stages, begun, setting.advance)  # begins in the same way
            for lane in player.lanes:
                lane.set_row(rest.rows[lane.stage])
            return player.run() + (m - begun) * period
    return player.run()


def rolling_iteration_s(
    setting: Setting, num_stages: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """Return the mean seconds of rolling iterations; the arguments are those of :func:`steady_iteration_s`."""
    schedule = build(setting.schedule, num_stages, setting.num_microbatches, setting.advance)
    sharing = InTurns if in_turns else SideBySide
    return simulate([schedule] * setting.num_pipelines, loads, devices, sharing, _ROLLING).steady_s


def _ends(lane: PlayedLane) -> dict[Kind, list[float]]:
    """Return the ends of the finished actions of a lane, by kind."""
    ends: dict[Kind, list[float]] = {action.kind: [] for action in lane.row}
    for action, (_, end_s) in zip(lane.row, lane.spans, strict=False):
        ends[action.kind].append(end_s)
    return ends


def _period(ends: Sequence[dict[Kind, list[float]]], now: float) -> float | None:
    """Return the period in seconds with which the last actions of all lanes repeat; None if they do not."""
    period = ends[0][BACKWARD][-1] - ends[0][BACKWARD][-2]
    for of in (of for lane in ends for of in lane.values()):
        if len(of) <= _EVEN or of[-1] < now - 2 * period:
            return None
        for before, after in itertools.pairwise(of[-_EVEN:]):
            if abs(after - before - period) > _ROUNDING * period:
                return None
    return period

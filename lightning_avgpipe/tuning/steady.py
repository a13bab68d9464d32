"""How long an iteration of a setting takes, simulated only for as long as its pace is uneven.

Once everything happens again after a period, every further micro-batch adds a period and need not be played::

    stage 0 | F0 F1  F2 B0  F3 B1  F4 B2  F5 B3 | B4 B5
                            |--P--|--P--|--P--|         on every stage of every pipeline
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_avgpipe.schedule import BACKWARD, FORWARD, InTurns, Kind, SideBySide, build
from lightning_avgpipe.schedule.sharing import SimulatedLane
from lightning_avgpipe.schedule.simulator import Simulation, simulate
from lightning_avgpipe.tuning.scaling import Loads
from lightning_avgpipe.tuning.setting import Setting

_EVEN = 4  # backwards of a lane that tell whether its pace is even
_ROUNDING = 1e-9  # of a period
_ROLLING = 8  # iterations, of which those in the middle count


def steady_iteration_s(
    setting: Setting, num_stages: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """Seconds until the last action of all pipelines has ended.

    Args:
        setting: with the schedule and the number of pipelines, which begin at once.
        num_stages: K.
        loads: of one micro-batch on each stage and hop.
        devices: of each stage, shape ``(K,)``.
        in_turns: whether a device runs one action at a time.
    """
    m = setting.num_microbatches
    schedule = build(setting.schedule, num_stages, m, setting.advance)
    sharing = InTurns if in_turns else SideBySide
    simulation = Simulation([schedule] * setting.num_pipelines, loads, devices, sharing)
    ahead = schedule.warm_up[0]
    for backwards in range(_EVEN, m - ahead, _EVEN):
        simulation.run(ahead + 2 * backwards)
        ends = [_ends(lane) for lane in simulation.lanes]
        begun = 1 + max(len(of[FORWARD]) for of in ends[::num_stages])
        period = _period(ends, simulation.now)
        if period is not None and begun < m:
            rest = build(setting.schedule, num_stages, begun, setting.advance)  # which began in the same way
            for lane in simulation.lanes:
                lane.row = rest.rows[lane.stage]
            return simulation.run() + (m - begun) * period
    return simulation.run()


def rolling_iteration_s(
    setting: Setting, num_stages: int, loads: Loads, devices: Sequence[int], in_turns: bool = False
) -> float:
    """Seconds of an iteration of many that follow one another without a barrier; arguments as of the other one."""
    schedule = build(setting.schedule, num_stages, setting.num_microbatches, setting.advance)
    sharing = InTurns if in_turns else SideBySide
    return simulate([schedule] * setting.num_pipelines, loads, devices, sharing, _ROLLING).steady_s


def _ends(lane: SimulatedLane) -> dict[Kind, list[float]]:
    """Of the actions that are over, by kind."""
    ends: dict[Kind, list[float]] = {action.kind: [] for action in lane.row}
    for action, (_, end_s) in zip(lane.row, lane.spans, strict=False):
        ends[action.kind].append(end_s)
    return ends


def _period(ends: Sequence[dict[Kind, list[float]]], now: float) -> float | None:
    """Seconds after which everything has happened again, and again; None if it has not."""
    period = ends[0][BACKWARD][-1] - ends[0][BACKWARD][-2]
    for of in (of for lane in ends for of in lane.values()):
        if len(of) <= _EVEN or of[-1] < now - 2 * period:
            return None
        for before, after in itertools.pairwise(of[-_EVEN:]):
            if abs(after - before - period) > _ROUNDING * period:
                return None
    return period

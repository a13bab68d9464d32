"""PipeDream's planner: replicated stages on levels of equal devices, for comparison with SPP.

A network is a tree: ``widths[0]`` devices share a node, ``widths[1]`` nodes a rack, and so on; all links of a level are
equally fast. Micro-batches of a stage go round-robin over its replicas.

Source: Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019, section 3.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts


@dataclass(frozen=True)
class PipeDreamPlan:
    """Which units are on how many devices.

    Attributes:
        stages: ``(first unit, last unit, replicas)`` of each stage, units from 0.
        bottleneck_s: seconds per micro-batch of the slowest stage or link, when the pipeline is full.
    """

    stages: tuple[tuple[int, int, int], ...]
    bottleneck_s: float


def plan(costs: UnitCosts, widths: Sequence[int], bandwidths: Sequence[float]) -> PipeDreamPlan:
    """The plan whose slowest stage or link needs least time per micro-batch.

    With A(i, j, m) the time of the units i..j on m parts of a level, and T(i, j, m) that of one stage of m replicas::

        T(i, j, m) = max(A below(i, j, width below), 2 (m-1) parameters(i..j) / bandwidth) / m
        A(i, j, m) = min(T(i, j, m), min over s, m' of max(A(i, s, m-m'), 2 bytes(s) / bandwidth, T(s+1, j, m')))

    Values and gradients of a hop share a link here, as in the paper, so a hop takes the sum of both.

    Args:
        costs: of the units, for one micro-batch on one device; its weights are all-reduced after every micro-batch.
        widths: how many parts of the level below make a part of each level, from the devices upwards.
        bandwidths: of each level's links, bytes per second.
    Raises:
        PartitionError: levels without width or bandwidth, or of unequal number.
    """
    _check_levels(widths, bandwidths)

    @functools.cache
    def stage(level: int, i: int, j: int, m: int) -> float:
        below = best(level - 1, i, j, widths[level - 1])[0] if level else float(costs.busy_s[j + 1] - costs.busy_s[i])
        parameters = float(costs.parameters[j + 1] - costs.parameters[i])
        return max(below, 2 * (m - 1) * parameters / bandwidths[level]) / m

    @functools.cache
    def best(level: int, i: int, j: int, m: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Seconds, and ``(first unit, parts)`` of each stage of this level."""
        found: tuple[float, tuple[tuple[int, int], ...]] = stage(level, i, j, m), ((i, m),)
        for last in range(m - 1, 0, -1):
            for cut in range(i, j):
                hop = (costs.bytes_forward[cut] + costs.bytes_backward[cut]) / bandwidths[level]
                after = max(hop, stage(level, cut + 1, j, last))
                if after < found[0]:
                    before, stages = best(level, i, cut, m - last)
                    if max(before, after) < found[0]:
                        found = max(before, after), (*stages, (cut + 1, last))
        return found

    def opened(level: int, i: int, j: int, m: int, copies: int) -> list[tuple[int, int, int]]:
        """The stages of devices behind those of a level, each of which has so many copies."""
        firsts = best(level, i, j, m)[1]
        ends = [*(first for first, _ in firsts[1:]), j + 1]
        parts = [(first, end - 1, replicas * copies) for (first, replicas), end in zip(firsts, ends, strict=True)]
        if level == 0:
            return parts
        deeper = (opened(level - 1, first, last, widths[level - 1], replicas) for first, last, replicas in parts)
        return [stage_ for stages in deeper for stage_ in stages]

    top, units = len(widths) - 1, costs.num_units
    seconds = best(top, 0, units - 1, widths[top])[0]
    if not math.isfinite(seconds):
        raise PartitionError(f"no plan for {units} units has a finite time")
    return PipeDreamPlan(tuple(opened(top, 0, units - 1, widths[top], 1)), seconds)


def _check_levels(widths: Sequence[int], bandwidths: Sequence[float]) -> None:
    if not widths or len(widths) != len(bandwidths):
        raise PartitionError(f"widths={list(widths)} and bandwidths={list(bandwidths)} need one entry per level")
    if min(widths) < 1 or not min(bandwidths) > 0:
        raise PartitionError(f"widths={list(widths)}, bandwidths={list(bandwidths)}: all must be positive")

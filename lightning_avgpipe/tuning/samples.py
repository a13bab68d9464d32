"""Factors of samples: how many times as many samples parallel models need to reach a goal as a single model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

MEASURED: Mapping[int, float] = {1: 1.0, 2: 1.2, 4: 1.7}
"""The factors by N: medians of nine trainings with ``outer_lr="auto"``, from
``python benchmarks/statistical_efficiency.py``."""

ROLLING: Mapping[int, float] = {1: 1.0, 2: 1.0, 4: 1.14}
"""The additional factors of rolling pipelines by N: medians of six trainings of two seeds each, from
``python benchmarks/statistical_efficiency.py --rules scaled``, see docs/parallel_pipelines.md."""

SamplesFactor = float | Mapping[int, float] | None


def samples_at(factor: SamplesFactor, num_pipelines: int, rolling: bool = False) -> float:
    """Return the samples until a goal, as a multiple of the samples that one pipeline needs.

    Args:
        factor: one factor for every N above 1; or factors by N, linear in the logarithm of N between two entries, and
            extrapolated from the last two; None: the measured factors. A given factor also holds for rolling pipelines.
        num_pipelines: N, number of parallel pipelines.
        rolling: whether pipelines average one at a time.
    """
    if num_pipelines == 1:
        return 1.0
    if isinstance(factor, (int, float)):
        return float(factor)
    if factor is None:
        more = samples_at(ROLLING, num_pipelines) if rolling else 1.0
        return samples_at(MEASURED, num_pipelines) * more
    known = sorted({1: 1.0, **factor}.items())
    if len(known) == 1:
        return 1.0
    (n, low), (m, high) = next(
        (pair for pair in itertools.pairwise(known) if num_pipelines <= pair[1][0]), (known[-2], known[-1])
    )
    return low + (high - low) * math.log(num_pipelines / n) / math.log(m / n)

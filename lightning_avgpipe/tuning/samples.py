"""How many more samples parallel models need to reach a goal, beside a single one: what a batch of theirs is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

MEASURED: Mapping[int, float] = {1: 1.0, 2: 1.2, 4: 1.7}
"""Medians of nine trainings with ``outer_lr="auto"``, by N: ``python benchmarks/statistical_efficiency.py``."""

ROLLING: Mapping[int, float] = {1: 1.0, 2: 1.0, 4: 1.14}
"""What rolling pipelines need as a multiple of that: medians of six trainings of two seeds each,
``python benchmarks/statistical_efficiency.py --rules scaled``, see docs/parallel_pipelines.md."""

SamplesFactor = float | Mapping[int, float] | None


def samples_at(factor: SamplesFactor, num_pipelines: int, rolling: bool = False) -> float:
    """Samples until a goal, as a multiple of what one pipeline needs.

    Args:
        factor: the same for every N above 1; or by N, linear in the logarithm of N between two and beyond the last two;
            None: as measured. What is given holds for rolling pipelines, too.
        num_pipelines: N.
        rolling: whether they meet one at a time.
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

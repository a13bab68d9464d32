"""Trials: the choice of sizes to measure, and the evaluation of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from lightning_avgpipe.schedule import Kind

# A profile is taken with at most _ENOUGH micro-batches, or _PER_STAGE for each stage if that is more: with more, the
# fixed cost of an action would dominate.
_ENOUGH = 16
_PER_STAGE = 8
_ROUNDS = 2  # least number of rounds over all sizes


def trial_sizes(counts: Sequence[int], num_stages: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of micro-batches to profile with, and up to three others to measure the effect of sizes.

    The first number is large, so that devices are not full. The others are the smallest number, one between the two,
    and one between that and the large number, where the best setting mostly is.

    Args:
        counts: numbers of micro-batches to choose from.
        num_stages: K, number of stages.
    """
    counts = sorted(set(counts))
    cap = max(_ENOUGH, _PER_STAGE * num_stages)
    large = max((m for m in counts if m <= cap), default=counts[0])
    below = [m for m in counts if m < large]
    if not below:
        return large, ()
    least = below[0]
    middle = _between(below, least, large)
    return large, tuple(sorted({least, middle, _between(below, middle, large)}, reverse=True))


def affordable(others: Sequence[int], iterations: int) -> tuple[int, ...]:
    """Return those of the other sizes that can be measured within a number of iterations.

    Args:
        others: numbers of micro-batches, descending. The first ones, which are nearest to that of the profile, are left
            out first.
        iterations: number of iterations, at least 4.
    """
    most = (iterations - 2) // _ROUNDS - 1
    return tuple(others[max(0, len(others) - most) :])


def _between(counts: Sequence[int], low: int, high: int) -> int:
    """Return the count that is nearest to the geometric mean of ``low`` and ``high``."""
    return min(counts, key=lambda m: abs(m * m - low * high))


def durations(
    spans: Iterable[tuple[int, Kind, float]], span_s: Sequence[tuple[float, float]] = ()
) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of an action of each stage and kind.

    Args:
        spans: stage, kind and seconds of each action of one process.
        span_s: for each iteration the seconds in which the process was busy, and the seconds within actions. The time
            between actions is distributed over them; empty: it is not counted.
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for stage, kind, seconds in spans:
        found.setdefault((stage, kind), []).append(seconds)
    factor = max(1.0, statistics.median(busy / within for busy, within in span_s)) if span_s else 1.0
    return {key: factor * statistics.median(seconds) for key, seconds in found.items()}

"""Trials: at which sizes to measure, and what measurements say about a curve, a stage, the best setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_avgpipe.planning.plan import format_seconds
from lightning_avgpipe.schedule import Kind
from lightning_avgpipe.tuning.profile import Curve, Profile
from lightning_avgpipe.tuning.scaling import update_s
from lightning_avgpipe.tuning.search import Candidate, Result
from lightning_avgpipe.tuning.setting import Setting

_ENOUGH = 16  # micro-batches that leave a device under-used, at least, ...
_PER_STAGE = 8  # ... and so many per stage: with more, what an action costs whatever its size is most of it
_ROUNDS = 2  # of all sizes, at least
_PIECES = 16


def trial_sizes(counts: Sequence[int], num_stages: int) -> tuple[int, tuple[int, ...]]:
    """The number of micro-batches to profile with, and up to three others to see what the size of micro-batches does.

    The first is large, so that devices are not full. The others are the smallest one, one in the middle between, and,
    since what is best is mostly there, one between that and the large one.

    Args:
        counts: numbers of micro-batches to choose from.
        num_stages: K.
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
    """Those of the other sizes that so many iterations are enough for.

    Args:
        others: descending; the first, which are nearest to the size of the profile, are left out first.
        iterations: at least 4.
    """
    most = (iterations - 2) // _ROUNDS - 1
    return tuple(others[max(0, len(others) - most) :])


def _between(counts: Sequence[int], low: int, high: int) -> int:
    """The one that is nearest to the geometric mean."""
    return min(counts, key=lambda m: abs(m * m - low * high))


def rounds(iterations: int, sizes: int) -> int:
    """How many rounds of one iteration at each size, beside one to warm up and one for the memory.

    Args:
        iterations: at most, at least 4.
        sizes: their number; the others are affordable.
    """
    return (iterations - 2) // sizes


def durations(
    spans: Iterable[tuple[int, Kind, float]], span_s: Sequence[tuple[float, float]] = ()
) -> dict[tuple[int, Kind], float]:
    """Seconds of an action of each stage and kind.

    Args:
        spans: stage, kind and seconds of each action of one process.
        span_s: of each iteration seconds in which the process was busy, and those within actions. What lies between
            actions is time that they take from others; none: that is not counted.
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for stage, kind, seconds in spans:
        found.setdefault((stage, kind), []).append(seconds)
    factor = max(1.0, statistics.median(busy / within for busy, within in span_s)) if span_s else 1.0
    return {key: factor * statistics.median(seconds) for key, seconds in found.items()}


def busy_curve(kernels: Iterable[tuple[float, float, float]], begin_s: float, end_s: float) -> Curve:
    """How much of a device its kernels use within an action.

    Args:
        kernels: begin, end and share of the device of each.
        begin_s: of the action, on the same clock.
        end_s: of the action.
    """
    length = (end_s - begin_s) / _PIECES
    work = [0.0] * _PIECES
    for begin, end, share in kernels:
        for i in range(_PIECES):
            low = begin_s + i * length
            work[i] += share * max(0.0, min(end, low + length) - max(begin, low))
    return Curve((length,) * _PIECES, tuple(min(1.0, w / length) if length > 0 else 0.0 for w in work))


def best(result: Result, count: int) -> tuple[Candidate, ...]:
    """The best candidates of those that fit, by prediction, the chosen one first.

    Of those that differ in their advance only, and not in what is predicted, the one that needs the least memory.
    """
    fitting = [c for c in result.candidates if c.fits(result.limit) and c != result.choice]
    fitting.sort(key=lambda c: (c.cost_s, max(c.prediction.memory), c.setting))
    found = [result.choice]
    for candidate in fitting:
        if not any(_predicted_alike(candidate, other) for other in found):
            found.append(candidate)
    return tuple(found[:count])


def _predicted_alike(one: Candidate, other: Candidate) -> bool:
    same = replace(one.setting, advance=other.setting.advance) == other.setting
    return same and math.isclose(one.cost_s, other.cost_s)


def refined(result: Result, measured: Mapping[Setting, float]) -> Result:
    """Choose by measurements in the place of predictions.

    Args:
        result: of the search.
        measured: of some settings, seconds per batch.
    """
    if not measured:
        return result
    by_setting = {c.setting: c for c in result.candidates}
    setting = min(measured, key=lambda s: (measured[s] * by_setting[s].samples, s))
    choice = by_setting[setting]
    expected = "at least " * choice.prediction.at_least + format_seconds(choice.prediction.per_batch_s)
    reason = f"{format_seconds(measured[setting])} a batch, the shortest of {len(measured)} that were tried ({expected}"
    return replace(result, choice=choice, reason=f"{reason} was expected)")


def per_batch_s(profile: Profile, setting: Setting, iteration_s: float) -> float:
    """Seconds of a batch, from those of an iteration without its optimizer steps and averaging."""
    return (iteration_s + update_s(profile, setting.num_pipelines)) / setting.num_pipelines

"""The search for the best setting: predict all settings, and choose the fastest that fits the memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.planning.plan import format_seconds
from lightning_avgpipe.tuning.predictors import Prediction, Predictor, memory_at
from lightning_avgpipe.tuning.profile import Profile, Setting
from lightning_avgpipe.utils.names import table

ADVANCES = (0, 1, 2, 4, 8)

MEASURED_SAMPLES: Mapping[int, float] = {1: 1.0, 2: 1.2, 4: 1.7}
"""The samples that N pipelines need until a goal, relative to one, by N: medians of nine trainings with
``outer_lr="auto"``, from ``python benchmarks/statistical_efficiency.py``."""

ROLLING_SAMPLES: Mapping[int, float] = {1: 1.0, 2: 1.0, 4: 1.14}
"""Further factors for rolling pipelines by N: medians of six trainings of two seeds each, from
``python benchmarks/statistical_efficiency.py --without-barrier rolling``, see docs/parallel_pipelines.md."""

SPLIT_SAMPLES: Mapping[int, float] = {1: 1.0, 2: 1.0, 4: 1.03}
"""As ``MEASURED_SAMPLES``, if rolling pipelines divide batches: medians of nine trainings, from
``python benchmarks/statistical_efficiency.py --without-barrier split``, see docs/parallel_pipelines.md."""

SamplesFactor = float | Mapping[int, float] | None

_ROUNDING = 1e-9  # relative: times that differ by less differ only in the order of their additions


@dataclass(frozen=True)
class Candidate:
    """A setting with its prediction.

    Attributes:
        setting: M, N, and the schedule.
        prediction: predicted time and memory of the setting.
        samples: samples until a goal, as a multiple of the samples that one pipeline needs.
    """

    setting: Setting
    prediction: Prediction
    samples: float = 1.0

    @property
    def cost_s(self) -> float:
        """The seconds in which the setting learns as much as one pipeline from a batch."""
        return self.prediction.per_batch_s * self.samples

    def lacking(self, memory_limit: float) -> tuple[int, float]:
        """Return the stage that needs most memory, and by how many bytes it exceeds the limit; negative if it fits."""
        stage = max(range(len(self.prediction.memory)), key=self.prediction.memory.__getitem__)
        return stage, self.prediction.memory[stage] - memory_limit

    def fits(self, memory_limit: float) -> bool:
        """Return whether every stage stays within the limit."""
        return self.lacking(memory_limit)[1] <= 0


@dataclass(frozen=True)
class Result:
    """The result of a search: the candidates, the choice and its reason; ``str(result)`` is a table.

    Attributes:
        profile: profile from which everything is predicted.
        memory_limit: bytes that no stage may exceed; None for no limit.
        candidates: all settings that were considered. For those that cannot be the fastest with their number of
            pipelines, the time may be only a lower bound.
        choice: chosen candidate.
        reason: why it was chosen.
    """

    profile: Profile
    memory_limit: float | None
    candidates: tuple[Candidate, ...]
    choice: Candidate
    reason: str

    @property
    def limit(self) -> float:
        """The memory limit in bytes, infinite without a limit."""
        return math.inf if self.memory_limit is None else self.memory_limit

    def best(self, num_microbatches: int | None = None, num_pipelines: int | None = None) -> Candidate | None:
        """Return the best candidate with this M and N (None: any); if none fits, the one that lacks least memory."""
        found = [
            candidate
            for candidate in self.candidates
            if num_microbatches in (None, candidate.setting.num_microbatches)
            and num_pipelines in (None, candidate.setting.num_pipelines)
        ]
        fitting = [candidate for candidate in found if candidate.fits(self.limit)]
        if fitting:
            return _fastest(fitting)
        return min(found, key=lambda candidate: candidate.lacking(self.limit)[1], default=None)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("pipelines", "micro-batches", "schedule", "a batch", "samples", "fullest stage", "")
        ]
        for n in sorted({candidate.setting.num_pipelines for candidate in self.candidates}):
            best = self.choice if n == self.choice.setting.num_pipelines else self.best(num_pipelines=n)
            assert best is not None
            rows.append(self._row(best))
        return "\n".join([*table(rows), f"{self.choice.setting}: {self.reason}"])

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        setting, (stage, lacking) = candidate.setting, candidate.lacking(self.limit)
        note = f"lacks {nbytes(lacking)}" if lacking > 0 else "chosen" if candidate == self.choice else ""
        return (
            str(setting.num_pipelines),
            str(setting.num_microbatches),
            setting.order,
            time_in_words(candidate),
            f"x {candidate.samples:.2f}",
            f"{nbytes(candidate.prediction.memory[stage])} on {stage}",
            note,
        )


def candidates(
    profile: Profile,
    max_num_pipelines: int,
    microbatch_candidates: Sequence[int] | None = None,
    advances: Iterable[int] = ADVANCES,
    schedule: str = "advance_forward",
    rolling: bool | Literal["auto"] = False,
    split: bool = False,
) -> tuple[Setting, ...]:
    """Return all settings to consider.

    Args:
        profile: profile with the batch size and the number of stages.
        max_num_pipelines: largest N; N goes from 1 to this number.
        microbatch_candidates: all M; default: the divisors of the batch size, or the powers of two up to it if there
            are more of those.
        advances: all h. Those that change nothing are left out. Only advance forward propagation uses them.
        schedule: name of the schedule.
        rolling: whether several pipelines roll; ``"auto"``: both are considered.
        split: whether several pipelines divide each batch, into as many micro-batches as are considered for one.
    Raises:
        TuningError: a batch cannot be split into M micro-batches.
    """
    counts = microbatch_counts(profile.batch_size, microbatch_candidates)
    usable = sorted(set(advances)) if schedule == "advance_forward" else [0]
    kinds = (False, True) if rolling == "auto" else (rolling,)
    found = []
    for m in counts:
        distinct: dict[tuple[int, ...], int] = {}
        for h in usable:
            distinct.setdefault(Setting(m, 1, h, schedule).warm_up(profile.num_stages), h)
        found += [Setting(m, 1, h, schedule) for h in distinct.values()]
        several = [n for n in range(2, max_num_pipelines + 1) if not split or m * n in counts]
        found += [
            Setting(m, n, h, schedule, rolls, split) for n in several for h in distinct.values() for rolls in kinds
        ]
    return tuple(found)


def microbatch_counts(batch_size: int, given: Sequence[int] | None) -> list[int]:
    """Return all M to consider, ascending.

    Args:
        batch_size: number of samples of a batch.
        given: all M to consider; default: as for :func:`candidates`.
    Raises:
        TuningError: a batch cannot be split into M micro-batches.
    """
    if given is not None:
        counts = sorted(set(given))
        if not counts or any(not 1 <= m <= batch_size for m in counts):
            raise TuningError(
                f"microbatch_candidates={counts}: give numbers from 1 to {batch_size}, the samples of a batch"
            )
        return counts
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    powers = [2**i for i in range(batch_size.bit_length())]
    return divisors if len(divisors) >= len(powers) else powers


def search(
    profile: Profile,
    settings: Sequence[Setting],
    memory_limit: float | None = None,
    samples_factor: SamplesFactor = 1.0,
) -> Result:
    """Choose the setting with the shortest predicted time per batch, times samples to a goal, among those that fit.

    Of equally fast settings the one whose fullest stage needs the least memory is taken. First, lower bounds of all
    times are computed. Then, in the order of these bounds, only those settings are predicted that fit and may be the
    fastest with their N.

    Args:
        profile: profile of one setting.
        settings: settings to consider, as ``candidates`` returns them; at least one.
        memory_limit: bytes that no stage may exceed; None for no limit.
        samples_factor: factor of samples that N models need, see ``samples_at``.
    Raises:
        TuningError: none fits. The message says how much memory is missing on which stage, and what would help.
    """
    limit = math.inf if memory_limit is None else memory_limit
    found = _predicted(profile, settings, limit, samples_factor)
    fitting = [candidate for candidate in found if candidate.fits(limit)]
    if not fitting:
        raise TuningError(_nothing_fits(profile, found, limit))
    choice = _fastest(fitting)
    reason = _reason(choice, found, fitting, limit)
    return Result(profile, None if limit == math.inf else limit, found, choice, reason)


def _predicted(
    profile: Profile, settings: Sequence[Setting], limit: float, factor: SamplesFactor
) -> tuple[Candidate, ...]:
    predictor = Predictor(profile)
    samples = [samples_at(factor, setting.num_pipelines, setting.rolling, setting.split) for setting in settings]
    found = list(map(Candidate, settings, map(predictor.bound, settings), samples))
    best: dict[tuple[int, bool], float] = {}  # seconds per batch, of settings that need the same factor of samples
    for i in sorted(range(len(found)), key=lambda i: (found[i].prediction.at_least, found[i].prediction.per_batch_s)):
        candidate, kind = found[i], (found[i].setting.num_pipelines, found[i].setting.rolling)
        known = best.get(kind, math.inf)
        if not candidate.fits(limit) or candidate.prediction.per_batch_s > known * (1 + _ROUNDING):
            continue
        if candidate.prediction.at_least:
            candidate = found[i] = replace(candidate, prediction=predictor.predict(candidate.setting))
        best[kind] = min(known, candidate.prediction.per_batch_s)
    return tuple(found)


def _fastest(fitting: Sequence[Candidate]) -> Candidate:
    least = min(candidate.cost_s for candidate in fitting)
    equal = [c for c in fitting if c.cost_s <= least * (1 + _ROUNDING)]
    return min(equal, key=lambda c: (max(c.prediction.memory), sum(c.prediction.memory), c.setting))


def _reason(choice: Candidate, found: Sequence[Candidate], fitting: Sequence[Candidate], limit: float) -> str:
    text = f"{format_seconds(choice.prediction.per_batch_s)} a batch, the {_least(found)} of {len(fitting)} settings"
    if len(fitting) < len(found):
        text += f" that fit {nbytes(limit)} ({len(found)} considered)"
    fastest = _fastest(found)
    if not fastest.fits(limit):
        stage, lacking = fastest.lacking(limit)
        text += f"; {fastest.setting} would take {time_in_words(fastest)}, but lacks {nbytes(lacking)} on stage {stage}"
    return text


def _least(found: Sequence[Candidate]) -> str:
    weighed = any(candidate.samples != 1.0 for candidate in found)
    return "least time to a goal" if weighed else "shortest"


def time_in_words(candidate: Candidate) -> str:
    """Return the predicted time of a batch as text, marked if it is only a lower bound."""
    return "at least " * candidate.prediction.at_least + format_seconds(candidate.prediction.per_batch_s)


def _nothing_fits(profile: Profile, found: Sequence[Candidate], limit: float) -> str:
    nearest = min(found, key=lambda candidate: candidate.lacking(limit)[1])
    stage, lacking = nearest.lacking(limit)
    needed = memory_at(profile, nearest.setting)[stage]
    helps = []
    if nearest.setting.num_microbatches < profile.batch_size and needed.stash + needed.working > 0:
        helps.append(f"more micro-batches (up to {profile.batch_size})")
    if nearest.setting.num_pipelines > 1:
        helps.append("fewer pipelines")
    if needed.stash > 0:
        helps.append(f"recomputing activations (their stash takes {nbytes(needed.stash)})")
    if needed.models > 0:
        helps.append(
            f"more stages (parameters, gradients and optimizer states of stage {stage} take {nbytes(needed.models)})"
        )
    helps.append("a higher memory_limit")
    return (
        f"none of {len(found)} settings fits memory_limit={nbytes(limit)}: the smallest, {nearest.setting}, needs "
        f"{nbytes(needed.total)} on stage {stage}, {nbytes(lacking)} too much. What would help: {', '.join(helps)}"
    )


def samples_at(factor: SamplesFactor, num_pipelines: int, rolling: bool = False, split: bool = False) -> float:
    """Return the samples until a goal, as a multiple of the samples that one pipeline needs.

    Args:
        factor: one factor for every N above 1; or factors by N, linear in the logarithm of N between two entries, and
            extrapolated from the last two; None: the measured factors. A given factor also holds for rolling pipelines.
        num_pipelines: N, number of parallel pipelines.
        rolling: whether pipelines average one at a time.
        split: whether pipelines divide each batch.
    """
    if num_pipelines == 1:
        return 1.0
    if isinstance(factor, (int, float)):
        return float(factor)
    if factor is None and split:
        return samples_at(SPLIT_SAMPLES, num_pipelines)
    if factor is None:
        more = samples_at(ROLLING_SAMPLES, num_pipelines) if rolling else 1.0
        return samples_at(MEASURED_SAMPLES, num_pipelines) * more
    known = sorted({1: 1.0, **factor}.items())
    if len(known) == 1:
        return 1.0
    (n, low), (m, high) = next(
        (pair for pair in itertools.pairwise(known) if num_pipelines <= pair[1][0]), (known[-2], known[-1])
    )
    return low + (high - low) * math.log(num_pipelines / n) / math.log(m / n)

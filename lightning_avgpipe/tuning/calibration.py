"""Calibration: a predictor, corrected by what whole iterations took.

Predictors know what actions take by the median, and real ones take now more and now less. A stage waits for the one
that is late, the more often the more micro-batches there are::

    stage 0 | F0 F1  .  F2 B0 .. |        predicted 1.00 s, took 1.09 s: all times of this M are multiplied by 1.09
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_avgpipe.tuning.predictors import Paper, Prediction, Predictor
from lightning_avgpipe.tuning.profile import Profile
from lightning_avgpipe.tuning.scaling import interpolated, update_s
from lightning_avgpipe.tuning.setting import Setting


@dataclass(frozen=True)
class Calibrated:
    """Multiplies what a predictor says of an iteration by what the trials of one pipeline took of it, at least 1.

    The ratio is that of the same number of micro-batches, between those of trials linear in its logarithm. Optimizer
    steps and averaging are not multiplied. Other pipelines fill some of the waits, and an advance shortens them, by how
    much is not known: so the ratio is the same for every N and advance, and favours none.

    Args:
        predictor: that knows nothing of trials.
        ratios: number of micro-batches, and took over predicted; ascending, not empty.
    """

    predictor: Predictor
    ratios: tuple[tuple[int, float], ...]

    @property
    def name(self) -> str:
        """That of the predictor."""
        return self.predictor.name

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        return self._corrected(profile, setting, self.predictor.predict(profile, setting))

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Quickly, as the predictor does."""
        found = self.predictor.bounds(profile, settings)
        return [self._corrected(profile, setting, bound) for setting, bound in zip(settings, found, strict=True)]

    def _corrected(self, profile: Profile, setting: Setting, prediction: Prediction) -> Prediction:
        points = [(math.log(m), ratio) for m, ratio in self.ratios]
        ratio = interpolated(points, math.log(setting.num_microbatches))
        update = min(prediction.iteration_s, update_s(profile, setting.num_pipelines))
        seconds = ratio * (prediction.iteration_s - update) + update
        return replace(prediction, iteration_s=seconds, per_batch_s=seconds / setting.num_pipelines)


def calibrated(predictor: Predictor, profile: Profile) -> Predictor:
    """By the trials of the profile; without any the predictor itself, and so is ``Paper``, which stays as printed."""
    if isinstance(predictor, Paper):
        return predictor
    ratios = {}
    for trial in profile.trials:
        expected = predictor.predict(profile, trial.setting).iteration_s - update_s(profile, 1)
        if expected > 0:
            ratios[trial.setting.num_microbatches] = max(1.0, trial.span_s / expected)
    return Calibrated(predictor, tuple(sorted(ratios.items()))) if ratios else predictor

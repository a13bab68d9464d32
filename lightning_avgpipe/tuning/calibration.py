"""Calibration: correct a predictor by the measured times of whole iterations.

Predictors use the median times of actions, but real times vary. A stage waits for each action that is late, and the
more micro-batches there are, the more often it waits::

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
    """A predictor whose iteration times are multiplied by a ratio, at least 1, of measured and predicted times.

    The ratios come from trials of one pipeline. Between the numbers of micro-batches of trials, the ratio is linear in
    the logarithm of M. Optimizer steps and averaging are not multiplied. Other pipelines fill some of the waits, and an
    advance shortens them, by unknown amounts. So the ratio is the same for every N and advance.

    Args:
        predictor: predictor without calibration.
        ratios: (number of micro-batches, measured over predicted time), ascending, not empty.
    """

    predictor: Predictor
    ratios: tuple[tuple[int, float], ...]

    @property
    def name(self) -> str:
        """The name of the predictor."""
        return self.predictor.name

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        return self._corrected(profile, setting, self.predictor.predict(profile, setting))

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Return the predictor's quick lower bounds, multiplied by the ratios."""
        found = self.predictor.bounds(profile, settings)
        return [self._corrected(profile, setting, bound) for setting, bound in zip(settings, found, strict=True)]

    def _corrected(self, profile: Profile, setting: Setting, prediction: Prediction) -> Prediction:
        points = [(math.log(m), ratio) for m, ratio in self.ratios]
        ratio = interpolated(points, math.log(setting.num_microbatches))
        update = min(prediction.iteration_s, update_s(profile, setting.num_pipelines))
        seconds = ratio * (prediction.iteration_s - update) + update
        return replace(prediction, iteration_s=seconds, per_batch_s=seconds / setting.num_pipelines)


def calibrated(predictor: Predictor, profile: Profile) -> Predictor:
    """Calibrate a predictor by the trials of a profile; return it unchanged without trials, or if it is ``Paper``."""
    if isinstance(predictor, Paper):
        return predictor
    ratios = {}
    for trial in profile.trials:
        expected = predictor.predict(profile, trial.setting).iteration_s - update_s(profile, 1)
        if expected > 0:
            ratios[trial.setting.num_microbatches] = max(1.0, trial.span_s / expected)
    return Calibrated(predictor, tuple(sorted(ratios.items()))) if ratios else predictor

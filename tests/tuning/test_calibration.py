"""Calibration: what whole iterations took, in what is predicted and chosen."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.tuning.predictors import Corrected, Predictor, Simulator, calibrated
from lightning_avgpipe.tuning.profile import Profile, Setting, Trial
from lightning_avgpipe.tuning.scaling import update_s
from lightning_avgpipe.tuning.search import candidates, search
from tests.profiles import random_profile

PROFILE = random_profile(1)
CLOSE = 1e-9


def slowed(predictor: Predictor, ratios: dict[int, float]) -> Profile:
    """With trials that took so many times what a predictor says, by number of micro-batches."""
    trials = []
    for m, ratio in ratios.items():
        expected = predictor.predict(PROFILE, Setting(m)).iteration_s - update_s(PROFILE, 1)
        trials.append(Trial(Setting(m), ratio * expected))
    return dataclasses.replace(PROFILE, trials=tuple(trials))


@pytest.mark.parametrize("predictor", [Corrected(), Simulator()], ids=lambda p: p.name)
def test_at_the_sizes_of_trials_what_they_took_is_predicted(predictor: Predictor) -> None:
    profile = slowed(predictor, {16: 1.3, 4: 1.1})
    known = calibrated(predictor, profile)
    for trial in profile.trials:
        found = known.predict(profile, trial.setting).iteration_s
        assert found == pytest.approx(trial.span_s + update_s(PROFILE, 1), rel=CLOSE)
    assert known.name == predictor.name


def test_the_search_leaves_a_size_at_which_stages_wait_for_each_other() -> None:
    settings = candidates(PROFILE, 1)
    fastest = search(PROFILE, settings).choice.setting.num_microbatches
    others = sorted({setting.num_microbatches for setting in settings} - {fastest})
    profile = slowed(Corrected(), {fastest: 10.0, **dict.fromkeys(others, 1.0)})
    result = search(profile, settings)
    assert result.choice.setting.num_microbatches != fastest
    assert result.best(num_microbatches=fastest).prediction.per_batch_s > result.choice.prediction.per_batch_s  # type: ignore[union-attr]


def test_trials_survive_json_and_those_that_cannot_be_are_refused() -> None:
    profile = slowed(Corrected(), {16: 1.3, 4: 1.1})
    assert Profile.from_json(profile.to_json()) == profile
    for trial in (Trial(Setting(4, 2), 1.0), Trial(Setting(4), math.inf), Trial(Setting(4), -1.0)):
        with pytest.raises(TuningError, match="of one pipeline, its time finite and not negative"):
            dataclasses.replace(PROFILE, trials=(trial,))

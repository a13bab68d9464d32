"""The predictor of the time of an iteration and of its memory at any setting, from a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_avgpipe.schedule import InTurns, SideBySide, build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.tuning.profile import Profile, Setting
from lightning_avgpipe.tuning.scaling import interpolated, loads_at, memory_at, update_s

_ROLLING = 8  # number of simulated iterations


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a setting.

    Attributes:
        iteration_s: seconds of an iteration: all its batches, optimizer steps, averaging.
        per_batch_s: seconds of an iteration per batch, which the search minimises.
        memory: bytes of each stage at its peak, shape ``(K,)``.
        at_least: whether the times are only a lower bound of the predictor's times.
    """

    iteration_s: float
    per_batch_s: float
    memory: tuple[int, ...]
    at_least: bool = False


class Predictor:
    """Predicts settings from a profile by simulating every action and message of an iteration.

    If pipelines roll, several iterations are simulated, and those in the middle count. A pipeline waits for its own
    update while others run. An iteration takes at least as long as all work and updates of the busiest device or link.

    The simulation uses the median times of actions, but real times vary. A stage waits for each action that is late,
    and the more micro-batches there are, the more often it waits. So times are multiplied by the ratio of measured to
    simulated time, which is at least 1::

        stage 0 | F0 F1  .  F2 B0 .. |    simulated 1.00 s, took 1.09 s: all times of this M are multiplied by 1.09

    The ratios come from the profile's trials of one pipeline. Between the numbers of micro-batches of trials, the ratio
    is linear in the logarithm of M. Optimizer steps and averaging are not multiplied. Other pipelines fill some of the
    waits, and an advance shortens them, by unknown amounts; so the same ratio is used for every N and advance.

    Args:
        profile: measurements at one setting.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        # What a pipeline waits for on each stage between two iterations. Stages without tied parameters need not wait
        # for their sums, but the first stage, with which each iteration begins and ends, mostly has some.
        self._updates_s = [stage.step_s + stage.averaging_s + profile.tied_s for stage in profile.stages]
        self._simulated: dict[tuple[int, int, int, bool, tuple[int, ...], tuple[int, ...]], float] = {}
        alone = {trial.setting: self._simulated_s(trial.setting, profile.devices) for trial in profile.trials}
        ratios = {
            math.log(trial.setting.num_microbatches): max(1.0, trial.span_s / alone[trial.setting])
            for trial in profile.trials
            if alone[trial.setting] > 0
        }
        self._ratios = sorted(ratios.items())

    def predict(self, setting: Setting) -> Prediction:
        """Predict a setting."""
        seconds = self._simulated_s(setting, self._profile.devices)
        return self._prediction(setting, self._updated_s(setting, seconds))

    def bound(self, setting: Setting) -> Prediction:
        """Return a quick lower bound of a setting's times, with ``at_least``; or its prediction if that is as quick.

        The bound is the work of the busiest device or link, or one pipeline with a device for each stage if this takes
        longer.
        """
        profile, stages = self._profile, tuple(range(self._profile.num_stages))
        apart = len(set(profile.devices)) == len(stages)
        if setting.num_pipelines == 1 and apart:
            return self.predict(setting)
        seconds = self._simulated_s(setting, profile.devices if apart else stages, alone=True)
        if setting.rolling:
            seconds += min(self._updates_s)
        else:
            seconds = max(seconds, self._busiest_s(setting, updates=False))
        return self._prediction(setting, self._updated_s(setting, seconds), at_least=True)

    def _updated_s(self, setting: Setting, seconds: float) -> float:
        """Return the seconds of an iteration with its updates, given the simulated seconds."""
        if not setting.rolling:
            return seconds + update_s(self._profile, setting.num_pipelines)
        return max(seconds, self._busiest_s(setting))

    def _simulated_s(self, setting: Setting, devices: tuple[int, ...], alone: bool = False) -> float:
        """Return the simulated seconds of an iteration, up to the end of its last action; if it rolls, with updates.

        Args:
            setting: setting with the sizes and the order of micro-batches.
            devices: number of the device of each stage.
            alone: whether only one of the pipelines runs, once.
        """
        profile, m, n = self._profile, setting.num_microbatches, 1 if alone else setting.num_pipelines
        rolls = setting.rolling and not alone
        # a warm-up decides the rows of a schedule
        key = m, n, setting.parts, rolls, setting.warm_up(profile.num_stages), devices
        if key not in self._simulated:
            schedule = build(setting.schedule, profile.num_stages, m, setting.advance)
            sharing = InTurns if profile.in_turns else SideBySide
            count, loads = _ROLLING if rolls else 1, loads_at(profile, setting.parts)
            timeline = simulate([schedule] * n, loads, devices, sharing, count, updates_s=self._updates_s)
            self._simulated[key] = timeline.steady_s if rolls else timeline.iteration_s
        return self._simulated[key]

    def _busiest_s(self, setting: Setting, updates: bool = True) -> float:
        """Return the seconds that the busiest device or link works for a batch of each pipeline.

        Args:
            setting: setting with the numbers of micro-batches and of pipelines.
            updates: whether optimizer steps, averaging, and sums of gradients of tied parameters count as well.
        """
        profile, m, n = self._profile, setting.num_microbatches, setting.num_pipelines
        loads, work_s = loads_at(profile, setting.parts), dict[int, float]()
        for k, (device, stage) in enumerate(zip(profile.devices, profile.stages, strict=True)):
            batch_s = m * loads.work_s(k) + updates * (stage.step_s + stage.averaging_s)
            work_s[device] = work_s.get(device, 0.0) + n * batch_s
        sending_s = n * (m * loads.longest_send_s + updates * profile.tied_s)
        return max(sending_s, *work_s.values())

    def _prediction(self, setting: Setting, seconds: float, at_least: bool = False) -> Prediction:
        if self._ratios:
            update = min(seconds, update_s(self._profile, 1 if setting.rolling else setting.num_pipelines))
            ratio = interpolated(self._ratios, math.log(setting.num_microbatches))
            seconds = ratio * (seconds - update) + update
        memory = tuple(needed.total for needed in memory_at(self._profile, setting))
        return Prediction(seconds, seconds / setting.batches, memory, at_least)

"""The predictor of the time of an iteration and of its memory at any setting, from a profile that is scaled to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_avgpipe.schedule import BACKWARD, FORWARD, InTurns, Kind, SideBySide, StageCosts, build
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.tuning.profile import Curve, Profile, Setting, StageProfile

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


# -- times and memory at a setting other than the profiled one ---------------------------------------------------------


@dataclass(frozen=True)
class Loads(StageCosts):
    """The times of all actions and messages at a number of micro-batches, on devices that may serve lanes side by side.

    Attributes:
        curves: utilisation of the device by an action of each stage while no other lane runs, shape ``(K,)``.
    """

    curves: Mapping[Kind, Sequence[Curve]] = field(default_factory=dict)

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the parts of an action: seconds and utilisation."""
        curve = self.curves[kind][stage]
        return tuple(zip(curve.seconds, curve.utilisation, strict=True))

    def work_s(self, stage: int) -> float:
        """Return the seconds of a fully used device that a forward and a backward of a stage take."""
        return self.curves[FORWARD][stage].work_s + self.curves[BACKWARD][stage].work_s

    @property
    def longest_send_s(self) -> float:
        """The seconds for which the slowest message of a micro-batch occupies its link."""
        return max((*self.send_forward_s, *self.send_backward_s), default=0.0)


def loads_at(profile: Profile, num_microbatches: int) -> Loads:
    """Scale a profile, which was measured with m micro-batches of a batch, to M = ``num_microbatches`` of them.

    A micro-batch m/M times as large has m/M times the utilisation, and takes longer only where this exceeds 1. Its
    messages have m/M times the bytes.
    """
    size = profile.num_microbatches / num_microbatches
    forward = [_scaled(profile, num_microbatches, stage, "forward") for stage in profile.stages]
    backward = [_scaled(profile, num_microbatches, stage, "backward") for stage in profile.stages]
    return Loads(
        [curve.total_s for curve in forward],
        [curve.total_s for curve in backward],
        [size * hop.forward_bytes * hop.link.per_byte for hop in profile.hops],
        [size * hop.backward_bytes * hop.link.per_byte for hop in profile.hops],
        [hop.link.latency for hop in profile.hops],
        curves={FORWARD: forward, BACKWARD: backward},
    )


def _scaled(profile: Profile, num_microbatches: int, stage: StageProfile, direction: str) -> Curve:
    curve: Curve = getattr(stage, direction)
    scaled = curve.stretched(profile.num_microbatches / num_microbatches)
    factor = _correction(profile, stage, direction, num_microbatches)
    if profile.in_turns:  # nothing else runs meanwhile
        return Curve.constant(factor * scaled.total_s, 1.0)
    return Curve(tuple(factor * s for s in scaled.seconds), scaled.utilisation)


def _correction(profile: Profile, stage: StageProfile, direction: str, num_microbatches: int) -> float:
    """Return measured over predicted seconds, linear in the logarithm of M between measured sizes."""
    if not stage.others:
        return 1.0
    curve: Curve = getattr(stage, direction)
    known = {float(profile.num_microbatches): 1.0}
    for other in stage.others:
        predicted = curve.stretched(profile.num_microbatches / other.num_microbatches).total_s
        measured = other.forward_s if direction == "forward" else other.backward_s
        if predicted > 0 and other.num_microbatches != profile.num_microbatches:
            known[float(other.num_microbatches)] = measured / predicted
    return interpolated(sorted((math.log(m), ratio) for m, ratio in known.items()), math.log(num_microbatches))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points with ascending x; outside of them the result is constant."""
    return float(np.interp(x, [at for at, _ in points], [y for _, y in points]))


def update_s(profile: Profile, num_pipelines: int) -> float:
    """Return the seconds at the end of an iteration of N pipelines.

    These are the sums of gradients of tied parameters, and the optimizer steps and averaging of the slowest device.
    """
    averages = profile.averages(num_pipelines)
    per_device: dict[int, float] = {}
    for device, stage in zip(profile.devices, profile.stages, strict=True):
        seconds = num_pipelines * (stage.step_s + (stage.averaging_s if averages else 0.0))
        per_device[device] = per_device.get(device, 0.0) + seconds
    return max(per_device.values()) + num_pipelines * profile.tied_s


@dataclass(frozen=True)
class Needed:
    """The bytes that one stage needs at its peak.

    Attributes:
        fixed: bytes of the context of the device, the reference model and its accumulator.
        models: bytes of parameters, gradients and optimizer states of all pipelines.
        stash: bytes that all micro-batches in flight keep for their backwards.
        working: bytes of transient tensors and message buffers of one micro-batch of each pipeline.
    """

    fixed: int
    models: int
    stash: int
    working: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.fixed + self.models + self.stash + self.working


def memory_at(profile: Profile, setting: Setting) -> tuple[Needed, ...]:
    """Return the memory that each stage needs, shape ``(K,)``.

    ``F_k = context + reference + N model + N S_k A / P + N (Q + I) / P``, with S_k stashed micro-batches, of which a
    batch has P, and the activations A, transients Q and message buffers I of a full batch. With one parallel model
    there is no reference.
    All N pipelines may be at their peak at once. Rolling iterations need N + 1 further copies of the reference: the
    start values of each model, and the reference before the iteration.
    """
    n, parts = setting.num_pipelines, setting.parts
    needed = []
    references = (1 + (n + 1) * setting.rolling) if profile.averages(n) else 0
    for stage, stashed in zip(profile.stages, setting.stash(profile.num_stages), strict=True):
        memory = stage.memory
        needed.append(
            Needed(
                fixed=memory.context + references * memory.reference,
                models=n * memory.model,
                stash=math.ceil(n * stashed * memory.activations / parts),
                working=math.ceil(n * (memory.transient + memory.boundary) / parts),
            )
        )
    return tuple(needed)

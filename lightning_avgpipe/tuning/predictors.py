"""Predictors of the time of an iteration and of its memory at any setting, from a profile.

There are three predictors with one interface. ``Paper`` implements the equations of AvgPipe's paper as printed, for
comparison. ``Corrected`` is a closed form without their errors. ``Simulator`` simulates the iteration. All predict
memory in the same way. Measured times of whole iterations calibrate them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_avgpipe.schedule import InTurns, SideBySide, build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.tuning.profile import Profile, Setting
from lightning_avgpipe.tuning.scaling import Load, Loads, interpolated, loads_at, memory_at, update_s

_ROLLING = 8  # number of simulated iterations, of which those in the middle are counted


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a setting.

    Attributes:
        iteration_s: seconds of an iteration: a batch of each pipeline, optimizer steps, averaging.
        per_batch_s: seconds of an iteration per batch, which the search minimises.
        memory: bytes of each stage at its peak, shape ``(K,)``.
        at_least: whether the times are only a lower bound of the predictor's times.
    """

    iteration_s: float
    per_batch_s: float
    memory: tuple[int, ...]
    at_least: bool = False


class Predictor(Protocol):
    """The interface of predictors."""

    @property
    def name(self) -> str:
        """The name of the predictor in messages and files."""
        ...

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        ...

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Return for each setting quickly either its prediction or, with ``at_least``, lower bounds of its times."""
        return [self.predict(profile, setting) for setting in settings]


@dataclass(frozen=True)
class Paper(Predictor):
    """A predictor with equations 2, 4, 6 and 7 of the paper as printed.

    These equations have errors. Equation 2 gives the computation of one batch and equation 4 the communication of an
    iteration with N batches, so that communication per batch grows with N, and both are added. The schedule has no
    influence, and forwards and backwards are not distinguished, nor are both directions of a link. The time of a link
    includes the latency of every message, though latencies overlap. The end of an iteration is left out. As equation 2
    is for a batch, the sum is taken as the time per batch.

    Source: Chen et al., AvgPipe, PPoPP 2023, section 5.
    """

    name: str = "paper"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile by its slowest stage."""
        m, n = setting.num_microbatches, setting.num_pipelines
        compute = [_printed_compute_s(profile, k, m, n) for k in range(profile.num_stages)]
        growth = n / profile.num_pipelines
        messages = [growth * _printed_communication_s(profile, k) for k in range(profile.num_stages)]
        up = _summed([(g + c) / m for g, c in zip(compute, messages, strict=True)])
        down = _summed([(g + c) / m for g, c in zip(reversed(compute), reversed(messages), strict=True)])[::-1]
        exposed = [c / m + (m - 1) / m * max(c - g, 0.0) for g, c in zip(compute, messages, strict=True)]
        per_batch_s = max(map(sum, zip(compute, exposed, up, down, strict=True)))
        return _prediction(profile, setting, n * per_batch_s)


def _printed_compute_s(profile: Profile, stage: int, m: int, n: int) -> float:
    """Return the computation of a batch by equation 2, with forward and backward as one curve."""
    demand = profile.num_microbatches * n / (m * profile.num_pipelines)
    found = profile.stages[stage]
    total = found.forward.total_s + found.backward.total_s
    beyond = found.forward.stretched_s(demand) + found.backward.stretched_s(demand) - total
    return profile.num_microbatches / demand * (total + beyond)


def _printed_communication_s(profile: Profile, stage: int) -> float:
    """Return the seconds that a stage sends in an iteration of the profile, by equation 4."""
    seconds = 0.0
    if stage < profile.num_stages - 1:
        hop = profile.hops[stage]
        seconds += hop.forward_bytes * hop.forward.per_byte + hop.forward.latency
    if stage > 0:
        hop = profile.hops[stage - 1]
        seconds += hop.backward_bytes * hop.backward.per_byte + hop.backward.latency
    return profile.num_microbatches * profile.num_pipelines * seconds


def _summed(seconds: Sequence[float]) -> list[float]:
    """Return for each entry the sum of all entries before it."""
    return list(itertools.accumulate(seconds, initial=0.0))[:-1]


@dataclass(frozen=True)
class Corrected(Predictor):
    """A predictor in closed form: the time of the first micro-batch, plus the time that the bottleneck adds.

    The first micro-batch takes the sum of its actions and messages through the pipeline and back. On devices that serve
    lanes side by side, the first micro-batches of all N pipelines run together. Every link separates them by the time
    of a message, so that they slow each other down less on the stage behind it.

    With AFAB, the slowest stage adds its other micro-batches in each direction, or the slowest link its other messages.
    With a warm-up w, forwards and backwards are one phase, and besides stages and links every round trip between two
    stages j < k may be the bottleneck: ``w_j - w_k + 1`` micro-batches make it at the same time. With a sufficient
    advance no round trip is the bottleneck.

    Rolling iterations take as long as one pipeline alone, or as the busiest device or link needs for all N. The
    simulator predicts up to a sixth more where a device is nearly full.
    """

    name: str = "corrected"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        if setting.rolling:
            return _prediction(profile, setting, _rolling_s(profile, setting, self))
        loads, m, n = loads_at(profile, setting), setting.num_microbatches, setting.num_pipelines
        there = _first_s(profile, loads.forward, (0.0, *loads.values_s), n)
        back = _first_s(profile, loads.backward, (*loads.gradients_s, 0.0), n)
        base = sum(there) + sum(back)
        base += sum(loads.values_s) + sum(loads.gradients_s) + sum(map(sum, loads.latency_s))
        forward, backward = (loads.forward, there), (loads.backward, back)
        if setting.schedule == "afab":
            extra = sum(
                max(_work_beyond_s(profile, setting, [phase]), (n * m - 1) * max(messages, default=0.0))
                for phase, messages in ((forward, loads.values_s), (backward, loads.gradients_s))
            )
        else:
            extra = max(
                _work_beyond_s(profile, setting, [forward, backward]),
                (n * m - 1) * max((*loads.values_s, *loads.gradients_s), default=0.0),
                _trips_beyond_s(loads, m, setting.warm_up(profile.num_stages)),
            )
        return _prediction(profile, setting, base + extra + loads.update_s)


def _first_s(profile: Profile, loads: Sequence[Load], gaps: Sequence[float], num_pipelines: int) -> list[float]:
    """Return the seconds of the first micro-batch on each stage; those of other pipelines follow at ``gaps``."""
    if profile.device.in_turns:
        return [load.alone_s for load in loads]
    return [max(load.alone_s, load.shared_s - (num_pipelines - 1) * gap) for load, gap in zip(loads, gaps, strict=True)]


def _work_beyond_s(
    profile: Profile, setting: Setting, phase: Sequence[tuple[Sequence[Load], Sequence[float]]]
) -> float:
    """Return the seconds that the slowest stage or device works in a phase, besides the first micro-batch.

    Args:
        profile: profile that is scaled.
        setting: setting that is predicted.
        phase: loads of each stage, with the seconds of the first micro-batch, in one or both directions.
    """
    m, n = setting.num_microbatches, setting.num_pipelines
    per_device: dict[int, float] = {}
    longest = 0.0
    for k, device in enumerate(profile.devices):
        first = sum(firsts[k] for _, firsts in phase)
        longest = max(longest, m * sum(loads[k].shared_s for loads, _ in phase) - first)
        work = n * m * sum(loads[k].work_s for loads, _ in phase)
        per_device[device] = per_device.get(device, 0.0) + work - first
    return max(longest, *per_device.values())


def _trips_beyond_s(loads: Loads, num_microbatches: int, warm_up: Sequence[int]) -> float:
    """Return the seconds of the slowest sequence of round trips between two stages, besides the first trip."""
    longest = 0.0
    for j, k in itertools.combinations(range(len(warm_up)), 2):
        trip = sum(load.alone_s for load in (*loads.forward[j : k + 1], *loads.backward[j : k + 1]))
        trip += sum(loads.values_s[j:k]) + sum(loads.gradients_s[j:k]) + sum(map(sum, loads.latency_s[j:k]))
        # before the first trip and after the last one, stage k runs its warm-up and as many backwards
        aside = warm_up[k] * (loads.forward[k].alone_s + loads.backward[k].alone_s)
        trips = (num_microbatches - 1 - warm_up[k]) // (warm_up[j] - warm_up[k] + 1)
        longest = max(longest, aside + trips * trip)
    return longest


@dataclass(frozen=True)
class Simulator:
    """A predictor that simulates every action and message of an iteration: the slowest and most accurate one."""

    name: str = "simulator"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        loads = loads_at(profile, setting)
        seconds = simulated_s(setting, loads, profile.devices, profile.device.in_turns)
        if setting.rolling:
            busy_s = _rolling_s(profile, setting, self)
            # where nothing is busy all the time, each pipeline waits for its own sums
            return _prediction(profile, setting, busy_s if seconds <= busy_s else seconds + profile.tied_s)
        return _prediction(profile, setting, seconds + loads.update_s)

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Return lower bounds: the work of devices and links, and one pipeline with a device for each stage."""
        alone: dict[tuple[int, tuple[int, ...]], float] = {}  # by M and warm-up
        stages = range(profile.num_stages)
        found = []
        for setting in settings:
            loads, key = loads_at(profile, setting), (setting.num_microbatches, setting.warm_up(len(stages)))
            if setting.rolling:
                found.append(_prediction(profile, setting, _rolling_s(profile, setting, self), at_least=True))
                continue
            if key not in alone:
                one = replace(setting, num_pipelines=1)
                alone[key] = simulated_s(one, loads, stages, profile.device.in_turns)
            seconds = max(alone[key], least_s(setting.num_microbatches, setting.num_pipelines, loads, profile.devices))
            exact = setting.num_pipelines == 1 and len(set(profile.devices)) == len(stages)
            found.append(_prediction(profile, setting, seconds + loads.update_s, at_least=not exact))
        return found


def _rolling_s(profile: Profile, setting: Setting, predictor: Predictor) -> float:
    """Return the seconds of a rolling iteration: of one pipeline alone, or of a device's or link's work for all.

    Gradients of tied parameters are summed, beside messages on the same links, while other pipelines compute.
    """
    one = replace(setting, num_pipelines=1, rolling=False)
    loads, m, n = loads_at(profile, setting), setting.num_microbatches, setting.num_pipelines
    per_device: dict[int, float] = {}
    for device, stage, forward, backward in zip(
        profile.devices, profile.stages, loads.forward, loads.backward, strict=True
    ):
        work_s = m * (forward.work_s + backward.work_s) + stage.step_s + stage.averaging_s
        per_device[device] = per_device.get(device, 0.0) + n * work_s
    alone_s = predictor.predict(profile, one).iteration_s + max(stage.averaging_s for stage in profile.stages)
    sending_s = n * (m * max((*loads.values_s, *loads.gradients_s), default=0.0) + profile.tied_s)
    return max(alone_s, max(per_device.values()), sending_s)


def _prediction(profile: Profile, setting: Setting, seconds: float, at_least: bool = False) -> Prediction:
    memory = tuple(needed.total for needed in memory_at(profile, setting))
    return Prediction(seconds, seconds / setting.num_pipelines, memory, at_least)


def simulated_s(setting: Setting, loads: Loads, devices: Sequence[int], in_turns: bool) -> float:
    """Return the seconds until the last action of all pipelines has ended; rolling, the mean of an iteration.

    Args:
        setting: setting with the schedule and the number of pipelines, which all begin at once.
        loads: times of one micro-batch on each stage and hop.
        devices: device of each stage, shape ``(K,)``.
        in_turns: whether a device runs one action at a time.
    """
    schedule = build(setting.schedule, loads.num_stages, setting.num_microbatches, setting.advance)
    iterations = _ROLLING if setting.rolling else 1
    sharing = InTurns if in_turns else SideBySide
    return simulate([schedule] * setting.num_pipelines, loads, devices, sharing, iterations).steady_s


def least_s(num_microbatches: int, num_pipelines: int, loads: Loads, devices: Sequence[int]) -> float:
    """Return a lower bound for the seconds of an iteration with any order of actions.

    ::

        stage 0 | F_                      B_
        stage 1 |    F_                B_           a device waits for its first value, does the work of all pipelines,
        stage 2 |       F_ N M (f+b) B_             and its last gradient travels back; likewise for links

    Args:
        num_microbatches: M, number of micro-batches of a batch.
        num_pipelines: N, number of parallel pipelines.
        loads: times of one micro-batch on each stage and hop.
        devices: device of each stage, shape ``(K,)``.
    """
    count, before = num_microbatches * num_pipelines, 0.0  # before: to stage k and back
    work: dict[int, float] = {}
    for k, (f, b, device) in enumerate(zip(loads.forward, loads.backward, devices, strict=True)):
        work[device] = work.get(device, before) + count * (f.work_s + b.work_s)
        before += f.alone_s + b.alone_s
        if k < len(loads.latency_s):
            before += loads.values_s[k] + loads.gradients_s[k] + sum(loads.latency_s[k])
    messages = max((*loads.values_s, *loads.gradients_s), default=0.0)
    return max(*work.values(), before + (count - 1) * messages)


@dataclass(frozen=True)
class Calibrated:
    """A predictor whose iteration times are multiplied by a ratio, at least 1, of measured and predicted times.

    Predictors use the median times of actions, but real times vary. A stage waits for each action that is late, and the
    more micro-batches there are, the more often it waits::

        stage 0 | F0 F1  .  F2 B0 .. |    predicted 1.00 s, took 1.09 s: all times of this M are multiplied by 1.09

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


PREDICTORS: dict[str, Predictor] = {predictor.name: predictor for predictor in (Paper(), Corrected(), Simulator())}

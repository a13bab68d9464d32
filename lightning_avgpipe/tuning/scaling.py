"""Scaling: what actions and messages take at another setting than the profiled one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_avgpipe.schedule import BACKWARD, FORWARD, Kind
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.kinds import Direction
from lightning_avgpipe.tuning.profile import Curve, Profile, StageProfile
from lightning_avgpipe.tuning.setting import Setting

_PIECES = 8  # of a curve, at most; more take time and change little


@dataclass(frozen=True)
class Load:
    """One micro-batch of one pipeline on one stage, in one direction.

    Attributes:
        alone_s: seconds while no other lane runs.
        shared_s: seconds while those of all N pipelines run together (in turns: of all of them, one after another).
        work_s: seconds of the device that it takes from others.
        curve: what ``alone_s`` and ``shared_s`` come from, scaled.
    """

    alone_s: float
    shared_s: float
    work_s: float
    curve: Curve


@dataclass(frozen=True)
class Loads:
    """Everything that takes time at a setting; the costs of a simulation.

    Attributes:
        forward: of each stage, shape ``(K,)``.
        backward: the same.
        values_s: time for which values of a micro-batch occupy the link of each hop, shape ``(K-1,)``.
        gradients_s: the same for gradients.
        latency_s: of each hop: values, gradients.
        update_s: optimizer steps and averaging at the end of an iteration.
    """

    forward: tuple[Load, ...]
    backward: tuple[Load, ...]
    values_s: tuple[float, ...]
    gradients_s: tuple[float, ...]
    latency_s: tuple[tuple[float, float], ...]
    update_s: float

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.forward)

    def pieces(self, kind: Kind, stage: int) -> Pieces:
        """Of an action: seconds and utilisation; a long curve becomes few pieces of equal length with the same work."""
        curve = {FORWARD: self.forward, BACKWARD: self.backward}[kind][stage].curve
        if len(curve.seconds) <= _PIECES or curve.total_s == 0:
            return tuple(zip(curve.seconds, curve.utilisation, strict=True))
        length = curve.total_s / _PIECES
        return tuple((length, min(1.0, work / length)) for work in _work_per_slice(curve, length))

    def message_s(self, direction: Direction, hop: int) -> tuple[float, float]:
        """Of a message: seconds for which it occupies its link, and from then until it arrives."""
        if direction == "forward":
            return self.values_s[hop], self.latency_s[hop][0]
        return self.gradients_s[hop], self.latency_s[hop][1]


def _work_per_slice(curve: Curve, length: float) -> list[float]:
    work = [0.0] * _PIECES
    begin = 0.0
    for seconds, utilisation in zip(curve.seconds, curve.utilisation, strict=True):
        end = begin + seconds
        for i in range(_PIECES):
            overlap = min(end, (i + 1) * length) - max(begin, i * length)
            work[i] += max(0.0, overlap) * utilisation
        begin = end
    return work


def loads_at(profile: Profile, setting: Setting) -> Loads:
    """Scale a profile.

    A micro-batch m/M times as large asks for m/M times the utilisation, which takes longer only where that exceeds the
    device. Its messages have m/M times the bytes.
    """
    size = profile.num_microbatches / setting.num_microbatches
    return Loads(
        tuple(_load(profile, setting, stage, "forward") for stage in profile.stages),
        tuple(_load(profile, setting, stage, "backward") for stage in profile.stages),
        tuple(size * hop.forward_bytes * hop.forward.per_byte for hop in profile.hops),
        tuple(size * hop.backward_bytes * hop.backward.per_byte for hop in profile.hops),
        tuple((hop.forward.latency, hop.backward.latency) for hop in profile.hops),
        update_s(profile, setting.num_pipelines),
    )


def _load(profile: Profile, setting: Setting, stage: StageProfile, direction: str) -> Load:
    curve: Curve = getattr(stage, direction)
    # side by side, the profile's utilisation is that of its n pipelines together
    together = 1 if profile.device.in_turns else profile.num_pipelines
    alone = profile.num_microbatches / setting.num_microbatches / together
    factor = _correction(profile, stage, direction, setting.num_microbatches)
    scaled = curve.stretched(alone)
    scaled = Curve(tuple(factor * s for s in scaled.seconds), scaled.utilisation)
    if profile.device.in_turns:
        return Load(scaled.total_s, setting.num_pipelines * scaled.total_s, scaled.total_s, scaled)
    shared_s = factor * curve.stretched_s(alone * setting.num_pipelines)
    return Load(scaled.total_s, shared_s, scaled.work_s, scaled)


def _correction(profile: Profile, stage: StageProfile, direction: str, num_microbatches: int) -> float:
    """Measured over predicted seconds, between the measured sizes linear in the logarithm of M."""
    if not stage.others:
        return 1.0
    curve: Curve = getattr(stage, direction)
    known = {float(profile.num_microbatches): 1.0}
    for other in stage.others:
        predicted = curve.stretched_s(profile.num_microbatches / other.num_microbatches)
        measured = other.forward_s if direction == "forward" else other.backward_s
        if predicted > 0 and other.num_microbatches != profile.num_microbatches:
            known[float(other.num_microbatches)] = measured / predicted
    return interpolated(sorted((math.log(m), ratio) for m, ratio in known.items()), math.log(num_microbatches))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between points that ascend linear, outside of them constant."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[0][1] if x < points[0][0] else points[-1][1]


def update_s(profile: Profile, num_pipelines: int) -> float:
    """Seconds at the end of an iteration: sums over tied parameters, optimizer steps and averaging of N pipelines.

    Of steps and averaging, those of the slowest device.
    """
    averages = profile.averages(num_pipelines)
    per_device: dict[int, float] = {}
    for device, stage in zip(profile.devices, profile.stages, strict=True):
        seconds = num_pipelines * (stage.step_s + (stage.averaging_s if averages else 0.0))
        per_device[device] = per_device.get(device, 0.0) + seconds
    return max(per_device.values()) + num_pipelines * profile.tied_s
